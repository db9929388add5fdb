"""Marked ledgers on the bench, created in one line each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from kvstore.errors import BookieError, StoreError
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.creator import OWNER_KEY
from kvstore.wal.lists import LedgerLists
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5, LEDGER, Bench, P, appended, first_seq

COUNT = 12


class Copies:
    """Counts recovery adds by (bookie, ledger, entry); some bookies may refuse them."""

    def __init__(self, bench: Bench) -> None:
        self.made: Counter[tuple[BookieId, LedgerId, EntryId]] = Counter()
        self._store = bench.bookies._store
        bench.bookies._store = self  # type: ignore[assignment]
        self.refusing: set[BookieId] = set()

    def __call__(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, packet: bytes, recovery: bool
    ) -> StoreError | None:
        if recovery and bookie in self.refusing:
            return BookieError(f"{bookie} takes no copies")
        if recovery:
            self.made[bookie, ledger, entry] += 1
        return self._store(bookie, ledger, entry, packet, recovery)


async def closed(bench: Bench, ledger: LedgerId = LEDGER, count: int = COUNT) -> None:
    """Create a closed ledger on B1, B2, B3, which are as old as the ledger."""
    metadata = LedgerMetadata(ledger, Quorum(3, 3, 2), (Fragment(EntryId(0), (B1, B2, B3)),), token=1)
    await bench.ledgers.create(metadata)
    handle = bench.handle(metadata)
    await appended(bench, handle, count)
    await handle.close()


async def recorded(bench: Bench, ledger: LedgerId = LEDGER) -> tuple[BookieId, ...]:
    metadata, _ = await bench.ports_on(MemoryStore(bench.tree)).ledgers.read(ledger)
    return metadata.fragments[0].ensemble


async def until(holds: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "the expected state was not reached"
        await asyncio.sleep(0.01)


async def until_unmarked(bench: Bench, *ledgers: LedgerId, within_s: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    for ledger in ledgers or (LEDGER,):
        while await bench.is_marked(ledger):
            assert asyncio.get_running_loop().time() < deadline, f"ledger {ledger} stays marked"
            await asyncio.sleep(0.01)


async def until_begun(bench: Bench) -> BookieId:
    """Wait for the first copies and return the new bookie that gets them."""
    newcomers = [bookie for bookie in (B4, B5) if bookie in bench.bookies.at]
    await until(lambda: any(len(bench.bookies.at[each].of(LEDGER)) >= 3 for each in newcomers))
    (newcomer,) = (each for each in newcomers if bench.bookies.at[each].of(LEDGER))
    assert len(bench.bookies.at[newcomer].of(LEDGER)) < COUNT
    return newcomer


def locks(bench: Bench) -> list[str]:
    return [path for path in bench.tree.paths() if path.startswith(f"{paths.MARK_LOCKS}/")]


async def of_a_log(bench: Bench, lease_ms: int) -> None:
    """Create an open ledger of COUNT entries, the last of p1's log, whose leader has died."""
    metadata = of_p1(LEDGER)
    await bench.ledgers.create(metadata)
    await listed(bench, LEDGER, lease_ms)
    handle = bench.handle(metadata)
    await appended(bench, handle, COUNT)
    handle.release()


def of_p1(ledger: LedgerId) -> LedgerMetadata:
    """Return the metadata of a ledger that was just created for p1's log."""
    ensemble = Fragment(EntryId(0), (B1, B2, B3))
    return LedgerMetadata(ledger, Quorum(3, 3, 2), (ensemble,), custom=((OWNER_KEY, P.encode()),), token=7)


async def listed(bench: Bench, ledger: LedgerId, lease_ms: int) -> None:
    """List the ledger as the last one of p1's log. Raises VersionConflict if it was changed after its creation."""
    lists = LedgerLists(bench.store)
    found, version = await lists.make(P)
    wanted = found.with_ledger(ledger, first_seq(), epoch=1, lease_ms=lease_ms)
    await lists.write(P, wanted, version, created=ledger)
