"""The search for missing copies."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvstore.env.nursery import TaskNursery
from kvstore.proto.availability import HeldEntries
from kvstore.types import BookieId, EntryId, LedgerMetadata
from kvstore.wal.copies.copying import Copying
from kvstore.wal.repair import SLICE, Missing, bookies_of, entries_at_risk, missing_copies
from tests.wal.ledgers import B1, B2, B3, B4, e, ledger

FULL = range(5)


def missing(metadata: LedgerMetadata, last: EntryId, held: Mapping[BookieId, Iterable[int]]) -> list[Missing]:
    """Return all slices joined."""
    there = {bookie: HeldEntries.of_runs((entry, 1) for entry in entries) for bookie, entries in held.items()}
    return [each for part in missing_copies(metadata, last, there) for each in part]


def test_missing_copies_are_none_in_a_complete_ledger() -> None:
    assert missing(ledger(), e(4), {B1: FULL, B2: FULL, B3: FULL}) == []


def test_missing_copies_include_an_entry_that_a_bookie_lacks() -> None:
    assert missing(ledger(), e(4), {B1: FULL, B2: [0, 1, 4], B3: FULL}) == [Missing(e(2), B2), Missing(e(3), B2)]


def test_missing_copies_ignore_entries_after_the_end() -> None:
    assert missing(ledger(), e(2), {B1: FULL, B2: range(3)}) == []


def test_missing_copies_follow_each_fragments_ensemble() -> None:
    metadata = ledger().with_ensemble(e(3), (B1, B2, B4))
    held = {B1: FULL, B2: FULL, B3: [0, 1], B4: [4]}
    assert missing(metadata, e(4), held) == [Missing(e(2), B3), Missing(e(3), B4)]
    assert bookies_of(metadata) == [B1, B2, B3, B4]


def test_missing_copies_leave_out_bookies_that_were_not_asked() -> None:
    assert missing(ledger(), e(4), {B1: FULL}) == []


def test_missing_copies_of_striped_entries_follow_write_sets() -> None:
    metadata = ledger(B1, B2, B3, B4, write=2)
    held = {B1: [0, 3, 4], B2: [0, 1, 4], B3: [1, 2], B4: [2, 3]}
    assert missing(metadata, e(4), held) == []
    assert missing(metadata, e(4), {**held, B3: [1]}) == [Missing(e(2), B3)]


def test_entries_at_risk_have_fewer_copies_than_the_ack_quorum() -> None:
    held = {B1: HeldEntries.of_runs([(0, 3)]), B2: HeldEntries.of_runs([(1, 4)])}
    assert list(entries_at_risk(ledger(), e(4), held)) == [[]], "two of three copies are left of each"
    held[B3] = HeldEntries([])
    assert list(entries_at_risk(ledger(), e(4), held)) == [[e(0), e(3), e(4)]]
    assert list(entries_at_risk(ledger(B1, B2, B3, B4, write=2), e(4), {B3: HeldEntries([])})) == [[e(1), e(2)]]


def test_missing_copies_of_an_empty_ledger_are_none() -> None:
    assert missing(ledger(), e(-1), {B1: [], B2: []}) == []


def test_missing_copies_of_a_long_ledger_come_in_slices() -> None:
    """docs/protocol.md, W8: one step for everything blocked the event loop for a third of a second."""
    last = 3 * SLICE + 7
    empty, parts = HeldEntries(()), 0
    for part in missing_copies(ledger(), e(last), {B1: empty, B2: HeldEntries.of_runs([(0, last + 1)])}):
        assert 0 < len(part) <= SLICE
        parts += 1
    assert parts == 4


class Complete:
    """Bookies that have everything, and count what they are asked about."""

    def __init__(self, count: int) -> None:
        self.looked = 0
        self._count = count

    async def entries(self, *_: object) -> HeldEntries:
        owner = self

        class Counted(HeldEntries):
            def between(self, first: int, last: int) -> set[int]:
                owner.looked += last - first + 1
                return super().between(first, last)

        return Counted([(0, 0, self._count, 0)])


async def test_repair_checks_one_slice_per_event_loop_turn() -> None:
    """Counted by work, not by time."""
    count = 20 * SLICE
    bookies, nursery = Complete(count), TaskNursery("test")
    work = Copying(ledger(), cast(Any, bookies), nursery, cast(Any, None))
    task = nursery.spawn(work.fill(ledger(), e(count - 1), await work.held([B1, B2, B3]), []), name="fill")
    most = 0
    while bookies.looked < 3 * count:
        before = bookies.looked
        await asyncio.sleep(0)
        most = max(most, bookies.looked - before)
    assert most == 3 * SLICE
    assert await task == 0
    await nursery.close()
