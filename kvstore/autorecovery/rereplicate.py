"""Makes missing copies when an operator asks: replaces a lost bookie in closed ledgers, or reads and repairs all
entries of one bookie.

Copying works as in auto-recovery. Each ledger is marked, locked and repaired as a replication worker would do it, but
at once, and the operator sees the outcome. Open ledgers are left to their writers, because only a writer may change the
ensembles of its open ledger (docs/protocol.md, W11).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore.autorecovery.repair_machine import AttemptHistory
from kvstore.autorecovery.repairer import LedgerRepairer, RepairOutcome
from kvstore.env import Env
from kvstore.errors import (
    LedgerError,
    MetadataError,
    NoSuchLedger,
    NoSuchNode,
    Unavailable,
    UndecodableNode,
    VersionConflict,
)
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import MarkLock, Underreplication
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.bookies import BookieClients
from kvstore.wal.choice import BookieChoice
from kvstore.wal.copies.copying import Copying
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.creator import owner_of
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.lists import LedgerLists
from kvstore.wal.ports import BookieClient
from kvstore.wal.repair import bookies_of

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of entries done, and the total number of entries."""

WORKER = "kvstore bookie"
"""Name of the lock holder for an operator's command."""
BUSY = "is being repaired by another worker; try again later"
BACK = "still names it, because it is back"
BUSY_CHECK_S, BUSY_CHECKS_MAX = 0.5, 120
"""Interval in seconds, and maximum number, of checks whether a worker has finished with a ledger that it locked
first."""
CALL_AGAIN = "it keeps its id; to remove it, stop its node and run the command again"
STILL_OPEN = "is open: its leader replaces the bookie or rolls to a new ledger; try again later"
UNREADABLE = "has unreadable metadata that may name the bookie: see `kvstore fsck`"
BYTES_PER_S = 32 << 20


@dataclass(frozen=True, slots=True)
class ReplacementOutcome:
    """The outcome of replacing a bookie in one ledger that named it."""

    ledger: LedgerId
    copied: int
    """Number of entries copied."""
    blocked: str
    """Reason why the ledger still names the bookie; empty if it no longer does."""


class Rereplicator:
    """Makes copies on an operator's request. Create it with `open_rereplicator`. Calls raise MetadataError if the
    metadata store cannot be read."""

    def __init__(
        self, env: Env, store: MetadataStore, view: BookieView, bookies: BookieClient, progress: Progress
    ) -> None:
        self._env, self._view, self._bookies, self._progress = env, view, bookies, progress
        self._ledgers = LedgerStore(store)
        self._lists = LedgerLists(store)
        self._cookies = CookieStore(store)
        self._registered = RegistrationClient(store)
        self._choice = BookieChoice(view, store, clock=env.clock, random=env.random)
        self._marks = Underreplication(store)
        self._pace = CopyPace(env.clock, BYTES_PER_S)
        ports = LedgerPorts(env.clock, bookies, self._ledgers, self._choice)
        self._repairer = LedgerRepairer(
            ports,
            store,
            env.nursery,
            self._pace,
            progress=lambda ledger, entry, last: progress(f"ledger {ledger}", entry, last + 1),
        )
        self.undecodable: list[LedgerId] = []
        """Ledgers whose metadata the last call of `named` could not read."""

    def limit(self, bytes_per_s: int) -> None:
        """Limit the rate of copying and reading to `bytes_per_s`."""
        self._pace.bytes_per_s = bytes_per_s

    def is_up(self, bookie: BookieId) -> bool:
        """Return True if the bookie is registered."""
        return bookie in self._view.current.all

    async def is_known(self, bookie: BookieId) -> bool:
        """Return True if the bookie has a cookie or at least one ledger names it. May read the metadata of all
        ledgers."""
        return bookie in await self._cookies.bookies() or bool(await self.named(bookie))

    async def named(self, bookie: BookieId | None = None) -> dict[LedgerId, LedgerMetadata]:
        """Return the ledgers that name the bookie, or all ledgers if `bookie` is None. Reads the metadata of every
        ledger. Ledgers with unreadable metadata are left out and added to `undecodable`; `kvstore fsck` reports
        them."""
        found = {}
        self.undecodable = []
        for ledger in await self._ledgers.list_ids():
            try:
                metadata, _ = await self._ledgers.read(ledger)
            except NoSuchLedger:
                continue
            except UndecodableNode:
                self.undecodable.append(ledger)
                continue
            if bookie is None or any(bookie in fragment.ensemble for fragment in metadata.fragments):
                found[ledger] = metadata
        return found

    async def replace(self, bookie: BookieId) -> list[ReplacementOutcome]:
        """Give the bookie's places in all closed ledgers to other bookies. Returns one outcome for each ledger that
        named the bookie, including ledgers in which it could not be replaced."""
        moved = []
        named = await self.named(bookie)
        moved += [ReplacementOutcome(ledger, 0, UNREADABLE) for ledger in self.undecodable]
        for ledger in sorted(named):
            try:
                moved.append(await self._replace_in(ledger, bookie))
            except NoSuchLedger:
                continue  # trimmed meanwhile
            except (LedgerError, MetadataError) as error:
                moved.append(ReplacementOutcome(ledger, 0, f"{type(error).__name__}: {error}"))
        return moved

    async def forget(self, bookie: BookieId) -> None:
        """Delete the cookie of a bookie that no ledger names, so that the bookie can never start again. Does nothing if
        there is no cookie. Raises Unavailable if the bookie is back or a ledger may name it."""
        try:
            # before the checks, because a start of the bookie raises the version
            cookie, version = await self._cookies.read(bookie)
            await self._refuse_if_needed(bookie)
            await self._cookies.delete(bookie, version)
        except NoSuchNode:
            return
        except VersionConflict:
            raise Unavailable(f"bookie {bookie} has just been started: {CALL_AGAIN}") from None
        if bookie in await self._registered.names():  # it registered in between, and has seen its cookie
            await self._cookies.write(cookie, None)
            raise Unavailable(f"bookie {bookie} is back: {CALL_AGAIN}")

    async def _refuse_if_needed(self, bookie: BookieId) -> None:
        """Raise Unavailable if the bookie may still be needed. Registrations are checked last, because the bookie may
        come back during the long time that reading all ledgers takes."""
        named = await self.named(bookie)
        needing = [ledger for ledger, metadata in sorted(named.items()) if not await self._is_passed_over(metadata)]
        if needing or self.undecodable:
            raise Unavailable(
                f"bookie {bookie} may be named by ledgers {(needing + self.undecodable)[:5]}: {CALL_AGAIN}"
            )
        if bookie in await self._registered.names():
            raise Unavailable(f"bookie {bookie} is back: {CALL_AGAIN}")

    async def _is_passed_over(self, metadata: LedgerMetadata) -> bool:
        return metadata.state is not LedgerState.CLOSED and await self._was_passed_over(metadata)

    async def _replace_in(self, ledger: LedgerId, bookie: BookieId) -> ReplacementOutcome:
        metadata, _ = await self._ledgers.read_latest(ledger)
        if metadata.state is not LedgerState.CLOSED:
            return ReplacementOutcome(ledger, 0, "" if await self._is_passed_over(metadata) else STILL_OPEN)
        for _ in range(BUSY_CHECKS_MAX):
            await self._marks.mark(ledger, [bookie], self._env.clock.date_ms())
            lock = await self._marks.lock(ledger, WORKER)
            outcome = await self._repair(lock) if lock is not None else None
            still, _ = await self._ledgers.read_latest(ledger)
            copied = outcome.copied if outcome is not None else 0
            if bookie not in bookies_of(still):
                return ReplacementOutcome(ledger, copied, "")
            if outcome is not None:
                return ReplacementOutcome(ledger, copied, outcome.reason or BACK)
            await asyncio.sleep(BUSY_CHECK_S)
        return ReplacementOutcome(ledger, 0, BUSY)

    async def _repair(self, lock: MarkLock) -> RepairOutcome:
        """Repair the ledger, and remove its mark or release the lock. If this raises MetadataError, the lock ends with
        the session."""
        outcome = await self._repairer.repair(
            lock.mark.ledger, lock.mark.replicas, AttemptHistory(), is_held=lambda: lock.is_held
        )
        if outcome.is_complete:
            await self._marks.mark_replicated(lock, lock.mark.version)
        else:
            await lock.release()
        return outcome

    async def _was_passed_over(self, metadata: LedgerMetadata) -> bool:
        """Return True if the log continued without this open ledger. The ids of a log's ledgers rise, so the ledger
        will never be listed or written to. The leader deletes it some minutes after its creation."""
        owner = owner_of(metadata)
        if owner is None:
            return False
        listed, _ = await self._lists.read(owner, latest=True)
        ids = [each.id for each in listed.ledgers]
        return bool(ids) and metadata.ledger not in ids and metadata.ledger < ids[-1]

    # ── checking the entries of one bookie ────────────────────────────────────────────────────────────────────────────

    async def scrub(self, bookie: BookieId, *, repair: bool) -> list[tuple[LedgerId, EntryId, str]]:
        """Read every entry that the bookie should have. Returns (ledger, entry, fault) for each entry without a good
        copy there. With `repair`, also copies each of these entries to the bookie again, and adds the result to the
        fault."""
        found: list[tuple[LedgerId, EntryId, str]] = []
        for ledger, metadata in sorted((await self.named(bookie)).items()):
            found += await self._scrub_ledger(ledger, metadata, bookie, repair=repair)
        return found

    async def _scrub_ledger(
        self, ledger: LedgerId, metadata: LedgerMetadata, bookie: BookieId, *, repair: bool
    ) -> list[tuple[LedgerId, EntryId, str]]:
        found = []
        copying = Copying(metadata, self._bookies, self._env.nursery, self._pace)
        last = metadata.last_entry if metadata.state is LedgerState.CLOSED else await self._confirmed(copying.reader)
        async for entry, what, is_certain in copying.faults(bookie, last, lambda at: self._noticed(ledger, at, last)):
            if is_certain and copying.is_given_up(entry):
                continue  # abandoned, so nobody needs it (docs/protocol.md A14)
            fault = what
            if repair and self._choice.is_readonly(bookie):
                fault += "; not repaired: the bookie is read-only"
            elif repair:
                try:
                    await copying.copy(entry, [bookie])
                    fault += "; copied there again"
                except LedgerError as error:
                    fault += f"; not repaired: {error}"
            found.append((ledger, entry, fault))
        return found

    def _noticed(self, ledger: LedgerId, entry: EntryId, last: EntryId) -> None:
        self._progress(f"ledger {ledger}", entry, last + 1)

    async def _confirmed(self, reader: EntryReader) -> EntryId:
        """Return the last confirmed entry of an open ledger that any of its bookies reports."""
        last = EntryId(reader.metadata.fragments[-1].first - 1)
        for bookie in reader.metadata.fragments[-1].ensemble:
            try:
                last = max(last, await self._bookies.read_lac(bookie, reader.metadata.ledger, reader.digest))
            except LedgerError:
                continue
        return last


@asynccontextmanager
async def open_rereplicator(
    env: Env, store: MetadataStore, progress: Progress = lambda *_: None
) -> AsyncIterator[Rereplicator]:
    """Create a Rereplicator that follows the registered bookies until the context ends. Raises MetadataError."""
    view, nursery = BookieView(store), env.nursery.child("bookies")
    await view.start(nursery)
    bookies = BookieClients(env, view.address, cluster=await LayoutStore(store).instance_id())
    try:
        yield Rereplicator(env, store, view, bookies, progress)
    finally:
        bookies.close()
        await nursery.close()
