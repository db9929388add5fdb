"""Entries that are marked as lost in a ledger's custom metadata."""

import pytest

from kvstore.meta.lost import LOST_KEY, lost_entries, with_lost, without_lost
from kvstore.types import EntryId
from tests.wal.ledgers import e, ledger


@pytest.mark.parametrize(
    ("entries", "text"), [((3,), b"3"), ((5, 3, 4), b"3-5"), ((0, 1, 7, 9, 10), b"0-1,7,9-10")], ids=str
)
def test_lost_entries_are_stored_as_ranges(entries: tuple[int, ...], text: bytes) -> None:
    metadata = with_lost(ledger(), map(EntryId, entries))
    assert dict(metadata.custom) == {LOST_KEY: text}
    assert {each for run in lost_entries(metadata) for each in run} == set(entries)
    assert without_lost(metadata, [e(each) for each in (*entries, 99)]) == {99}


def test_empty_loss_is_not_stored_and_other_metadata_stay() -> None:
    metadata = with_lost(with_lost(ledger(), [e(3)]), [])
    assert metadata == ledger()


def test_unreadable_loss_marks_nothing_as_lost() -> None:
    metadata = with_lost(ledger(), [e(3)])
    object.__setattr__(metadata, "custom", ((LOST_KEY, b"3-x"),))
    assert lost_entries(metadata) == []
