"""Entries that were given up stand in a ledger's custom metadata."""

import pytest

from kvstore.meta.lost import LOST_KEY, lost_entries, with_lost, without_lost
from kvstore.types import EntryId
from tests.wal.ledgers import e, ledger


@pytest.mark.parametrize(
    ("entries", "text"), [((3,), b"3"), ((5, 3, 4), b"3-5"), ((0, 1, 7, 9, 10), b"0-1,7,9-10")], ids=str
)
def test_lost_entries_are_noted_as_rows(entries: tuple[int, ...], text: bytes) -> None:
    metadata = with_lost(ledger(), map(EntryId, entries))
    assert dict(metadata.custom) == {LOST_KEY: text}
    assert {each for run in lost_entries(metadata) for each in run} == set(entries)
    assert without_lost(metadata, [e(each) for each in (*entries, 99)]) == {99}


def test_of_nothing_nothing_is_noted_and_others_notes_stay() -> None:
    metadata = with_lost(with_lost(ledger(), [e(3)]), [])
    assert metadata == ledger()


def test_a_note_that_cannot_be_read_gives_nothing_up() -> None:
    metadata = with_lost(ledger(), [e(3)])
    object.__setattr__(metadata, "custom", ((LOST_KEY, b"3-x"),))
    assert lost_entries(metadata) == []
