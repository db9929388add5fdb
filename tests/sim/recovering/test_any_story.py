"""Workers of several processes and random accidents, by seed. Bookies leave, return in the middle of a repair, stop
answering, or take no copies. Bits flip. Sessions end, and answers of the metadata store are lost. Foreign workers set
locks and marks, some marks are unreadable, and a ledger is deleted meanwhile. Rates are so low that one entry takes a
minute. Zones cannot be satisfied, and ensembles are wider than their write sets.

In the end every existing ledger has all its copies, nothing acknowledged is lost, and no mark and no lock is left
(docs/protocol.md, A1 to A3, A10 to A12).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest

from kvstore.errors import Corrupted, MetadataError, MetadataUnavailable, MetadataUnknown, NoSuchLedger, NoSuchNode
from kvstore.meta import ledger_metadata, marks, paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Change, Stat
from kvstore.proto.digest import EntryDigest
from kvstore.types import BookieId, DigestType, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from kvstore.wal.handle import LedgerHandle
from kvstore.wal.repair import bookies_of
from tests.sim.ledgers_and_logs.bench import NAMES, Appended, Bench, run
from tests.sim.recovering.cases import Copies, locks

pytestmark = pytest.mark.sim

QUORUMS = (Quorum(3, 3, 2), Quorum(3, 2, 2), Quorum(4, 2, 2), Quorum(4, 3, 2), Quorum(5, 3, 2))
LEDGERS = tuple(LedgerId(100 + number) for number in range(5))
DELETED, WRITTEN = LEDGERS[1], LEDGERS[4]
STRUCK_S, WHOLE_S_MAX = 60.0, 2_000.0
GRACE_S = 5.0


class LossyStore(MemoryStore):
    """A session whose requests and answers may be lost."""

    def __init__(self, tree: MemoryTree, luck: Random) -> None:
        super().__init__(tree)
        self.luck, self.loses = luck, True

    def _before(self) -> None:
        if self.loses and self.luck.random() < 0.04:
            raise MetadataUnavailable("the request did not arrive")

    def _after(self) -> None:
        if self.loses and self.luck.random() < 0.08:
            raise MetadataUnknown("the answer was lost")

    async def get(self, path: str) -> tuple[bytes, Stat]:
        self._before()
        return await super().get(path)

    async def children(self, path: str) -> list[str]:
        self._before()
        return await super().children(path)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._before()
        made = await super().create(path, data, ephemeral=ephemeral, sequential=sequential)
        self._after()
        return made

    async def set(self, path: str, data: bytes, version: int) -> int:
        self._before()
        found = await super().set(path, data, version)
        self._after()
        return found

    async def delete(self, path: str, version: int) -> None:
        self._before()
        await super().delete(path, version)
        self._after()

    async def multi(self, changes: list[Change]) -> None:  # type: ignore[override]
        self._before()
        await super().multi(changes)
        self._after()


class Story:
    """The story of one seed."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.luck = bench, Random(seed)
        self.copies = Copies(bench)
        self.written = {ledger: Appended() for ledger in LEDGERS}
        self.stores: list[LossyStore] = []
        self.handle: LedgerHandle | None = None
        """The handle of the ledger that is written all the time."""
        self.strangers: list[MemoryStore] = []

    # ── before ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self) -> None:
        bench, luck = self.bench, self.luck
        zones = luck.choice(("", "a", "ab", "aab", "abc"))
        for bookie in NAMES:
            bench.bookies.at[bookie].zone = luck.choice(zones) if zones else ""
        await bench.set_up(*NAMES)
        quorum = luck.choice(QUORUMS)
        for ledger in LEDGERS:
            ensemble = tuple(luck.sample(NAMES, quorum.ensemble))
            metadata = LedgerMetadata(ledger, quorum, (Fragment(EntryId(0), ensemble),), token=ledger)
            await bench.ledgers.create(metadata)
            self.handle = bench.handle(metadata)
            await self.append(ledger, luck.randrange(1, 40))
            if ledger in LEDGERS[:3]:
                await self.handle.close()
            elif ledger != WRITTEN:
                self.handle.release()  # its writer has died
        for number in range(3):
            store = LossyStore(bench.tree, luck)
            self.stores.append(store)
            bench.worker(f"w{number}", store=store, bytes_per_s=luck.choice((150, 1_000, 1 << 20)), grace_s=GRACE_S)

    async def append(self, ledger: LedgerId, count: int) -> None:
        assert self.handle is not None
        for _ in range(count):
            self.handle.append(self.payload(ledger), self.written[ledger].done)
            await self.bench.pass_time(0.01)
        await self.bench.pass_time(0.1)

    def payload(self, ledger: LedgerId) -> bytes:
        return b"entry of %d" % ledger

    # ── meanwhile ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def strike(self) -> None:
        strikes: list[Callable[[], object]] = [
            self.stop,
            self.stop,
            self.start,
            self.start,
            self.fall_silent,
            self.refuse,
            self.turn_bits,
            self.end_session,
            self.cut,
        ]
        loop, deleted = self.bench.world.loop, False
        until = loop.time() + STRUCK_S
        while loop.time() < until:
            await self.bench.pass_time(self.luck.expovariate(1.5))
            self.luck.choice(strikes)()
            if self.luck.random() < 0.2:
                await self.stranger()
            if self.luck.random() < 0.5:
                await self.mark_what_is_missing()
            if self.handle is not None and self.written[WRITTEN].confirmed and not self.bench.halted:
                self.handle.append(self.payload(WRITTEN), self.written[WRITTEN].done)
            if not deleted and loop.time() > until - STRUCK_S / 2:
                deleted = True
                with suppress(NoSuchLedger):
                    await self.bench.ledgers.remove(DELETED, -1)

    def any_bookie(self) -> BookieId:
        return self.luck.choice(NAMES)

    def stop(self) -> None:
        self.bench.bookies.stop(self.any_bookie())

    def start(self) -> None:
        self.bench.bookies.start(self.any_bookie())

    def fall_silent(self) -> None:
        model = self.bench.bookies.at[self.any_bookie()]
        model.is_silent = not model.is_silent and self.luck.random() < 0.5

    def refuse(self) -> None:
        self.copies.refusing ^= {self.any_bookie()}

    def turn_bits(self) -> None:
        """Flip bits in a copy of an entry of a closed ledger that has another good copy. In an open ledger, damage
        in the last entry might make its end unknowable."""
        bookies, ledger = self.bench.bookies.at, self.luck.choice(LEDGERS[:3])
        metadata = self.recorded(ledger)
        if metadata is None:
            return
        entry = EntryId(self.luck.randrange(metadata.last_entry + 1))
        key = ledger, entry
        good = [each for each in metadata.write_set(entry) if is_good(bookies[each].entries.get(key, b""), key)]
        if len(good) > 1:
            bookies[self.luck.choice(good)].entries[key] = b"?" * 60

    def recorded(self, ledger: LedgerId) -> LedgerMetadata | None:
        try:
            data, _ = self.bench.tree.get(paths.ledger(ledger))
        except NoSuchNode:
            return None
        return ledger_metadata.decode(ledger, data)

    def end_session(self) -> None:
        store = self.luck.choice(self.stores)
        store.expire()
        self.bench.world.loop.call_later(self.luck.uniform(0, 5), store.resume)

    def cut(self) -> None:
        store = self.luck.choice(self.stores)
        store.suspend()
        self.bench.world.loop.call_later(self.luck.uniform(0, 5), store.resume)

    async def stranger(self) -> None:
        """Act as a foreign worker that holds a lock for a while, or sets marks."""
        ledger, store = self.luck.choice(LEDGERS), MemoryStore(self.bench.tree)
        self.strangers.append(store)
        with suppress(MetadataError):
            if self.luck.random() < 0.5:
                await self.bench.marks.ensure()
                await store.create(paths.mark_lock(ledger), marks.encode_lock("10.0.0.9:3181"), ephemeral=True)
                self.bench.world.loop.call_later(self.luck.uniform(1, 15), store.expire)
            else:
                await self.bench.mark(ledger=ledger)
                twice = [self.any_bookie()] * 2
                data = self.luck.choice((b"\xff?", b"", marks.encode_mark(twice, 0), b'replica: "gone:3181"\n'))
                await store.set(paths.mark(ledger), data, -1)

    async def mark_what_is_missing(self) -> None:
        """Mark missing copies as auditors, checks and scrubs do."""
        for ledger in LEDGERS:
            with suppress(NoSuchLedger):
                metadata, _ = await LedgerStore(MemoryStore(self.bench.tree)).read(ledger)
                missing = {each for each in bookies_of(metadata) if self.bench.bookies.at[each].is_down}
                missing.update(bookie for bookie, _ in self.lacking(metadata))
                if missing:
                    await self.bench.mark(*missing, ledger=ledger)

    def lacking(self, metadata: LedgerMetadata) -> list[tuple[BookieId, EntryId]]:
        """Return the missing or wrong copies; of an open ledger, only those in its finished fragments."""
        is_closed = metadata.state is LedgerState.CLOSED
        last = metadata.last_entry if is_closed else metadata.fragments[-1].first - 1
        return [
            (bookie, entry)
            for entry in map(EntryId, range(last + 1))
            for bookie in metadata.write_set(entry)
            if not is_good(
                self.bench.bookies.at[bookie].entries.get((metadata.ledger, entry), b""), (metadata.ledger, entry)
            )
        ]

    # ── afterwards ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def calm(self) -> None:
        """Stop all accidents and let checks repeat."""
        bench = self.bench
        for store in self.strangers:
            if store.session:
                store.expire()
        for store in self.stores:
            store.loses = False
            store.resume()
        self.copies.refusing.clear()
        for model in bench.bookies.at.values():
            model.is_silent = False
        bench.bookies.start(*NAMES)
        deadline = bench.world.loop.time() + WHOLE_S_MAX
        while True:
            await self.mark_what_is_missing()
            marked = [ledger for ledger in LEDGERS if await bench.is_marked(ledger)]
            if not marked and not locks(bench):
                return
            assert bench.world.loop.time() < deadline, f"still marked: {marked}, locked: {locks(bench)}"
            await bench.pass_time(2)

    async def check(self) -> None:
        for ledger in LEDGERS:
            try:
                metadata, _ = await LedgerStore(MemoryStore(self.bench.tree)).read(ledger)
            except NoSuchLedger:
                assert ledger == DELETED
                continue
            assert ledger != DELETED, "the ledger stays deleted"
            assert self.lacking(metadata) == []
            confirmed = [position.entry for position in self.written[ledger].confirmed]
            assert confirmed == list(range(len(confirmed)))
            if metadata.state is LedgerState.CLOSED:
                assert metadata.last_entry >= len(confirmed) - 1, "acknowledged entries are there"
            for entry in map(EntryId, range(len(confirmed))):
                copies = [
                    self.bench.bookies.at[each].entries.get((ledger, entry), b"") for each in metadata.write_set(entry)
                ]
                assert sum(is_good(each, (ledger, entry)) for each in copies) >= metadata.quorum.ack


def is_good(packet: bytes, key: tuple[LedgerId, EntryId]) -> bool:
    try:
        found = EntryDigest(DigestType.CRC32C, b"").open(*key, packet)
    except Corrupted:
        return False
    return found.payload == b"entry of %d" % key[0]


@pytest.mark.parametrize("seed", range(1, 5))
def test_workers_restore_all_copies_and_lose_nothing_whatever_happens(seed: int) -> None:
    async def case(bench: Bench) -> None:
        story = Story(bench, seed)
        await story.begin()
        await story.strike()
        await story.calm()
        await story.check()

    run(case, bookies=len(NAMES), limit_s=5_000.0)
