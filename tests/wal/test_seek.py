"""Positions in a log are found by reading few of its ledgers and entries, whichever are empty or being trimmed."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import NoSuchLedger
from kvstore.meta.lost import LOST_KEY
from kvstore.types import NO_ENTRY, EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.seek import Seeker, SeekResult

P1 = PartitionId("p1")


class Counting(Seeker):
    """Searches ledgers of given sizes, whose payloads are their places in the log; counts what is opened and read."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(cast(Any, None), cast(Any, self), cast(Any, None))
        first = 0
        self.entries: dict[LedgerId, list[bytes]] = {}
        self.lost: set[Position] = set()
        """Positions of entries that are marked as lost."""
        self.listed = LedgerList()
        for number, size in enumerate(sizes, start=1):
            self.entries[LedgerId(number)] = [b"%d" % each for each in range(first, first + size)]
            self.listed = self.listed.with_ledger(LedgerId(number), Seq(first), epoch=1, lease_ms=0)
            first += size
        self.opened = self.entries_read = 0

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """Read as LedgerLists does."""
        return self.listed, 0

    async def _open(self, ledger: LedgerId) -> EntryReader:
        self.opened += 1
        if ledger not in self.entries:
            raise NoSuchLedger(f"ledger {ledger}")

        async def read(entry: EntryId) -> Any:
            self.entries_read += 1
            assert 0 <= entry < len(self.entries[ledger])
            assert Position(ledger, entry) not in self.lost
            return SimpleNamespace(payload=self.entries[ledger][entry])

        lost = ",".join(str(each.entry) for each in self.lost if each.ledger == ledger)
        custom = ((LOST_KEY, lost.encode()),) if lost else ()
        return cast(Any, SimpleNamespace(metadata=SimpleNamespace(ledger=ledger, custom=custom), read=read))

    async def _confirmed(self, reader: EntryReader, *, for_good: bool = False) -> EntryId:
        return EntryId(len(self.entries[reader.metadata.ledger]) - 1)

    def last_before(self, wanted: int) -> SeekResult:
        return asyncio.run(self.last(P1, lambda payload: int(payload) < wanted))

    def places(self) -> list[Position]:
        return [Position(each, EntryId(n)) for each in self.entries for n in range(len(self.entries[each]))]


@pytest.mark.parametrize("seed", range(200))
def test_seek_finds_the_last_entry_before_a_place_despite_empty_ledgers(seed: int) -> None:
    random = Random(seed)
    seeker = Counting(*(random.choice((0, 0, 1, 2, 7)) for _ in range(random.randint(1, 9))))
    places = seeker.places()
    for wanted in range(len(places) + 2):
        found = seeker.last_before(wanted)
        if not wanted or not places:
            assert found[:2] == (Position(LedgerId(1), NO_ENTRY), None)
        else:
            expected = min(wanted, len(places)) - 1
            assert found[:2] == (places[expected], b"%d" % expected)


@pytest.mark.parametrize("seed", range(20))
def test_seek_finds_the_last_entry_of_a_log(seed: int) -> None:
    random = Random(seed)
    seeker = Counting(*(random.choice((0, 0, 3)) for _ in range(random.randint(1, 5))))
    found, places = asyncio.run(seeker.end(P1)), seeker.places()
    assert found.position == (places[-1] if places else Position(LedgerId(1), NO_ENTRY))


# docs/protocol.md A14
@pytest.mark.parametrize("seed", range(200))
def test_seek_passes_over_lost_entries(seed: int) -> None:
    random = Random(seed)
    seeker = Counting(*(random.choice((0, 1, 2, 7)) for _ in range(random.randint(1, 9))))
    places = seeker.places()
    seeker.lost = {each for each in places if random.random() < 0.4}
    kept = [each for each in places if each not in seeker.lost]
    for wanted in range(len(places) + 2):
        before = [each for each in places[:wanted] if each in kept]
        found = seeker.last_before(wanted)
        assert found.position == (before[-1] if before else Position(LedgerId(1), NO_ENTRY))
    end = asyncio.run(seeker.end(P1))
    if kept:
        assert (end.position, end.payload) == (places[-1], b"%d" % places.index(kept[-1]))
    else:
        assert end.payload is None


def test_seek_finds_no_place_in_a_log_without_ledgers() -> None:
    assert Counting().last_before(5)[:2] == (BEGINNING, None)


@pytest.mark.parametrize(("wanted", "ledgers"), [(64_000, 1), (63_001, 1), (62_500, 3), (30_000, 12), (1, 12)])
def test_seek_opens_few_ledgers_and_only_the_last_for_recent_entries(wanted: int, ledgers: int) -> None:
    seeker = Counting(*[1_000] * 64)
    seeker.last_before(wanted)
    assert seeker.opened <= ledgers
    assert seeker.entries_read <= ledgers + 11


def test_seek_gives_up_on_a_ledger_trimmed_meanwhile() -> None:
    seeker = Counting(2, 2, 2)
    stale, seeker.listed = seeker.listed, seeker.listed.without_first([EntryId(1)])
    del seeker.entries[LedgerId(1)]
    latest = seeker.listed

    async def read(partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        return (trimmed if latest else stale), 0

    trimmed, seeker.read = latest, read  # type: ignore[method-assign]
    assert seeker.last_before(1)[:2] == (Position(LedgerId(2), NO_ENTRY), None)
