"""Sentences about missing copies."""

from kvstore.wal.repair import Missing, bookies_of, missing_copies
from tests.wal.ledgers import B1, B2, B3, B4, e, ledger

FULL = range(5)


def test_nothing_is_missing_where_everybody_has_everything() -> None:
    assert missing_copies(ledger(), e(4), {B1: FULL, B2: FULL, B3: FULL}) == []


def test_an_entry_that_a_bookie_lacks_is_missing_there() -> None:
    assert missing_copies(ledger(), e(4), {B1: FULL, B2: [0, 1, 4], B3: FULL}) == [Missing(e(2), B2), Missing(e(3), B2)]


def test_entries_behind_the_end_are_nobodys_loss() -> None:
    assert missing_copies(ledger(), e(2), {B1: FULL, B2: range(3)}) == []


def test_each_fragment_asks_its_own_bookies() -> None:
    metadata = ledger().with_ensemble(e(3), (B1, B2, B4))
    held = {B1: FULL, B2: FULL, B3: [0, 1], B4: [4]}
    assert missing_copies(metadata, e(4), held) == [Missing(e(2), B3), Missing(e(3), B4)]
    assert bookies_of(metadata) == [B1, B2, B3, B4]


def test_a_bookie_that_could_not_be_asked_is_left_out() -> None:
    assert missing_copies(ledger(), e(4), {B1: FULL}) == []


def test_striped_entries_are_wanted_at_their_write_sets_only() -> None:
    metadata = ledger(B1, B2, B3, B4, write=2)
    held = {B1: [0, 3, 4], B2: [0, 1, 4], B3: [1, 2], B4: [2, 3]}
    assert missing_copies(metadata, e(4), held) == []
    assert missing_copies(metadata, e(4), {**held, B3: [1]}) == [Missing(e(2), B3)]


def test_an_empty_ledger_lacks_nothing() -> None:
    assert missing_copies(ledger(), e(-1), {B1: [], B2: []}) == []
