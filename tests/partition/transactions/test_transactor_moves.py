"""Ranges that move in the middle of transactions (docs/protocol.md Tx14)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.partition.state.commands import Append, Get, Inquire, Prepare, Put, Resolve
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.move_records import MoveRecord, Own
from kvstore.partition.state.tokens import TokenSpan
from kvstore.types import PartitionId
from tests.partition.several_partitions import Several, transact
from tests.ring import rings

pytestmark = pytest.mark.usefixtures("key_hash")


def test_intents_move_with_their_range() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Resolve
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    assert result()[0]
    s.move(1, 2, 1)
    assert [len(each.state.intents) for each in s.partitions] == [0, 0, 1]
    read = s.submit(Get(b))
    write = s.submit(Put(b, b"later"))
    s.run()
    assert (read(), write()) == ("waits", "waits")
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert read().value in {b"2", b"later"}, "the read was not after the transaction"
    assert s.value(b) == b"later"
    assert s.is_clean()


def test_decisions_move_with_the_home_key() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Resolve
    txn = transact(Put(a, b"1"), Put(b, b"2"), request=s.request())
    result = s.submit(txn)
    s.run()
    s.held.clear()  # lost
    s.holds = lambda op: False
    s.move(0, 2, 1)
    s.run()
    assert (s.value(a), s.value(b)) == (b"1", b"2")
    assert s.is_clean()
    assert result()[0]


# docs/protocol.md M4, Tx2
@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["one partition", "two"])
def test_retry_gets_the_first_answer_wherever_the_home_key_is(places: tuple[int, int]) -> None:
    """The decision is still stored. The retries arrive at the frozen range, between RELEASE and OWN, and at the new
    owner."""
    s = Several(3)
    keys = [s.key(place, number) for number, place in enumerate(places)]
    here, there = s.partitions[0], s.partitions[2]
    s.holds = lambda op: op.__class__ is Resolve
    txn = transact(*(Append(key, b"once") for key in keys), request=s.request())
    first = s.do(txn)
    freeze = s.freeze(here, there, 1)
    assert s.do(txn) == first
    at_release = list[Any]()

    def submit_at_release(record: MoveRecord) -> None:
        if isinstance(record, Own):
            at_release.append(s.do(txn, 0))

    s.before_record = submit_at_release
    s.finish_move(here, there, 1, freeze)
    s.run()
    assert at_release == [first], "the former owner no longer knows the answer"
    assert s.do(txn) == first
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert [s.value(key) for key in keys] == [b"once", b"once"]
    assert s.is_clean()


# docs/protocol.md Tx2
@pytest.mark.parametrize("is_decided", [False, True])
def test_retry_at_a_frozen_range_is_not_done_twice(*, is_decided: bool) -> None:
    """The first attempt is running when the range is frozen, before or after its DECIDE is sent."""
    s = Several(3)
    a, b = s.key(0), s.key(1)
    here, there = s.partitions[0], s.partitions[2]
    s.holds = lambda op: op.__class__ is Prepare
    txn = transact(Append(a, b"once"), Append(b, b"once"), request=s.request())
    first = s.submit(txn)
    if is_decided:
        s.deliver_held()
        s.settle()
        s.partitions[1].acknowledge()
        s.settle()
        assert here.log.in_flight, "DECIDE is not in flight"
    freeze = s.freeze(here, there, 1)
    again = s.submit(txn)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    s.finish_move(here, there, 1, freeze)
    s.run()
    results = [first(), again(), s.do(txn)]
    assert results[2][0], "the last retry is done or was done"
    for each in results:
        assert isinstance(each, Unavailable) or each == results[2]
    assert is_decided == (first() == results[2])
    assert (s.value(a), s.value(b)) == (b"once", b"once")
    assert s.is_clean()


def test_records_of_transactions_wait_behind_a_freeze() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    here, there = s.partitions[1], s.partitions[2]
    s.holds = lambda op: op.__class__ in {Resolve, Inquire}
    s.do(transact(Put(a, b"1"), Put(b, b"2")))
    freeze = s.freeze(here, there, 1)
    s.holds = lambda op: False
    s.deliver_held()
    prepare = s.submit(transact(Put(a, b"3"), Put(s.key(1, 1), b"3")))
    s.run()
    assert len(here.state.intents) == 1, "RESOLVE or PREPARE was logged in a frozen range"
    s.finish_move(here, there, 1, freeze)
    s.run()
    assert s.value(b) == b"2"
    assert prepare()[0]
    assert s.is_clean()


def test_decide_and_end_wait_behind_a_freeze() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    here, there = s.partitions[0], s.partitions[2]
    s.holds = lambda op: op.__class__ is Resolve
    s.do(transact(Put(s.key(0, 1), b"1"), Put(s.key(1, 1), b"2")))
    s.holds = lambda op: op.__class__ is Prepare
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    freeze = s.freeze(here, there, 1)
    seq = here.state.seq
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert result() == "waits"
    assert here.state.seq == seq, "DECIDE or END was logged in a frozen range"
    s.finish_move(here, there, 1, freeze)
    s.run()
    assert isinstance(result(), Unavailable), "the attempt outlived the range"
    assert (s.value(a), s.value(b)) == (None, None)
    assert s.value(s.key(1, 1)) == b"2"
    assert s.is_clean()


def test_transaction_that_begins_behind_a_freeze_goes_to_the_new_home() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    freeze = s.freeze(s.partitions[0], s.partitions[2], 1)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    assert not s.sent, "the attempt has begun in a frozen range"
    s.finish_move(s.partitions[0], s.partitions[2], 1, freeze)
    s.run()
    assert result()[0]
    assert (s.value(a), s.value(b)) == (b"1", b"2")


def test_attempt_ends_with_its_range_even_if_the_range_comes_back() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Prepare
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    s.move(0, 2, 1)
    s.move(2, 0, 2, s.span(0))
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert isinstance(result(), Unavailable)
    assert (s.value(a), s.value(b)) == (None, None)
    assert s.is_clean()


def test_reads_that_wait_go_to_the_new_owner() -> None:
    s = Several(3)
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ in {Resolve, Inquire}
    s.do(transact(Put(a, b"1"), Put(b, b"2")))
    read, write = s.submit(Get(b)), s.submit(Put(b, b"later"))
    s.run()
    assert (read(), write()) == ("waits", "waits")
    s.move(1, 2, 1)
    s.run()
    assert (read(), write()) == ("waits", "waits")
    assert {type(op) for op in s.redirected} == {Get, Put}
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert read().value in {b"2", b"later"}
    assert s.value(b) == b"later"


def test_participant_range_comes_home() -> None:
    """The home partition receives the participant's range with the intent of its own attempt."""
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Resolve
    s.do(transact(Put(a, b"1"), Put(b, b"2")))
    s.move(1, 0, 1)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.value(b) == b"2"
    assert s.is_clean()
    assert s.do(transact(Put(a, b"3"), Put(b, b"4")))[0], "it is one entry now"
    assert s.value(b) == b"4"


def test_prepare_of_keys_of_two_partitions_is_refused() -> None:
    """The home leader has split the operations by an old ring."""
    s = Several()
    a, b = s.key(0), s.key(1)
    prepare = Prepare(a, b, Attempt(PartitionId("p2"), 1, 1), (Put(a, b"1"), Put(b, b"2")))
    assert isinstance(s.do(prepare), Unavailable)
    assert s.is_clean()


# docs/protocol.md M15, Tx9
@pytest.mark.parametrize("is_ring_new", [False, True])
def test_write_at_an_intent_stays_before_writes_behind_a_freeze(*, is_ring_new: bool) -> None:
    """The writes that wait are evaluated again during the freeze: because the ring has changed elsewhere, or because
    another transaction of the partition has ended."""
    s = Several(4)
    b, other = s.key(1), s.key(1, 1)
    here, there = s.partitions[1], s.partitions[2]
    s.holds = lambda op: op.__class__ in {Resolve, Inquire}
    s.do(transact(Put(s.key(0), b"1"), Put(b, b"by a transaction")))
    s.do(transact(Put(s.key(3), b"1"), Put(other, b"by a transaction")))
    first = s.submit(Put(b, b"first"))
    elsewhere = s.submit(Put(other, b"plain"))
    s.run()
    assert (first(), elsewhere()) == ("waits", "waits")
    token = rings.key_hash.token_of(b)
    freeze = s.freeze(here, there, 1, TokenSpan(token, token))
    second = s.submit(Put(b, b"second"))
    s.run()
    if is_ring_new:
        here.leader.redirect_moved()
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert (first(), second()) == ("waits", "waits")
    assert isinstance(elsewhere(), int)
    s.finish_move(here, there, 1, freeze)
    s.run()
    assert first() < second()
    assert s.value(b) == b"second"


def test_former_owner_foresees_no_intents_of_a_range_that_it_released() -> None:
    """Otherwise they would count against its limit of intents, and lock keys, until the next move."""
    s = Several(3)
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ in {Resolve, Inquire}
    s.do(transact(Put(a, b"1"), Put(b, b"2")))
    s.move(1, 2, 1)
    lock_table = s.partitions[1].leader._evaluator.lock_table
    assert (len(lock_table.intents), lock_table.locks) == (0, {})
    s.move(0, 2, 2)
    assert len(s.partitions[0].leader._evaluator.lock_table.decisions) == 0
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.value(b) == b"2"
    assert s.is_clean()


# docs/protocol.md M9, Tx7
def test_sequences_rise_along_the_owners_of_a_key() -> None:
    """The name of an intent is its key and its sequence, so no later intent may get the name again."""
    s = Several(3)
    b = s.key(1)
    last = max(s.do(Put(b, b"1")) for _ in range(20))
    s.move(1, 2, 1)
    later = s.do(Put(b, b"2"))
    assert isinstance(later, int)
    assert later > last


# docs/protocol.md Tx8
def test_decision_ends_that_comes_back_while_its_end_is_refused() -> None:
    """END is refused just before OWN is applied. Home took the refusal for the end of the decision, after it had found
    that the decision was being carried out already, so the decision stayed for good."""
    s = Several(3)
    here = s.partitions[0]
    s.do(transact(Put(s.key(0), b"1"), Put(s.key(1), b"2")))
    assert here.state.decisions
    assert here.leader.transactor is not None
    outcomes = here.leader.transactor.outcomes

    def end_at_own(record: MoveRecord) -> None:
        if isinstance(record, Own):
            here.loop.call_soon(here.loop.call_soon, outcomes._end_all)

    s.holds = lambda op: op.__class__ is Resolve
    s.move(0, 2, 1)
    s.before_record = end_at_own
    s.move(2, 0, 2, s.span(0))
    s.holds = lambda op: False
    s.held.clear()  # lost
    assert s.is_clean()
