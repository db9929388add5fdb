"""The auditor: finds lost bookies and marks the ledgers that name them as under-replicated. Every node runs a
candidate, and only the elected candidate acts (docs/protocol.md, A4 to A6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvstore.autorecovery.absences import BookieAbsences
from kvstore.autorecovery.auditor_role import AuditorRole
from kvstore.autorecovery.checks import Checks
from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.traversal import every_ledger
from kvstore.autorecovery.verdicts import lost_of
from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import StoreError, UndecodableNode
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore, Watch
from kvstore.types import BookieId, LedgerMetadata
from kvstore.wal.choice import BookieChoice
from kvstore.wal.ports import BookieClient
from kvstore.wal.repair import bookies_of

log = logging.getLogger(__name__)

CHECK_S = 10.0
"""Seconds between two checks of the registered bookies, if no watch fires earlier."""
VOTE_CHECK_S = 30.0
"""Seconds between two checks of the votes by a candidate, if no watch fires earlier."""
AUDIT_AGAIN_S = 3_600.0
"""Seconds between two audits of all ledgers. An audit learns which bookies the ledgers name, and restores a removed
mark of a lost bookie."""
RETRY_S = 5.0
MARKS_AT_ONCE = 16
"""Maximum number of marks written concurrently. Each mark takes about seven sequential requests to the metadata
store."""
MARKS_PER_S = 200
"""Maximum number of marks per second. One audit marks all ledgers of a lost bookie, which may be very many."""


class Auditor:
    """One node's candidate for the auditor role. It does the auditor's work while it is elected."""

    def __init__(
        self,
        env: Env,
        store: MetadataStore,
        config: AutorecoveryConfig,
        candidate: str,
        *,
        bookies: BookieClient,
        choice: BookieChoice,
    ) -> None:
        self._env, self._store, self._config, self._candidate = env, store, config, candidate
        self._role = AuditorRole(store, candidate, env.clock)
        self._settings = RecoverySettings(store)
        self._registrations, self._cookies = RegistrationClient(store), CookieStore(store)
        self._checks = Checks(self._role, self._settings, config, env, bookies=bookies, choice=choice)
        self._nursery = env.nursery.child("auditor")
        self._absences = BookieAbsences()
        self._lost: frozenset[BookieId] = frozenset()
        self._marked_for: frozenset[BookieId] = frozenset()
        """Lost bookies whose ledgers are all marked."""
        self._lost_throughout: frozenset[BookieId] = frozenset()
        """Bookies that every check since the start of the current audit has found lost."""
        self._named: frozenset[BookieId] = frozenset()
        """Bookies that some ensemble named in the last audit. A bookie without a cookie may still have copies that are
        needed."""
        self._audited_at: float | None = None
        self._rounds = self._round_ledgers = 0
        self._round_s = 0.0
        self._is_acting = False
        self._vote_at = 0.0
        self._hint, self._audit = asyncio.Event(), asyncio.Event()
        self._watches: list[Watch] = []

    def start(self) -> None:
        """Run for election as auditor, and do the auditor's work while elected, until `close`."""
        self._watches = [
            self._role.votes.watch(self._votes_changed),
            *self._registrations.watch(self._hint.set),
            self._settings.watch_enabled(self._hint.set),
            self._settings.watch_lost_bookie_delay(self._hint.set),
        ]
        self._nursery.spawn(self._check_bookies_periodically(), name="check bookies")
        self._nursery.spawn(self._audit_on_request(), name="audit ledgers")
        self._nursery.spawn(self._checks.run(), name="check ledgers")

    async def close(self) -> None:
        """Stop, and withdraw the vote so that another candidate becomes the auditor."""
        for watch in self._watches:
            watch.close()
        await self._nursery.close()
        try:
            await self._role.votes.withdraw()
        except StoreError as error:
            log.info("vote not withdrawn, it ends with the session auditor=%s error=%r", self._candidate, error)

    def statistics(self) -> dict[str, float]:
        """Return the auditor's counters and gauges, by name."""
        is_auditor = self._role.votes.is_auditor
        marked = {f"marked_{why}_total": count for why, count in self._role.marked.items()}
        return {
            "active": int(is_auditor),
            "enabled": int(self._role.is_enabled),
            "bookies_lost": len(self._lost & self._named) if is_auditor else 0,
            "rounds_total": self._rounds,
            "round_ledgers": self._round_ledgers,
            "round_seconds": round(self._round_s, 3),
            **marked,
            **self._checks.statistics(),
        }

    def _votes_changed(self) -> None:
        self._vote_at = 0.0
        self._hint.set()

    # ── which bookies are registered ──────────────────────────────────────────────────────────────────────────────────

    async def _check_bookies_periodically(self) -> None:
        wait_s, failed = 0.0, ""
        while True:
            await wait_within(self._hint, wait_s)
            self._hint.clear()
            try:
                wait_s, failed = await self._check_bookies(), ""
            except StoreError as error:
                wait_s = RETRY_S
                if repr(error) != failed:
                    failed = repr(error)
                    log.warning("check of bookies failed, retrying auditor=%s error=%s", self._candidate, failed)

    async def _check_bookies(self) -> float:
        """Check once which bookies are lost. Return the number of seconds until the next check."""
        if not await self._is_elected():
            return VOTE_CHECK_S
        self._role.is_enabled = await self._settings.is_enabled()
        if not self._role.is_enabled:
            self._absences.forget()
            self._lost = self._marked_for = self._lost_throughout = frozenset()
            return CHECK_S
        delay_s = await self._delay_s()
        known = {*await self._cookies.bookies(), *self._named}
        present = await self._registrations.names()
        now = self._env.clock.now()  # not earlier: a slow answer would make every absence look longer
        self._absences.seen(known, present, now)
        lost = self._absences.lost(delay_s, now)
        for bookie in sorted(lost - self._lost):
            log.warning("bookie is lost bookie=%s away_s=%d", bookie, delay_s)
        self._lost, self._marked_for = lost, self._marked_for & lost
        self._lost_throughout &= lost
        if lost - self._marked_for or self._is_audit_due(now):
            self._audit.set()
        return min(CHECK_S, self._absences.next_in_s(delay_s, now) or CHECK_S)

    def _is_audit_due(self, now: float) -> bool:
        return self._audited_at is None or now - self._audited_at >= AUDIT_AGAIN_S

    async def _is_elected(self) -> bool:
        """Return True if this node is the auditor. A newly elected auditor starts without knowledge of earlier
        absences."""
        votes, now = self._role.votes, self._env.clock.now()
        if self._is_acting and not votes.is_auditor:
            self._leave()
        if now >= self._vote_at:
            self._vote_at = now + VOTE_CHECK_S
            await votes.stand()
        if votes.is_auditor and not self._is_acting:
            await self._role.marks.ensure()
            await self._settings.initialise_lost_bookie_delay_s(self._config.lost_bookie_delay_s)
            self._is_acting = True
            log.info("elected as auditor auditor=%s", self._candidate)
        return votes.is_auditor and self._is_acting

    def _leave(self) -> None:
        log.info("no longer the auditor auditor=%s", self._candidate)
        self._is_acting = self._role.is_enabled = False
        self._absences.forget()
        self._lost = self._marked_for = self._lost_throughout = frozenset()
        self._audited_at = None
        self._vote_at = 0.0

    async def _delay_s(self) -> float:
        try:
            found = await self._settings.lost_bookie_delay_s()
        except UndecodableNode as error:
            log.warning("cannot read the stored lost-bookie delay, using the configured one error=%s", error)
            found = None
        return self._config.lost_bookie_delay_s if found is None else found

    # ── which ledgers name lost bookies ───────────────────────────────────────────────────────────────────────────────

    async def _audit_on_request(self) -> None:
        while True:
            await self._audit.wait()
            self._audit.clear()
            if not await tried(self._audit_all, "an audit of all ledgers"):
                await self._env.beat.pause(RETRY_S)
            self._audit.clear()  # the next check requests another audit if one is needed
            self._hint.set()  # the audit may have found bookies that were unknown

    # docs/protocol.md A5, A6
    async def _audit_all(self) -> None:
        """Mark every ledger that names a bookie which is lost now. A bookie that comes back during the audit is ignored
        from then on. If it is lost again later, it is not in `_marked_for`, because some of its ledgers may not be
        marked."""
        self._lost_throughout = self._lost
        named, count, began = set[BookieId](), 0, self._env.clock.now()
        found: list[LedgerMetadata] = []
        async for metadata in every_ledger(self._role.ledgers, self._role.ensure_may_act):
            count += 1
            named.update(bookies_of(metadata))
            if lost_of(metadata, self._lost):
                found.append(metadata)
            if len(found) == MARKS_AT_ONCE:
                await self._mark_all(found)
                await asyncio.sleep(MARKS_AT_ONCE / MARKS_PER_S)
                found = []
        await self._mark_all(found)
        self._role.ensure_may_act()
        self._named, self._marked_for = frozenset(named), self._lost_throughout
        self._audited_at = self._env.clock.now()
        self._rounds, self._round_ledgers, self._round_s = self._rounds + 1, count, self._audited_at - began
        if self._marked_for:
            log.info("marked every ledger that names a lost bookie bookies=%s", sorted(self._marked_for))

    async def _mark_all(self, found: list[LedgerMetadata]) -> None:
        """Mark the ledgers concurrently. Raises MetadataError if the outcome of any mark is unknown or an error."""
        tasks = [self._nursery.spawn(self._mark_or_error(metadata), name="mark") for metadata in found]
        errors = [await task for task in tasks]
        for error in errors:
            if error is not None:
                raise error

    async def _mark_or_error(self, metadata: LedgerMetadata) -> StoreError | None:
        try:
            if missing := lost_of(metadata, self._lost):
                await self._role.mark(metadata.ledger, missing, "lost")
        except StoreError as error:
            return error
        return None


async def tried(work: Callable[[], Awaitable[None]], what: str) -> bool:
    """Run `work` and return True. If it raises StoreError, log the error with the description `what`, and return
    False."""
    try:
        await work()
    except StoreError as error:
        log.info("%s was aborted error=%r", what, error)
        return False
    return True
