"""Sentences about reading a confirmed entry."""

from kvstore.errors import BookieError, NoSuchEntry
from kvstore.wal.reader import Answered, AskBookie, Done, EntryRead, HedgeDue, Impossible, ReadFailed, in_order
from tests.wal.ledgers import B1, B2, B3, e, opened, pack

PACKET = pack(e(4), e(3), 5, b"hello")
DAMAGED = PACKET[:-1] + b"?"


def read() -> EntryRead:
    reading = EntryRead(e(4), (B1, B2, B3), opened)
    assert reading.start() == [AskBookie(B1)]
    return reading


def test_read_asks_own_bookie_first_and_troubled_ones_last() -> None:
    assert in_order((B1, B2, B3), own=B3, troubled={B1}) == (B3, B2, B1)


def test_read_needs_one_good_answer() -> None:
    assert read().handle(Answered(B1, PACKET)) == [Done(opened(PACKET))]


def test_read_asks_the_next_bookie_after_a_failure() -> None:
    reading = read()
    assert reading.handle(ReadFailed(B1, "timeout")) == [AskBookie(B2)]
    assert reading.handle(Answered(B2, PACKET)) == [Done(opened(PACKET))]


def test_read_asks_the_next_bookie_after_a_wrong_digest() -> None:
    reading = read()
    assert reading.handle(Answered(B1, DAMAGED)) == [AskBookie(B2)]
    assert reading.damaged == (B1,)


def test_read_tolerates_a_bookie_without_a_confirmed_entry() -> None:
    assert read().handle(Answered(B1, None)) == [AskBookie(B2)]


def test_read_asks_a_second_bookie_when_the_first_is_late() -> None:
    reading = read()
    assert reading.handle(HedgeDue()) == [AskBookie(B2)]
    assert reading.handle(Answered(B1, PACKET)) == [Done(opened(PACKET))]
    assert reading.handle(Answered(B2, PACKET)) == []


def test_read_reports_absence_only_when_all_bookies_do() -> None:
    reading = read()
    reading.handle(Answered(B1, None))
    reading.handle(Answered(B2, None))
    (impossible,) = reading.handle(Answered(B3, None))
    assert isinstance(impossible, Impossible)
    assert isinstance(impossible.error, NoSuchEntry)


def test_read_is_unknown_after_one_failure_among_negatives() -> None:
    reading = read()
    reading.handle(Answered(B1, None))
    reading.handle(ReadFailed(B2, "timeout"))
    (impossible,) = reading.handle(Answered(B3, None))
    assert isinstance(impossible, Impossible)
    assert isinstance(impossible.error, BookieError)
    assert "timeout" in str(impossible.error)


def test_read_names_all_bookies_when_every_copy_is_damaged() -> None:
    reading = read()
    for bookie in (B1, B2):
        reading.handle(Answered(bookie, DAMAGED))
    (impossible,) = reading.handle(Answered(B3, DAMAGED))
    assert isinstance(impossible, Impossible)
    assert all(bookie in str(impossible.error) for bookie in (B1, B2, B3))


def test_read_succeeds_with_one_undamaged_copy() -> None:
    reading = read()
    reading.handle(Answered(B1, DAMAGED))
    reading.handle(Answered(B2, DAMAGED))
    assert reading.handle(Answered(B3, PACKET)) == [Done(opened(PACKET))]


def test_read_is_decided_by_the_last_awaited_answer() -> None:
    reading = read()
    reading.handle(HedgeDue())
    reading.handle(HedgeDue())
    assert reading.handle(ReadFailed(B3, "x")) == []
    assert reading.handle(ReadFailed(B2, "y")) == []
    assert reading.handle(Answered(B1, PACKET)) == [Done(opened(PACKET))]
