"""The auditor's periodic checks: whether every entry has all its copies, and whether the copies are in distinct
zones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvstore.autorecovery.auditor_role import AuditorRole
from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.traversal import every_ledger
from kvstore.autorecovery.verdicts import is_due, last_to_check
from kvstore.env import Env
from kvstore.errors import LedgerError, StoreError, UndecodableNode
from kvstore.meta.recovery_settings import CheckKind, RecoverySettings
from kvstore.types import NO_ENTRY, BookieId, LedgerMetadata, LedgerState
from kvstore.wal.choice import BookieChoice
from kvstore.wal.placement import leaving
from kvstore.wal.ports import BookieClient
from kvstore.wal.repair import bookies_of, missing_copies

log = logging.getLogger(__name__)

CHECK_S = 15.0
"""Seconds between two tests of whether a check is due."""
Verdict = Callable[[LedgerMetadata], Awaitable[list[BookieId]]]
"""Returns the bookies whose copies of a ledger are missing or share a zone."""


class Checks:
    """Runs the periodic checks of all ledgers while this node is the auditor."""

    def __init__(
        self,
        role: AuditorRole,
        settings: RecoverySettings,
        config: AutorecoveryConfig,
        env: Env,
        *,
        bookies: BookieClient,
        choice: BookieChoice,
    ) -> None:
        self._role, self._settings, self._config, self._env = role, settings, config, env
        self._bookies, self._choice = bookies, choice
        self._checked = 0
        self._unanswered = 0
        self._completed_ms: dict[CheckKind, int] = {}
        """Times of the last checks that this node completed, in milliseconds since 1970."""

    def statistics(self) -> dict[str, int]:
        """Return the counters of the checks, by name."""
        return {"checked_ledgers_total": self._checked, "check_unanswered_total": self._unanswered}

    async def run(self) -> None:
        """Run the checks when they are due, until cancelled."""
        while True:
            await self._env.beat.pause(CHECK_S)
            await self._try(CheckKind.PLACEMENT, "placement", self._config.placement_interval_s, self._misplaced)
            await self._try(CheckKind.ENTRIES, "entries", self._config.check_interval_s, self._lacking)

    async def _try(self, kind: CheckKind, why: str, interval_s: float, verdict: Verdict) -> None:
        if not interval_s or not self._role.may_act:
            return
        try:
            if is_due(await self._checked_ms(kind), self._env.clock.wall_ms(), interval_s):
                await self._check(why, verdict)
                self._completed_ms[kind] = self._env.clock.wall_ms()
                await self._settings.set_checked(kind, self._completed_ms[kind])
        except StoreError as error:
            log.info("check aborted kind=%s error=%r", why, error)

    # docs/protocol.md P34
    async def _checked_ms(self, kind: CheckKind) -> int | None:
        """Return the time of the last completed check in milliseconds since 1970. If the stored time cannot be read,
        the time of this node's last check counts."""
        try:
            return await self._settings.checked_ms(kind)
        except UndecodableNode as error:
            if kind not in self._completed_ms:
                log.warning("cannot read the time of the last check, checking now error=%s", error)
            return self._completed_ms.get(kind)

    async def _check(self, why: str, verdict: Verdict) -> None:
        """Check every ledger once, and mark those with missing or misplaced copies."""
        marked = self._role.marked[why]
        async for metadata in every_ledger(self._role.ledgers, self._role.ensure_may_act):
            if missing := await verdict(metadata):
                await self._role.mark(metadata.ledger, missing, why)
        self._role.ensure_may_act()
        log.info("checked every ledger kind=%s marked=%d", why, self._role.marked[why] - marked)

    # docs/protocol.md A8
    async def _misplaced(self, metadata: LedgerMetadata) -> list[BookieId]:
        """Return the bookies whose copies share a zone although a bookie in another zone could hold them."""
        if metadata.state is not LedgerState.CLOSED:
            return []  # owned by its writer, or to be closed first
        wanted = self._choice.spread_out(metadata)
        return leaving(metadata, wanted) if wanted is not None else []

    # docs/protocol.md A7
    async def _lacking(self, metadata: LedgerMetadata) -> list[BookieId]:
        """Return the registered bookies that do not list an entry which they should hold. A bookie does not list
        entries that it has found to be damaged (docs/protocol.md, B14)."""
        last = last_to_check(metadata)
        if last == NO_ENTRY:
            return []
        held = {}
        for bookie in bookies_of(metadata):
            if self._choice.is_registered(bookie):
                try:
                    held[bookie] = await self._bookies.entries(bookie, metadata.ledger)
                except LedgerError as error:
                    self._unanswered += 1
                    log.info(
                        "bookie did not list its entries ledger=%d bookie=%s error=%r", metadata.ledger, bookie, error
                    )
        found: set[BookieId] = set()
        for missing in missing_copies(metadata, last, held):
            found.update(each.bookie for each in missing)
            await asyncio.sleep(0)  # let other tasks run
        self._checked += 1
        await asyncio.sleep(1 / self._config.check_ledgers_per_s)
        return sorted(found)
