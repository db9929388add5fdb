"""Sentences about what a writer may do to its ledger's metadata."""

import pytest

from kvstore.errors import LedgerClosed, LedgerFenced
from kvstore.types import LedgerState
from kvstore.wal.ensembles import closed_by_writer, in_recovery, with_swaps
from tests.wal.ledgers import B1, B2, B3, B4, B5, e, ledger

MINE = ledger()
SWAP = {B3: B4}


def test_swap_replaces_a_failed_bookie_from_an_entry_on() -> None:
    changed = with_swaps(MINE, MINE, e(5), SWAP)
    assert [(f.first, f.ensemble) for f in changed.fragments] == [(0, (B1, B2, B3)), (5, (B1, B2, B4))]


def test_swap_replaces_a_fragment_that_is_still_empty() -> None:
    changed = with_swaps(MINE, MINE, e(0), SWAP)
    assert [(f.first, f.ensemble) for f in changed.fragments] == [(0, (B1, B2, B4))]


def test_swap_makes_several_replacements_in_one_change() -> None:
    assert with_swaps(MINE, MINE, e(0), {B3: B4, B1: B5}).fragments[-1].ensemble == (B5, B2, B4)


# docs/protocol.md W4
def test_swap_recognizes_its_own_write_of_unknown_outcome() -> None:
    once = with_swaps(MINE, MINE, e(5), SWAP)
    assert with_swaps(once, MINE, e(5), SWAP) is once


def test_swap_keeps_rereplicated_older_fragments() -> None:
    mine = MINE.with_ensemble(e(3), (B1, B2, B4))
    recorded = ledger(B1, B5, B3).with_ensemble(e(3), (B1, B2, B4))
    changed = with_swaps(recorded, mine, e(7), {B4: B3})
    assert [f.ensemble for f in changed.fragments] == [(B1, B5, B3), (B1, B2, B4), (B1, B2, B3)]


def test_swap_is_fenced_by_another_last_ensemble() -> None:
    with pytest.raises(LedgerFenced):
        with_swaps(ledger(B1, B2, B5), MINE, e(5), SWAP)


@pytest.mark.parametrize(
    ("recorded", "error"), [(MINE.recovering(), LedgerFenced), (MINE.closed(e(4), 10), LedgerClosed)]
)
def test_writer_stops_at_a_ledger_that_is_not_open(recorded: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        with_swaps(recorded, MINE, e(5), SWAP)  # type: ignore[arg-type]
    with pytest.raises(error):
        closed_by_writer(recorded, MINE, e(9), 10)  # type: ignore[arg-type]


def test_close_is_idempotent_only_at_the_same_entry() -> None:
    closed = closed_by_writer(MINE, MINE, e(4), 10)
    assert (closed.state, closed.last_entry, closed.length) == (LedgerState.CLOSED, 4, 10)
    assert closed_by_writer(closed, MINE, e(4), 10) is closed
    with pytest.raises(LedgerClosed):
        closed_by_writer(closed, MINE, e(3), 10)
    with pytest.raises(LedgerClosed):
        closed_by_writer(closed, MINE, e(4), 11)


# docs/protocol.md R1
def test_recovery_takes_an_open_ledger_and_keeps_others() -> None:
    assert in_recovery(MINE).state is LedgerState.IN_RECOVERY
    for recorded in (MINE.recovering(), MINE.closed(e(4), 10)):
        assert in_recovery(recorded) is recorded
