"""Sentences about a partition's list of ledgers."""

import pytest

from kvstore.meta import codec
from kvstore.types import NO_ENTRY, EntryId, LedgerId, Position, Seq
from kvstore.wal.ledger_list import LedgerList, Listed, LogEnd


def listed(*firsts: int, exact: bool = True, lease_ms: int = 500) -> LedgerList:
    """Ledgers 10, 11, … with these first sequences."""
    lines = tuple(Listed(LedgerId(10 + i), Seq(first), exact, 1, lease_ms) for i, first in enumerate(firsts))
    return LedgerList(1, lines)


def test_list_document_is_json_with_these_fields() -> None:
    assert codec.encode(listed(1)) == (
        b'{"format":1,"epoch":1,"ledgers":[{"id":10,"first_seq":1,"exact":true,"epoch":1,"lease_ms":500}],'
        b'"trimmed_seq":0,"trimmed_end":null,"closed_end":null}'
    )


def test_list_document_survives_the_store() -> None:
    before = listed(1, 20, 30, 40).without_first([EntryId(3), EntryId(5)])
    assert codec.decode(LedgerList, codec.encode(before), what="x") == before


def test_new_ledger_is_listed_last_with_a_rising_bound() -> None:
    after = listed(1, 20).with_ledger(LedgerId(15), Seq(5), epoch=2, lease_ms=100)
    assert after.epoch == 2
    assert after.ledgers[-1] == Listed(LedgerId(15), Seq(20), False, 2, 100)


def test_ledger_ids_of_a_list_rise() -> None:
    with pytest.raises(AssertionError):
        listed(1, 20).with_ledger(LedgerId(11), Seq(30), epoch=1, lease_ms=0)


# docs/protocol.md G11
def test_exact_first_sequence_replaces_the_bound() -> None:
    before = listed(1).with_ledger(LedgerId(11), Seq(1), epoch=1, lease_ms=0)
    assert before.with_exact(LedgerId(11), Seq(9)).ledgers[-1] == Listed(LedgerId(11), Seq(9), True, 1, 0)


def test_ledgers_synced_everywhere_are_trimmable() -> None:
    assert listed(1, 20, 30, 40).trimmable(Seq(30), None) == [10, 11]
    assert listed(1, 20, 30, 40).trimmable(Seq(28), None) == [10]


def test_ledger_stays_until_a_later_sequence_is_synced() -> None:
    """It may end with control records, which have no sequence: a state at 29 may stand before them."""
    assert listed(1, 20, 30, 40).trimmable(Seq(29), None) == [10]


def test_last_two_ledgers_are_never_trimmable() -> None:
    assert listed(1, 20, 30).trimmable(Seq(1000), None) == [10]
    assert listed(1, 20).trimmable(Seq(1000), None) == []


def test_bound_alone_trims_nothing() -> None:
    assert listed(1, 20, 30, 40, exact=False).trimmable(Seq(1000), None) == []


def known(*exact: bool) -> LedgerList:
    """Ledgers 10, 11, … that begin at 10, 20, …; of some it is only known that they do not begin before."""
    return LedgerList(ledgers=tuple(Listed(LedgerId(10 + n), Seq(10 + 10 * n), e, 1, 0) for n, e in enumerate(exact)))


def test_bound_does_not_hold_up_ledgers_before_an_exact_one() -> None:
    """Some leader ended before it could say where its ledger begins: the log would grow for ever."""
    log = known(True, False, False, True, True, True)
    assert log.trimmable(Seq(1000), None) == [10, 11, 12, 13]
    assert log.trimmable(Seq(40), None) == [10, 11, 12]
    assert log.trimmable(Seq(39), None) == [], "12 may hold anything below 40"
    assert log.trimmable(Seq(1000), LedgerId(12)) == [], "and what is behind 11 may begin anywhere"
    assert known(True, True, True, False).trimmable(Seq(1000), None) == [10, 11]


def test_log_is_cut_only_at_an_exact_first_sequence() -> None:
    log = known(True, False, False, True, True, True)
    assert [log.droppable(count) for count in range(5)] == [0, 0, 0, 3, 4]


def test_pin_holds_its_ledger_and_all_after_it() -> None:
    assert listed(1, 20, 30, 40, 50).trimmable(Seq(1000), LedgerId(11)) == [10]
    assert listed(1, 20, 30, 40, 50).trimmable(Seq(1000), LedgerId(10)) == []


# docs/protocol.md G16
def test_trimming_remembers_the_last_trimmed_entry() -> None:
    after = listed(1, 20, 30, 40).without_first([EntryId(3), EntryId(5)])
    assert after.trimmed_end == LogEnd(LedgerId(11), EntryId(5))
    assert after.trimmed_seq == 30
    assert [each.id for each in after.ledgers] == [12, 13]


def test_trimming_an_empty_ledger_keeps_the_recorded_end() -> None:
    once = listed(1, 20, 30, 40, 50).without_first([EntryId(3), NO_ENTRY])
    assert once.trimmed_end == LogEnd(LedgerId(10), EntryId(3))
    assert once.without_first([NO_ENTRY]).trimmed_end == LogEnd(LedgerId(10), EntryId(3))


# docs/protocol.md G25
def test_list_names_the_end_before_its_last_two_ledgers() -> None:
    closed = Position(LedgerId(10), EntryId(7))
    after = listed(1, 20).with_ledger(LedgerId(12), Seq(30), epoch=2, lease_ms=100, closed_end=closed)
    assert after.closed_end == LogEnd(LedgerId(10), EntryId(7))
    assert after.without_first([EntryId(7)]).closed_end == after.closed_end
    assert after.with_ledger(LedgerId(13), Seq(30), epoch=2, lease_ms=100).closed_end is None, "it is another one's"


# docs/protocol.md G25
def test_reader_behind_the_closed_end_continues_in_the_last_two_ledgers() -> None:
    closed = Position(LedgerId(10), EntryId(7))
    after = listed(1, 20).with_ledger(LedgerId(12), Seq(30), epoch=2, lease_ms=100, closed_end=closed)
    assert after.closed_before(closed) == 11
    assert after.closed_before(Position(LedgerId(10), EntryId(6))) is None, "an entry is missing"
    assert after.closed_before(Position(LedgerId(11), EntryId(0))) is None, "it stands in the last two itself"
    assert listed(1, 20).closed_before(closed) is None, "an older build wrote the list"


# docs/protocol.md G25
def test_list_of_an_older_version_has_no_closed_end() -> None:
    data = b'{"format":1,"epoch":1,"ledgers":[],"trimmed_seq":0,"trimmed_end":null}'
    assert codec.decode(LedgerList, data, what="x").closed_end is None


def test_lease_wait_is_the_largest_recent_lease_and_a_margin() -> None:
    assert listed(1, 2, lease_ms=500).lease_wait_s() == pytest.approx(0.55)
    assert listed(1, 2, lease_ms=5000).lease_wait_s() == pytest.approx(5.5)
    mixed = listed(1, 2, lease_ms=5000).with_ledger(LedgerId(20), Seq(3), epoch=2, lease_ms=100)
    assert mixed.lease_wait_s() == pytest.approx(5.5)
    again = mixed.with_ledger(LedgerId(21), Seq(4), epoch=3, lease_ms=100)
    assert again.lease_wait_s() == pytest.approx(0.15)


def test_lease_wait_is_zero_without_leases_or_ledgers() -> None:
    assert listed(1, 2, lease_ms=0).lease_wait_s() == 0
    assert LedgerList().lease_wait_s() == 0
