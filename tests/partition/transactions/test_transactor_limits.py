"""The work, memory and bytes in the log that transactions may take. Partitions that answer nobody must not keep others
from ending their transactions (docs/protocol.md Tx6, Tx8)."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state.commands import Get, Inquire, Op, Prepare, Put, Resolve
from kvstore.partition.transactions import attempts, outcomes, questions
from tests.partition.several_partitions import Several, transact


# docs/protocol.md Tx8
def test_decisions_for_a_silent_participant_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "AT_ONCE_MAX", 2)
    s = Several(3)
    _, silent, other = s.partitions
    s.holds = lambda op: op.__class__ is Inquire or (op.__class__ is Resolve and s.of(op.key) is silent)
    for number in range(3):
        assert s.do(transact(Put(s.key(0, number), b"1"), Put(s.key(1, number), b"2")))[0]
    assert s.do(transact(Put(s.key(0, 9), b"1"), Put(s.key(2), b"2")))[0]
    s.wait(1.2)
    assert not len(other.state.intents)
    s.holds = lambda op: False
    s.deliver_held()
    s.wait(2)
    assert s.is_clean()


# docs/protocol.md Tx6
def test_questions_to_a_silent_home_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "AT_ONCE_MAX", 2)
    s = Several(3)
    participant, silent, _ = s.partitions
    s.holds = lambda op: op.__class__ is Resolve or (op.__class__ is Inquire and s.of(op.key) is silent)
    for number in range(3):
        assert s.do(transact(Put(s.key(1, number), b"1"), Put(s.key(0, number), b"2")))[0]
    s.wait(2)
    assert s.do(transact(Put(s.key(2), b"1"), Put(s.key(0, 9), b"2")))[0]
    s.wait(3)
    assert [each.home for each in participant.state.intents] == [s.key(1, number) for number in range(3)]
    s.holds = lambda op: False
    s.deliver_held()
    s.wait(2)
    assert s.is_clean()


def test_bytes_of_transactions_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS_BYTES_MAX", 3_000)
    s = Several()
    s.holds = lambda op: op.__class__ is Prepare
    begun = [s.submit(transact(Put(s.key(0, n), b"1" * 500), Put(s.key(1, n), b"2" * 500))) for n in range(3)]
    assert [isinstance(result(), Overloaded) for result in begun] == [False, False, True]
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert begun[0]()[0]
    assert s.do(transact(Put(s.key(0), b"1" * 500), Put(s.key(1), b"2" * 500)))[0], "ended ones count no longer"


def test_ended_attempt_leaves_no_timer_that_keeps_its_values() -> None:
    s = Several()
    s.holds = lambda op: op.__class__ is Prepare
    for ends in ("commits", "is dropped"):
        s.submit(transact(Put(s.key(0), b"1"), Put(s.key(1), b"2")))
        transactor = s.partitions[0].leader.transactor
        assert transactor is not None
        (running,) = transactor.attempts
        assert running.deadline is not None
        if ends == "commits":
            s.deliver_held()
            s.run()
        else:
            s.partitions[0].fail_over()
        assert running.deadline.cancelled(), ends


# docs/protocol.md P11
def test_decision_with_remembered_results_fits_into_an_entry() -> None:
    """Bookies accept no entry of 5 MiB. Home's effects and its own results, and the results of the others, took up to
    2.5 MiB each, so a client could end the leadership of its home."""
    s = Several()
    large, small = b"x" * VALUE_BYTES_MAX, b"x" * 520_000
    for place in range(2):
        for number, value in enumerate((large, large, small), 1):
            s.do(Put(s.key(place, number), value))
    ops: list[Op] = [Put(s.key(0), large), Get(s.key(0, 1)), Get(s.key(0, 3))]
    ops += [Get(s.key(1, number)) for number in range(1, 4)]
    result = s.submit(transact(*ops, request=s.request()))
    s.run()
    assert isinstance(result(), InvalidRequest)
    assert all(len(each.payload) < 5 << 19 for each in s.partitions[0].log.acknowledged)
    assert s.do(transact(*ops))[0], "without a request id, results are not logged"
    assert s.is_clean()


def test_transaction_returns_no_more_than_a_batch() -> None:
    s = Several()
    large = b"x" * VALUE_BYTES_MAX
    for place in range(2):
        for number in range(10):
            s.do(Put(s.key(place, number), large))
    ops: list[Op] = [Get(s.key(place, number)) for place in range(2) for number in range(10)]
    assert isinstance(s.do(transact(Put(s.key(0, 99), b"1"), *ops)), InvalidRequest)
    assert s.do(transact(Put(s.key(0, 99), b"1"), *ops[4:]))[0]


# docs/protocol.md Tx4
@pytest.mark.parametrize(("bytes_max", "is_named"), [(5_000, False), (20_000, True)])
def test_results_of_prepared_participants_are_bounded(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, *, is_named: bool
) -> None:
    """Results wait at home for the slowest participant. A client that is known by its request ids has a quarter."""
    monkeypatch.setattr(attempts, "ATTEMPTS_BYTES_MAX", bytes_max)
    s = Several(3)
    read, slow = s.key(1), s.key(2)
    s.do(Put(read, b"x" * 3_000))
    s.holds = lambda op: op.__class__ is Prepare and op.key == slow
    begun = []
    for number in range(2):
        op = transact(Put(s.key(0, number), b"1"), Get(read), Get(slow), request=s.request() if is_named else None)
        begun.append(s.submit(op))
        s.run()
    assert [result() if result() == "waits" else type(result()) for result in begun] == ["waits", Overloaded]
    s.wait(0.3)
    assert [len(each.state.intents) for each in s.partitions] == [0, 1, 0], "the refused one was aborted"
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert begun[0]()[0]
    assert s.do(transact(Put(s.key(0), b"1"), Get(read), Get(slow), request=s.request() if is_named else None))[0]
    assert s.is_clean()


def test_one_client_may_have_a_quarter_of_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS_MAX", 8)
    s = Several()
    s.holds = lambda op: op.__class__ is Prepare
    begun = [
        s.submit(transact(Put(s.key(0, n), b"1"), Put(s.key(1, n), b"2"), request=s.request() if n < 3 else None))
        for n in range(10)
    ]
    refused = [isinstance(result(), Overloaded) for result in begun]
    assert refused == [False, False, True, *[False] * 6, True], "others have no quarter, and all have the limit"
