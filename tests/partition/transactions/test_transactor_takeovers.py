"""Takeovers and lost messages in the middle of transactions (docs/protocol.md Tx5 to Tx8, Tx10)."""

from __future__ import annotations

from errno import EMFILE
from typing import Any

import pytest

from kvstore.errors import ConditionFailed, Conflict, InvalidRequest, NotLeader, OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.leading.answers import SingleResultSink
from kvstore.partition.state.commands import Append, Check, Flag, Get, Increment, Inquire, Prepare, Put, Resolve
from kvstore.partition.state.entry import EntryKind
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.tokens import TokenSpan
from tests.partition.one_partition import Caller
from tests.partition.several_partitions import Several, transact
from tests.ring import rings


def held(kind: type) -> Any:
    """Return a rule that holds operations of this class."""
    return lambda op: op.__class__ is kind


# docs/protocol.md Tx8
def test_new_home_leader_continues_from_its_decisions() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = held(Resolve)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    assert result()[0]
    assert (s.value(a), s.value(b)) == (b"1", None)
    s.holds, s.held = lambda op: False, []  # the messages are lost
    s.partitions[0].fail_over()
    s.run()
    assert s.value(b) == b"2"
    assert s.is_clean()


# docs/protocol.md Tx6
def test_attempt_of_a_former_leader_is_aborted_when_its_intents_are_old() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.partitions[1].acknowledge()
    s.settle()
    assert s.partitions[0].log.in_flight, "DECIDE is not in flight"
    s.partitions[0].fail_over()
    s.settle()
    assert isinstance(result(), OutcomeUnknown)
    s.wait(0.9)
    assert not s.is_clean()
    s.wait(1.2)
    assert s.is_clean()
    assert (s.value(a), s.value(b)) == (None, None)


# docs/protocol.md Tx8
def test_participants_new_leader_finds_the_intent_and_resolves_it() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = held(Resolve)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    assert result()[0]
    s.partitions[1].fail_over()
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.value(b) == b"2"
    assert s.is_clean()


def test_next_leader_of_a_participant_prepares_the_attempt() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.partitions[1].fail_over()
    s.run()
    assert result() == "waits", "the first PREPARE is lost"
    s.wait(0.1)
    assert result()[0]
    assert (s.value(a), s.value(b)) == (b"1", b"2")
    assert s.is_clean()


def test_participant_that_does_not_prepare_in_time_aborts_the_attempt() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = held(Prepare)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.wait(1.9)
    assert result() == "waits"
    s.wait(0.3)
    assert isinstance(result(), Unavailable)
    s.holds = lambda op: False
    s.deliver_held()  # PREPARE comes late: its intent learns at once that it is aborted
    s.run()
    assert s.is_clean()
    assert (s.value(a), s.value(b)) == (None, None)


# docs/protocol.md Tx7
def test_late_outcome_does_not_touch_a_later_intent_of_the_attempt() -> None:
    """Regression of the model: a late PREPARE and a late COMMITTED together undid a newer write."""
    s = Several()
    a, b = s.key(0), s.key(1)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    prepare = next(op for op in s.sent if isinstance(op, Prepare))
    s.run()
    assert result()[0]
    resolve = next(op for op in s.sent if isinstance(op, Resolve))
    s.do(Put(b, b"newer"))
    s.holds = held(Inquire)
    s.partitions[1].do(prepare)  # late, again
    s.partitions[1].do(resolve)  # late, again
    assert len(s.partitions[1].state.intents) == 1
    assert s.value(b) == b"newer"
    s.holds = lambda op: False
    s.wait(2.0)
    assert s.is_clean()
    assert s.value(b) == b"newer"


def ask(s: Several, attempt: Attempt, key: bytes, seq: int) -> SingleResultSink:
    """Ask home about an intent, at the partition of place 0."""
    sinks: list[SingleResultSink] = []
    home = s.partitions[0]

    def submit() -> None:
        sinks.append(SingleResultSink())
        home.leader.submit([Inquire(s.key(0), attempt, key, seq)], sinks[0], [0])

    home.loop.call_soon(submit)
    home.settle()
    return sinks[0]


# docs/protocol.md Tx6
def test_aborted_is_said_behind_an_append_only() -> None:
    s = Several()
    home = s.partitions[0]
    entries = len(home.log.acknowledged)
    said = ask(s, Attempt(home.state.partition, 1, 99), s.key(1), 5)
    assert not said.done.done(), "a deposed leader could have said it"
    assert len(home.log.in_flight) == 1
    home.acknowledge()
    assert said.done.result()[0] is False
    assert len(home.log.acknowledged) == entries + 1


# docs/protocol.md Tx6
def test_deposed_leader_does_not_say_aborted() -> None:
    s = Several()
    home = s.partitions[0]
    said = ask(s, Attempt(home.state.partition, 1, 99), s.key(1), 5)
    home.log.fail(OutcomeUnknown("fenced"))
    home.settle()
    assert isinstance(said.done.exception(), OutcomeUnknown | NotLeader)


# docs/protocol.md Tx6
def test_nothing_is_said_of_an_attempt_that_is_under_way() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    (prepare,) = [op for op in s.sent if isinstance(op, Prepare)]
    in_memory = ask(s, prepare.attempt, b, 2)
    assert isinstance(in_memory.done.exception(), Unavailable)
    s.partitions[1].acknowledge()
    s.settle()
    (entry,) = s.partitions[0].in_flight()
    seq = s.partitions[1].state.intents.at(b)[0].seq
    assert entry.keys, "DECIDE is not in flight"
    in_flight = ask(s, prepare.attempt, b, seq)
    s.holds = held(Resolve)
    s.run()
    assert isinstance(in_flight.done.exception(), Unavailable)
    committed = ask(s, prepare.attempt, b, seq)
    s.run()
    assert committed.done.result()[0] is True
    other = ask(s, prepare.attempt, b, seq + 1)
    s.run()
    assert other.done.result()[0] is False, "the decision does not name this intent"


# docs/protocol.md Tx8
def test_owner_that_has_not_reached_the_intent_does_not_say_resolved() -> None:
    s = Several()
    b = s.key(1)
    participant = s.partitions[1]
    s.do(Put(b, b"1"))
    too_early = participant.do(Resolve(b, Attempt(s.partitions[0].state.partition, 1, 1), 1_000, True))
    assert isinstance(too_early, StoreError)
    assert isinstance(participant.do(Resolve(b, Attempt(s.partitions[0].state.partition, 1, 1), 1, True)), int)


# docs/protocol.md Tx8
def test_decision_stays_until_every_owner_has_said_resolved() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.holds = lambda op: op.__class__ is Resolve and op.key == c
    s.do(transact(Put(a, b"1"), Put(b, b"2"), Put(c, b"3")))
    s.wait(0.5)
    assert len(s.partitions[0].state.decisions) == 1
    assert s.value(b) == b"2"
    assert s.value(c) is None
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.value(c) == b"3"
    assert s.is_clean()


# docs/protocol.md Tx2
def test_retry_joins_the_running_attempt() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    txn = transact(Put(a, b"1"), Put(b, b"2"), request=s.request())
    first, retry = s.submit(txn), s.submit(txn)
    s.run()
    assert first() == retry()
    assert first()[0] == s.do(txn)[0], "the table remembers the result"
    assert len([op for op in s.sent if isinstance(op, Prepare)]) == 1
    assert s.value(a) == b"1"


# docs/protocol.md Tx2, Tx5
def test_retry_after_a_takeover_gets_the_first_result() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    txn = transact(Put(a, b"1"), Put(b, b"2"), Get(b), request=s.request())
    first = s.do(txn)
    s.do(Put(a, b"newer"))
    s.partitions[0].fail_over()
    assert s.do(txn) == first
    assert s.value(a) == b"newer"


def test_leader_drops_its_attempts_when_it_stops() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.partitions[0].leader.stop(NotLeader("p1"))
    s.settle()
    assert isinstance(result(), NotLeader)
    s.partitions[1].acknowledge()
    s.settle()
    s.run()
    assert len(s.partitions[1].state.intents) == 0, "the participant was not told that the attempt is aborted"
    assert s.value(b) is None


# docs/protocol.md Tx4
def test_prepared_is_said_when_the_intent_is_acknowledged() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.settle()
    assert s.partitions[1].log.in_flight
    assert not s.partitions[0].log.in_flight, "DECIDE was sent before the participant prepared"


# docs/protocol.md Tx6
def test_refused_transaction_asks_about_the_intent_that_it_has_met() -> None:
    """A client whose home leader is lost retries at the next one, and meets the intents of its own first attempt."""
    s = Several(3)
    a, b = s.key(0), s.key(1)
    txn = transact(Put(a, b"1"), Put(b, b"2"), Put(s.key(2), b"3"), request=s.request())
    s.submit(txn)
    s.partitions[1].acknowledge()
    s.partitions[2].acknowledge()
    s.settle()
    s.partitions[0].fail_over()
    s.settle()
    assert isinstance(s.do(txn), Conflict)
    s.wait(0.06)
    assert s.is_clean()
    assert s.do(txn)[0]
    assert (s.value(a), s.value(b)) == (b"1", b"2")


# docs/protocol.md P21
def test_nothing_of_a_transaction_follows_the_release_record() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home = s.partitions[0]
    s.holds = lambda op: op.__class__ is Resolve
    assert s.do(transact(Put(a, b"1"), Put(b, b"2")))[0]
    released = home.loop.create_task(home.leader.release())
    s.settle()
    assert len(home.log.in_flight) == 1
    s.holds = lambda op: False
    s.deliver_held()
    s.settle()
    s.partitions[1].acknowledge()  # RESOLVED comes, and END would follow
    s.settle()
    assert len(home.log.in_flight) == 1
    home.log.acknowledge()
    s.settle()
    assert released.done()


def test_malformed_operation_in_the_entry_of_a_prepare_leaves_no_lock() -> None:
    """An entry that fails is evaluated again, one operation at a time."""
    s = Several()
    a, b = s.key(0), s.key(1)
    at = s.partitions[1]
    prepare = Prepare(b, a, Attempt(s.partitions[0].state.partition, 1, 77), (Put(b, b"2"),))
    malformed: Any = Put(s.key(1, 1), 5)  # type: ignore[arg-type]
    first, second = range(at.tokens, at.tokens + 2)
    at.tokens += 2
    at.loop.call_soon(at.leader.submit, [prepare, malformed], at.caller, [first, second])
    s.run()
    assert isinstance(at.result(second), InvalidRequest)
    assert at.result(first)[0] == "p2", "the operation met its own intent"


# docs/protocol.md Tx5
def test_attempt_ends_if_its_request_was_carried_out_meanwhile() -> None:
    """The participant's range comes home during the attempt, and a retry carries the request out in one entry."""
    s = Several()
    b, a = s.key(0), s.key(1)
    s.holds = held(Prepare)
    txn = transact(Put(a, b"1"), Put(b, b"2"), request=s.request())
    first = s.submit(txn)
    s.run()
    s.move(0, 1, 1)
    assert s.do(txn)[0]
    later = s.do(Put(a, b"later"))
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert isinstance(first(), StoreError)
    assert s.value(a) == b"later"
    assert later
    assert s.is_clean()


# docs/protocol.md Tx14
def test_decision_is_refused_if_a_key_of_homes_part_has_moved() -> None:
    s = Several(3)
    a, other, b = s.key(0), s.key(0, 1), s.key(1)
    low, high = sorted((rings.key_hash.token_of(a), rings.key_hash.token_of(other)))
    moving = TokenSpan(0, low) if rings.key_hash.token_of(other) == low else TokenSpan(high, s.span(0).last)
    s.holds = held(Prepare)
    result = s.submit(transact(Put(a, b"1"), Put(other, b"1"), Put(b, b"2")))
    s.run()
    s.move(0, 2, 1, moving)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert isinstance(result(), Unavailable)
    assert [s.value(key) for key in (a, other, b)] == [None] * 3
    assert s.is_clean()


# docs/protocol.md P21
def test_no_mark_and_no_late_write_follow_the_release_record() -> None:
    """RESOLVE waits for a pin. After a second the leader logged a MARK, and RESOLVED behind it, whatever it had sent
    before."""
    s = Several()
    a, b = s.key(0), s.key(1)
    participant = s.partitions[0]
    s.holds = held(Resolve)
    assert s.do(transact(Put(b, b"1"), Put(a, b"2")))[0]
    (message,) = s.held
    assert isinstance(message.op, Resolve)
    (token,) = participant.submit(message.op.__class__(a, message.op.attempt, message.op.intent_seq, True, 7))
    participant.wait(0.9)
    assert participant.result(token) == "waits"
    released = participant.loop.create_task(participant.leader.release())
    s.settle()
    participant.wait(0.3)
    assert participant.sent_kinds() == [EntryKind.RELEASE_LEAD]
    assert len(participant.log.in_flight) == 1
    with pytest.raises(NotLeader):
        participant.run(participant.leader.append_record(MarkRecord("", 0, takes=False, number=8)))
    participant.acknowledge()
    assert released.done()
    assert isinstance(participant.result(token), NotLeader)


# docs/protocol.md Tx6
def test_question_that_home_could_not_read_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home = s.partitions[0]
    s.holds = held(Resolve)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.partitions[1].acknowledge()
    home.fail_over()  # DECIDE is lost
    s.holds, s.held = lambda op: False, []

    def broken(keys: Any) -> Any:
        raise OSError(EMFILE, "too many open files")

    with monkeypatch.context() as broken_engine:
        broken_engine.setattr(home.engine, "multi_get", broken)
        s.wait(1.6)
        assert not home.leader.serving
        assert len(s.partitions[1].state.intents) == 1
        s.holds = held(Inquire)
    home.fail_over()
    s.holds = lambda op: False
    s.deliver_held()
    s.wait(2)
    assert s.is_clean()


# docs/protocol.md Tx14
def test_attempt_counts_as_sent_only_if_its_entry_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that counts as sent is not dropped when its home key moves away."""
    s = Several()
    a, b = s.key(0), s.key(1)
    home = s.partitions[0]
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    assert home.leader.transactor is not None
    (running,) = home.leader.transactor.attempts
    monkeypatch.setattr(home.leader, "_send_one_by_one", lambda taken, error: None)
    malformed = Put(s.key(0, 1), 5)  # type: ignore[arg-type]
    decides: list[object] = []
    monkeypatch.setattr(home.leader._evaluator, "_finish", lambda draft: decides.append(running.is_sent) or 1 / 0)
    s.partitions[1].acknowledge()
    home.submit(malformed)
    assert decides == [True]
    assert not running.is_sent


# ── PREPARE again ─────────────────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md Tx4
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_repeated_prepare_gets_its_first_answer(*, is_taken_over: bool) -> None:
    s = Several(3)
    a, b, read, counted = s.key(0), s.key(1), s.key(1, 1), s.key(1, 2)
    for key in (b, read):
        s.do(Put(key, b"old", 5_000, int(Flag.RELATIVE_TTL)))
    s.holds = lambda op: isinstance(op, Prepare | Inquire)
    put = Put(b, b"new", 0, int(Flag.RETURN_OLD | Flag.IF_PRESENT))
    s.submit(transact(Put(a, b"1"), put, Get(b), Get(read), Increment(counted, 3), Append(counted, b"0")))
    s.settle()
    (prepare,) = s.held
    participant = s.of(b)

    def answer() -> Any:
        caller = Caller()
        participant.leader.submit((prepare.op,), caller, (0,))
        s.settle()
        participant.acknowledge(len(participant.log.in_flight))
        s.settle()
        return caller.results[0]

    first = answer()
    assert isinstance(first, tuple)
    if is_taken_over:
        participant.fail_over()
    s.wait(1)
    assert answer()[:3] == first[:3]
    assert len(participant.state.intents) == 3, "no second intent"


def test_lost_answer_to_prepare_is_asked_for_again() -> None:
    """A broken link says OutcomeUnknown of the messages that it has carried."""
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: isinstance(op, Prepare)
    done = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.settle()
    (lost,) = s.held
    s.held = []
    s.of(b).leader.submit((lost.op,), Caller(), (0,))
    s.run()
    s.holds = lambda op: False
    lost.sink.complete(lost.token, OutcomeUnknown("the link broke before it answered"))
    s.wait(0.1)
    assert done()[0]
    assert (s.value(a), s.value(b)) == (b"1", b"2")
    assert s.is_clean()


# ── rules that whole clusters rarely meet ─────────────────────────────────────────────────────────────────────────────


# docs/protocol.md Tx3
def test_no_two_attempts_have_one_name() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(transact(Put(a, b"1"), Put(b, b"1")))
    s.do(transact(Put(a, b"2"), Put(b, b"2")))
    s.partitions[0].fail_over()
    s.do(transact(Put(a, b"3"), Put(b, b"3")))
    names = [op.attempt for op in s.sent if isinstance(op, Prepare)]
    assert len(names) == len(set(names)) == 3


# docs/protocol.md Tx4
def test_shared_intent_survives_a_takeover() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(Put(b, b"0"))
    s.holds = lambda op: isinstance(op, Resolve | Inquire)
    assert s.do(transact(Put(a, b"1"), Check(b, int(Flag.IF_PRESENT))))[0]
    s.partitions[1].fail_over()
    write = s.submit(Put(b, b"1"))
    s.run()
    assert write() == "waits"


# docs/protocol.md Tx4
def test_intent_in_flight_refuses_another_transaction() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.submit(transact(Put(a, b"1"), Put(b, b"1")))
    s.settle()
    assert s.partitions[1].log.in_flight, "the first intent is not in flight"
    # b is not at the last participant, so the conflict is refused
    second = s.submit(transact(Put(s.key(0, 1), b"2"), Put(b, b"2"), Put(c, b"2")))
    s.run()
    assert isinstance(second(), Conflict)


# docs/protocol.md Tx4, P8
def test_check_that_fails_by_a_write_in_flight_is_reported_behind_it() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.submit(Put(b, b"in flight"))
    s.settle()
    result = s.submit(transact(Put(a, b"1"), Check(b, int(Flag.IF_ABSENT))))
    s.settle()
    assert result() == "waits"
    s.run()
    assert isinstance(result(), ConditionFailed)


# docs/protocol.md Tx4
def test_check_behind_an_exclusive_intent_conflicts_instead_of_failing() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.holds = lambda op: isinstance(op, Resolve | Inquire)
    s.do(transact(Put(a, b"1"), Put(b, b"1")))
    check = Check(b, int(Flag.IF_PRESENT))
    assert isinstance(s.do(transact(Put(s.key(0, 1), b"2"), check, Put(c, b"2"))), Conflict)


# docs/protocol.md Tx6
def test_leader_that_stops_aborts_no_attempt_whose_decision_it_has_sent() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.partitions[1].acknowledge()
    s.settle()
    assert s.partitions[0].log.in_flight, "DECIDE is not in flight"
    s.partitions[0].leader.stop(NotLeader("p1"))
    s.settle()
    assert not [op for op in s.sent if isinstance(op, Resolve)]


# docs/protocol.md Tx6
def test_former_owner_of_the_home_key_does_not_say_aborted() -> None:
    s = Several(3)
    home = s.partitions[0]
    attempt = Attempt(home.state.partition, 1, 99)
    s.move(0, 2, 1)
    ask(s, attempt, s.key(1), 5)
    assert not home.log.in_flight, "the former owner proves that it leads, to answer"
    assert [op.attempt for op in s.redirected if isinstance(op, Inquire)] == [attempt]


# docs/protocol.md Tx6
def test_intent_whose_outcome_is_lost_gets_it_from_home() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = held(Resolve)
    assert s.do(transact(Put(a, b"1"), Put(b, b"2")))[0]
    s.held = []
    s.wait(2.0)
    assert s.value(b) == b"2"


# docs/protocol.md Tx10
def test_new_leader_says_no_outcome_before_it_serves() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home = s.partitions[0]
    s.holds = held(Resolve)
    assert s.do(transact(Put(a, b"1"), Put(b, b"2")))[0]
    home.leader.stop(NotLeader("p1"))
    home.open()
    s.sent.clear()
    starting = home.loop.create_task(home.leader.start(None, s.redirect, s))
    s.settle()
    decided = next(iter(home.state.decisions))
    (asked,) = home.submit(Inquire(a, decided.attempt, *decided.intents[0]))
    s.settle()
    assert not s.sent
    assert isinstance(home.result(asked), StoreError)
    home.acknowledge()
    assert starting.done()
    assert [op for op in s.sent if isinstance(op, Resolve)]
