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


def test_the_own_bookie_is_asked_first_and_those_in_trouble_last() -> None:
    assert in_order((B1, B2, B3), own=B3, troubled={B1}) == (B3, B2, B1)


def test_one_good_answer_is_enough() -> None:
    assert read().handle(Answered(B1, PACKET)) == [Done(opened(PACKET))]


def test_a_failure_turns_to_the_next_bookie() -> None:
    reading = read()
    assert reading.handle(ReadFailed(B1, "timeout")) == [AskBookie(B2)]
    assert reading.handle(Answered(B2, PACKET)) == [Done(opened(PACKET))]


def test_a_wrong_digest_turns_to_the_next_bookie_and_is_remembered() -> None:
    reading = read()
    assert reading.handle(Answered(B1, DAMAGED)) == [AskBookie(B2)]
    assert reading.damaged == (B1,)


def test_a_bookie_may_lack_a_confirmed_entry() -> None:
    assert read().handle(Answered(B1, None)) == [AskBookie(B2)]


def test_a_late_answer_lets_a_second_bookie_be_asked_and_the_first_to_answer_wins() -> None:
    reading = read()
    assert reading.handle(HedgeDue()) == [AskBookie(B2)]
    assert reading.handle(Answered(B1, PACKET)) == [Done(opened(PACKET))]
    assert reading.handle(Answered(B2, PACKET)) == []


def test_only_all_bookies_together_can_say_that_an_entry_is_not_there() -> None:
    reading = read()
    reading.handle(Answered(B1, None))
    reading.handle(Answered(B2, None))
    (impossible,) = reading.handle(Answered(B3, None))
    assert isinstance(impossible, Impossible)
    assert isinstance(impossible.error, NoSuchEntry)


def test_one_failure_among_negatives_is_unknown() -> None:
    reading = read()
    reading.handle(Answered(B1, None))
    reading.handle(ReadFailed(B2, "timeout"))
    (impossible,) = reading.handle(Answered(B3, None))
    assert isinstance(impossible, Impossible)
    assert isinstance(impossible.error, BookieError)
    assert "timeout" in str(impossible.error)


def test_damage_on_all_replicas_is_an_error_that_names_them() -> None:
    reading = read()
    for bookie in (B1, B2):
        reading.handle(Answered(bookie, DAMAGED))
    (impossible,) = reading.handle(Answered(B3, DAMAGED))
    assert isinstance(impossible, Impossible)
    assert all(bookie in str(impossible.error) for bookie in (B1, B2, B3))


def test_damage_on_all_but_one_is_readable() -> None:
    reading = read()
    reading.handle(Answered(B1, DAMAGED))
    reading.handle(Answered(B2, DAMAGED))
    assert reading.handle(Answered(B3, PACKET)) == [Done(opened(PACKET))]


def test_the_last_answer_awaited_decides() -> None:
    reading = read()
    reading.handle(HedgeDue())
    reading.handle(HedgeDue())
    assert reading.handle(ReadFailed(B3, "x")) == []
    assert reading.handle(ReadFailed(B2, "y")) == []
    assert reading.handle(Answered(B1, PACKET)) == [Done(opened(PACKET))]
