"""Transactions over several partitions, from request to END, over logs that the test acknowledges."""

from __future__ import annotations

import pytest

from kvstore.errors import ConditionFailed, Conflict, InvalidRequest, OutcomeUnknown, Overloaded, QuotaExceeded
from kvstore.namespaces import Book, Namespace, NamespaceTable
from kvstore.namespaces.book import Amount
from kvstore.partition.leading.usage import Usage
from kvstore.partition.state import decisions, intents
from kvstore.partition.state.commands import (
    Append,
    Check,
    Delete,
    Expire,
    Flag,
    Get,
    Increment,
    Prepare,
    Put,
    Record,
    Resolve,
    Transact,
)
from kvstore.partition.transactions.outcomes import END_S
from tests.partition.one_partition import Caller
from tests.partition.several_partitions import Several, transact


def test_transaction_writes_in_all_of_its_partitions() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.do(Put(b, b"old"))
    results, positions = s.do(transact(Put(a, b"1"), Put(b, b"2"), Increment(c, 5), Get(a)))
    assert [s.value(each) for each in (a, b, c)] == [b"1", b"2", b"5"]
    assert isinstance(results[3], Record)
    assert results[3].value == b"1"
    assert dict(positions).keys() == {"p1", "p2", "p3"}
    assert s.is_clean()
    assert s.do(Get(b)).value == b"2"


def test_one_entry_removes_the_decisions_of_several_transactions() -> None:
    s = Several()
    home = s.partitions[0].state
    for number in range(5):
        s.do(transact(Put(s.key(0, number), b"1"), Put(s.key(1, number), b"2")))
    before = home.position
    assert before is not None
    assert len(home.decisions) == 5
    s.wait(2 * END_S)
    assert len(home.decisions) == 0
    assert home.position is not None
    assert home.position.entry == before.entry + 1


def test_failed_check_at_participant_undoes_the_transaction() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    failed = s.do(transact(Put(a, b"1"), Check(b, int(Flag.IF_PRESENT))))
    assert isinstance(failed, ConditionFailed)
    assert s.value(a) is None
    assert s.is_clean()


def test_failed_check_at_home_undoes_the_transaction() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    failed = s.do(transact(Put(a, b"1"), Check(a, int(Flag.IF_ABSENT)), Put(b, b"2")))
    assert isinstance(failed, ConditionFailed)
    assert (s.value(a), s.value(b)) == (None, None)
    assert s.is_clean()


# docs/protocol.md Tx16
def test_conflict_is_refused_at_once_except_at_the_last_participant() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    first = s.submit(transact(Put(a, b"1"), Put(b, b"1")))
    s.partitions[1].acknowledge()  # the intent on b exists
    second = s.submit(transact(Put(s.key(0, 1), b"2"), Put(b, b"2"), Put(c, b"2")))
    assert isinstance(second(), Conflict)
    s.run()
    assert first()[0]
    assert [s.value(each) for each in (a, b, c)] == [b"1", b"1", None]
    assert s.is_clean()


# docs/protocol.md Tx4
def test_write_skew_is_refused() -> None:
    """Each transaction reads what the other one writes. Shared intents keep them apart."""
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(Put(a, b"0"))
    s.do(Put(b, b"0"))
    version_a, version_b = s.do(Get(a)).version, s.do(Get(b)).version
    first = s.submit(transact(Put(a, b"1"), Check(b, int(Flag.IF_VERSION), version_b)))
    second = s.submit(transact(Put(b, b"1"), Check(a, int(Flag.IF_VERSION), version_a)))
    s.run()
    assert not (isinstance(first(), tuple) and isinstance(second(), tuple)), "both have committed"
    assert s.is_clean()


# docs/protocol.md Tx4
def test_shared_intent_refuses_a_write_and_allows_another_check() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.do(Put(b, b"0"))
    s.holds = lambda op: op.__class__ is Resolve
    assert s.do(transact(Put(a, b"1"), Check(b, int(Flag.IF_PRESENT))))[0]
    assert s.do(transact(Put(c, b"1"), Check(b, int(Flag.IF_PRESENT))))[0]
    assert s.do(transact(Put(c, b"2"), Put(b, b"2"))) == "waits"
    assert len(s.partitions[1].state.intents) == 2


# docs/protocol.md Tx5
def test_home_decides_only_when_all_have_prepared() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2"), Put(c, b"3")))
    s.partitions[1].acknowledge()
    s.settle()
    assert not s.partitions[0].log.in_flight
    s.partitions[2].acknowledge()
    s.settle()
    assert s.partitions[0].log.in_flight
    s.run()
    assert result()[0]


# docs/protocol.md Tx5
def test_home_checks_its_own_part_when_it_decides() -> None:
    s = Several()
    b, a = s.key(0), s.key(1)
    version = s.do(Put(a, b"0"))
    result = s.submit(transact(Check(a, int(Flag.IF_VERSION), version), Put(a, b"1"), Put(b, b"2")))
    write = s.submit(Put(a, b"between"))
    s.run()
    assert isinstance(result(), ConditionFailed)
    assert isinstance(write(), int)
    assert (s.value(a), s.value(b)) == (b"between", None)
    assert s.is_clean()


# docs/protocol.md Tx5
def test_commit_is_answered_when_the_decision_is_acknowledged() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.partitions[1].acknowledge()
    s.settle()
    assert result() == "waits"
    assert not [op for op in s.sent if isinstance(op, Resolve)], "a participant has learnt of the commit too early"
    s.partitions[0].acknowledge()
    s.settle()
    assert result()[0]
    assert [op for op in s.sent if isinstance(op, Resolve)]


def test_home_conflicts_with_an_intent_of_another_transaction() -> None:
    """Home claims only the keys that it writes. It does not wait for the others behind the participants' locks."""
    s = Several()
    a, read, b = s.key(0), s.key(0, 1), s.key(1)
    s.holds = lambda op: op.__class__ is Resolve or op.key == b
    first = s.submit(transact(Put(a, b"1"), Check(read, int(Flag.IF_ABSENT)), Put(b, b"1")))
    s.run()
    second = s.submit(transact(Put(s.key(1, 1), b"2"), Put(read, b"2")))
    s.run()
    prepare = next(each for each in s.held if each.op.key == b)
    s.held.remove(prepare)
    s.deliver(prepare)
    s.run()
    assert isinstance(first(), Conflict)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert second()[0]
    assert (s.value(a), s.value(read)) == (None, b"2")
    assert s.is_clean()


def test_effects_of_every_kind_arrive() -> None:
    s = Several()
    a, keys = s.key(0), [s.key(1, number) for number in range(9)]
    new, over, gone, again, absent, number, longer, expiring, kept = keys
    expires_ms = s.partitions[1].wall_ms() + 1_000_000
    for key, value in ((over, b"1"), (gone, b"1"), (again, b"1"), (number, b"5"), (longer, b"ab"), (expiring, b"x")):
        s.do(Put(key, value))
    s.do(Put(kept, b"1", expires_ms))
    before = s.do(Get(over))
    results, _ = s.do(
        transact(
            Put(a, b"home"), Put(new, b"1"), Put(over, b"2"), Delete(gone), Delete(again), Put(again, b"2"),
            Delete(absent), Increment(number, 2), Append(longer, b"c"), Expire(expiring, expires_ms),
            Put(kept, b"2", 0, int(Flag.KEEP_TTL)), Get(over), Put(new, b"2", 0, int(Flag.RETURN_OLD)),
            request=s.request(),
        )
    )  # fmt: skip
    assert s.is_clean()
    assert [s.value(key) for key in keys] == [b"2", b"2", None, b"2", None, b"7", b"abc", b"x", b"2"]
    assert results[6] == 0
    assert results[7][0] == 7
    assert results[8][0] == 3
    assert results[9] is True
    assert results[11].value == b"2"
    assert results[12][0] is True
    assert results[12][2].value == b"1"
    found = s.do(Get(over))
    assert found.created == before.created
    assert found.version > before.version
    assert s.do(Get(again)).created > before.created
    assert [s.do(Get(key)).expires_ms for key in (kept, expiring, over)] == [expires_ms, expires_ms, 0]


# docs/protocol.md P11
def test_independent_operations_fail_alone() -> None:
    s = Several()
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    s.do(Put(b, b"text"))
    results, _ = s.do(
        transact(Put(a, b"1"), Increment(b, 1), Put(other, b"2"), flags=int(Flag.INDEPENDENT), request=s.request())
    )
    assert isinstance(results[1], InvalidRequest)
    assert [s.value(key) for key in (a, b, other)] == [b"1", b"text", b"2"]


def test_transaction_within_limits_only() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    keys = [b"l%d" % number for number in range(101)]
    too_many = s.do(transact(*(Put(key, b"") for key in keys)))
    assert isinstance(too_many, InvalidRequest)
    too_large = s.do(transact(Put(a, b"x" * (1 << 20)), Put(b, b"x" * 5000)))
    assert isinstance(too_large, InvalidRequest)
    misrouted = s.do(Transact(b, (Put(a, b"1"), Put(b, b"1"))))
    assert isinstance(misrouted, InvalidRequest)
    assert not s.sent


def test_partition_with_too_many_intents_refuses_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "INTENTS_MAX", 1)
    monkeypatch.setattr(decisions, "DECISIONS_MAX", 1)
    s = Several()
    s.holds = lambda op: op.__class__ is Resolve
    assert s.do(transact(Put(s.key(0), b"1"), Put(s.key(1), b"1")))[0]
    full = s.do(transact(Put(s.key(0, 1), b"1"), Put(s.key(1, 1), b"1")))
    assert isinstance(full, Overloaded)
    monkeypatch.setattr(intents, "INTENTS_MAX", 4)
    full = s.do(transact(Put(s.key(0, 1), b"1"), Put(s.key(1, 1), b"1")))
    assert isinstance(full, Overloaded)
    assert "decisions" in str(full)
    assert s.value(s.key(0, 1)) is None


def test_request_id_of_another_transaction_is_refused() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    request = s.request()
    first = s.submit(transact(Put(a, b"1"), Put(b, b"1"), request=request))
    other = s.submit(transact(Put(a, b"2"), Put(b, b"1"), request=request))
    s.run()
    assert first()[0]
    assert isinstance(other(), InvalidRequest)


# docs/protocol.md Tx2
def test_attempt_is_no_refusal_if_its_request_was_carried_out() -> None:
    """A refusal would let the client begin again under a new request id."""
    s = Several()
    b, a, request = s.key(0), s.key(1), s.request()
    s.holds = lambda op: op.__class__ is Prepare
    attempt = s.submit(transact(Put(a, b"1"), Put(b, b"1"), request=request))
    s.run()
    assert s.do(Put(a, b"by the request", request=request))
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert isinstance(attempt(), OutcomeUnknown)
    s.wait(3)
    assert (s.value(a), s.value(b)) == (b"by the request", None)
    assert s.is_clean()


def test_quota_is_charged_when_prepared() -> None:
    s = Several()
    a, b = s.key(0), b"q:" + s.key(1)
    at = s.of(b)
    if at is s.partitions[0]:
        a = s.key(1)
    book = Book()
    book.take(NamespaceTable(namespaces=(Namespace(name="q", prefix=b"q:", keys_max=1),)))
    at.leader.usage.join(book)
    while not at.leader.usage.count_some():
        pass
    s.holds = lambda op: op.__class__ is Resolve
    assert s.do(transact(Put(a, b"1"), Put(b, b"1")))[0]
    second = next(key for key in (b"q:%d" % number for number in range(99)) if s.of(key) is at and key != b)
    assert isinstance(s.do(transact(Put(a, b"2"), Put(second, b"1"))), QuotaExceeded)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.value(b) == b"1"
    assert at.leader.usage.amounts["q"] == Amount(1, len(b) + 1)


def test_abort_gives_back_what_was_charged() -> None:
    s = Several()
    place = next(place for place in (0, 1) if s.of(b"q:0") is s.partitions[place])
    at, home = s.partitions[place], s.key(1 - place)
    mine = [key for key in (b"q:%d" % number for number in range(99)) if s.of(key) is at]
    book = Book()
    book.take(NamespaceTable(namespaces=(Namespace(name="q", prefix=b"q:"),)))
    at.leader.usage.join(book)
    for key in mine[:3]:
        s.do(Put(key, b"12345"))
    while not at.leader.usage.count_some():
        pass
    before = Amount(3, sum(len(key) + 5 for key in mine[:3]))
    assert at.leader.usage.amounts["q"] == before
    failed = s.submit(
        transact(
            Put(home, b"1"), Put(mine[0], b"1"), Delete(mine[1]), Delete(mine[2]), Put(mine[2], b"1234567"),
            Put(mine[3], b"12"), Append(home, b"x"), Increment(home, 1),
        )
    )  # fmt: skip
    charged = at.leader.usage.amounts["q"]
    expected = Amount(3, len(mine[0]) + 1 + len(mine[2]) + 7 + len(mine[3]) + 2)
    assert charged == expected
    again = Usage(at.state, 1, at.leader._evaluator._overlay, at.leader._evaluator.lock_table)
    again.join(book)
    while not again.count_some():
        pass
    assert again.amounts["q"] == expected, "a new leader counts the intents"
    at.leader.usage.join(book)
    s.run()
    assert isinstance(failed(), InvalidRequest)
    assert s.is_clean()
    assert at.leader.usage.amounts["q"] == before


# ── order ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md M15
def test_write_in_progress_beside_a_transaction_may_be_done_before_it() -> None:
    """Servers order a transaction by its answer only: a client awaits it before it writes one of the keys again."""
    s = Several()
    b, a = s.key(0), s.key(1)  # home locks its key when it decides
    done = s.submit(transact(Put(a, b"of the transaction"), Put(b, b"1")))
    later = s.submit(Put(a, b"later"))
    s.run()
    assert later() < done()[0][0], "it was not held up"
    assert s.value(a) == b"of the transaction"
    assert s.do(Put(a, b"awaited"))
    assert s.value(a) == b"awaited"


# docs/protocol.md M15
def test_write_beside_a_malformed_one_passes_no_waiting_write() -> None:
    """A batch with a malformed operation is evaluated one by one. RESOLVED, in front, frees the key of a write that
    waits; a write behind must not be done before that one."""
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: isinstance(op, Resolve)
    assert s.submit(transact(Put(a, b"1"), Put(b, b"2")))() == "waits"
    s.run()
    earlier = s.submit(Put(b, b"earlier"))
    s.run()
    assert earlier() == "waits"
    participant, (resolve,) = s.of(b), s.held
    malformed, later = Put(s.key(1, 1), 5), Put(b, b"later")  # type: ignore[arg-type]
    participant.leader.submit((resolve.op,), resolve.sink, (resolve.token,))
    participant.leader.submit((malformed, later), Caller(), (0, 1))
    s.holds = lambda op: False
    s.run()
    assert isinstance(earlier(), int)
    assert s.value(b) == b"later"
