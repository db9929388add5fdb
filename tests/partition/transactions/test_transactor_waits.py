"""Transactions that wait for keys instead of being refused (docs/protocol.md Tx16)."""

from __future__ import annotations

import pytest

from kvstore.errors import ConditionFailed, Conflict, Unavailable
from kvstore.partition.leading import lock_table
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    DeleteRange,
    Flag,
    Get,
    Inquire,
    Prepare,
    Put,
    Resolve,
)
from kvstore.partition.state.tokens import TokenSpan
from kvstore.partition.transactions.transactor import PREPARE_S
from tests.partition.one_partition import TIME_MS
from tests.partition.several_partitions import Several, transact
from tests.ring import rings


def test_transactions_wait_in_turn_at_their_last_participant() -> None:
    s = Several()
    b = s.key(1)
    some = [s.submit(transact(Put(s.key(0, n), b"1"), Append(b, b"%d" % n))) for n in range(5)]
    s.run()
    assert all(isinstance(each(), tuple) for each in some)
    assert s.value(b) == b"01234"
    assert s.is_clean()


@pytest.mark.parametrize("home", [0, 1], ids=["home first", "home last"])
def test_transactions_on_one_home_key_all_commit(home: int) -> None:
    s = Several()
    a = s.key(home)
    some = [s.submit(transact(Append(a, b"%d" % n), Put(s.key(1 - home, n), b"1"))) for n in range(5)]
    s.run()
    assert all(isinstance(each(), tuple) for each in some)
    assert sorted(s.value(a) or b"") == sorted(b"01234")
    assert s.is_clean()


@pytest.mark.parametrize("home", [0, 1], ids=["home first", "home last"])
def test_transactions_run_together_at_home_unless_they_name_versions(home: int) -> None:
    s = Several()
    a, c = s.key(home), s.key(home, 50)
    s.holds = lambda op: op.__class__ is Prepare
    for n in range(3):
        s.submit(transact(Append(a, b"+"), Put(s.key(1 - home, n), b"1")))
        s.submit(transact(Put(c, b"1", 0, int(Flag.IF_ABSENT)), Put(s.key(1 - home, 10 + n), b"1")))
    s.run()
    assert sorted(each.op.home for each in s.held) == sorted([a, a, a, c])  # type: ignore[attr-defined]


def test_transactions_over_two_keys_in_both_orders_all_commit() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    some = [s.submit(transact(*(Append(key, b"%d" % n) for key in ((a, b) if n % 2 else (b, a))))) for n in range(10)]
    s.run()
    assert all(isinstance(each(), tuple) for each in some)
    assert s.value(a) == s.value(b)
    assert sorted(s.value(a) or b"") == sorted(b"0123456789")
    assert s.is_clean()


def test_transaction_that_only_reads_waits_at_each_participant_in_turn() -> None:
    """It holds the keys of earlier partitions only, so nobody who holds a later key waits for it."""
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.holds = lambda op: op.__class__ is Resolve and op.key == a
    assert s.do(transact(Put(b, b"1"), Put(a, b"1")))[0]
    read = s.submit(transact(Get(c), Get(b), Get(a)))
    s.run()
    assert read() == "waits"
    assert not len(s.partitions[1].state.intents), "it has locked b before a"
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    results, _ = read()
    assert [each and each.value for each in results] == [None, b"1", b"1"]
    assert s.is_clean()


def test_prepare_waits_for_the_claim_of_an_attempt_at_home() -> None:
    """Otherwise the attempt would meet an intent on its own key when it decides."""
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Prepare and op.home == a
    first = s.submit(transact(Append(a, b"1"), Append(b, b"1")))
    s.run()
    second = s.submit(transact(Append(b, b"2"), Append(a, b"2")))
    s.run()
    assert not len(s.partitions[0].state.intents)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert first()[0]
    assert second()[0]
    assert s.value(a) == s.value(b) == b"12"


def test_claim_lets_reads_pass_and_plain_writes_wait() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(Put(a, b"old"))
    s.holds = lambda op: op.__class__ is Prepare
    s.submit(transact(Append(a, b"+"), Put(b, b"1")))
    write = s.submit(Append(a, b"-"))
    assert s.do(Get(a)).value == b"old"
    assert write() == "waits"
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.value(a) == b"old+-"


def test_dropped_attempt_frees_the_keys_at_home() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Prepare
    first = s.submit(transact(Put(a, b"1"), Put(b, b"1")))
    write = s.submit(Put(a, b"plain"))
    s.wait(PREPARE_S + 0.1)
    assert isinstance(first(), Unavailable)
    assert isinstance(write(), int)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert (s.value(a), s.value(b)) == (b"plain", None)
    assert s.is_clean()


def test_new_leader_of_home_begins_what_waited_at_its_predecessor() -> None:
    s = Several()
    a, b, txn = s.key(0), s.key(1), s.request()
    s.holds = lambda op: op.__class__ is Prepare
    s.submit(transact(Put(a, b"1"), Put(b, b"1")))
    waiting = transact(Put(a, b"2"), Put(b, b"2"), request=txn)
    s.submit(waiting)
    s.run()
    s.partitions[0].fail_over()
    s.holds = lambda op: False
    s.deliver_held()
    retry = s.submit(waiting)
    s.wait(0.2)
    assert retry()[0]
    assert (s.value(a), s.value(b)) == (b"2", b"2")
    assert s.is_clean()


def test_condition_that_fails_at_home_asks_no_participant() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    version = s.do(Put(a, b"0"))
    failed = s.do(transact(Put(a, b"1", 0, int(Flag.IF_VERSION), version + 1), Put(b, b"1")))
    assert isinstance(failed, ConditionFailed)
    assert not s.sent
    assert s.do(transact(Put(a, b"1", 0, int(Flag.IF_VERSION), version), Put(b, b"1")))[0]


# docs/protocol.md Tx4
def test_condition_at_home_is_not_judged_under_another_transaction() -> None:
    """The transaction is decided, but its effect on the key has not come."""
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Resolve
    assert s.do(transact(Put(b, b"1"), Put(a, b"1")))[0]
    present = s.submit(transact(Check(a, int(Flag.IF_PRESENT)), Put(a, b"2"), Put(s.key(1, 1), b"2")))
    s.run()
    assert present() == "waits"
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert present()[0]
    assert s.value(a) == b"2"


def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_table, "LINE_MAX", 3)
    s = Several()
    for home in (0, 1):
        a = s.key(home, 50)
        s.holds = lambda op: op.__class__ is Prepare
        put = Put(a, b"+", 0, int(Flag.IF_ABSENT))
        some = [s.submit(transact(put, Put(s.key(1 - home, n), b"1"))) for n in range(6)]
        assert [isinstance(each(), Conflict) for each in some] == [False] * 4 + [True] * 2
        s.holds = lambda op: False
        s.deliver_held()
        s.run()
        assert [isinstance(each(), ConditionFailed) for each in some] == [False] + [True] * 3 + [False] * 2
    b = s.key(1, 9)
    s.holds = lambda op: op.__class__ is Resolve
    some = [s.submit(transact(Put(s.key(0, n), b"1"), Append(b, b"+"))) for n in range(6)]
    s.run()
    assert [isinstance(each(), Conflict) for each in some] == [False] * 4 + [True] * 2


def test_prepare_that_waited_longer_than_its_attempt_logs_nothing() -> None:
    s = Several()
    b = s.key(1)
    s.holds = lambda op: op.__class__ in (Resolve, Inquire)
    s.do(transact(Put(s.key(0), b"1"), Put(b, b"1")))
    late = s.submit(transact(Put(s.key(0, 1), b"2"), Put(b, b"2")))
    s.wait(PREPARE_S + 0.1)
    assert isinstance(late(), Unavailable)
    entries = s.partitions[1].leader.statistics()["mutations"]
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert s.partitions[1].leader.statistics()["mutations"] == entries + 2, "other than RESOLVED and its effect"
    assert s.is_clean()


@pytest.mark.parametrize("home", [0, 1], ids=["home first", "home last"])
def test_retry_that_waits_beside_its_request_frees_the_keys_at_home(home: int) -> None:
    s = Several()
    a, b, txn = s.key(home), s.key(1 - home), s.request()
    s.holds = lambda op: op.__class__ is Resolve
    s.do(transact(Put(s.key(1 - home, 1), b"1"), Put(a, b"0")))
    op, copy = (transact(Append(a, b"1"), Put(b, b"1"), request=txn) for _ in range(2))
    some = [s.submit(each) for each in (op, op, copy)]
    s.run()
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert all(each()[0] for each in some)
    _, version = s.do(Append(a, b"2"))
    assert s.do(transact(Put(a, b"3", 0, int(Flag.IF_VERSION), version), Put(b, b"1")))[0]
    assert s.is_clean()


def test_batch_that_waits_for_an_attempt_does_not_make_it_fail() -> None:
    """The batch also locks a key that the attempt only checks."""
    s = Several()
    a, c = s.key(0), s.key(0, 1)
    s.do(Put(c, b"1"))
    s.holds = lambda op: op.__class__ is Prepare
    first = s.submit(transact(Append(a, b"+"), Check(c, int(Flag.IF_PRESENT)), Put(s.key(1), b"1")))
    batch = s.submit(Batch(a, (Append(a, b"-"), Append(c, b"-"))))
    s.run()
    assert batch() == "waits"
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert first()[0]
    assert (s.value(a), s.value(c)) == (b"+-", b"1-")


def test_transaction_that_begins_logs_nothing_behind_a_freeze() -> None:
    """The home key stays, but an expired record that the transaction checks is on its way to another partition."""
    s = Several()
    a, c = s.key(0), s.key(0, 1)
    s.do(Put(c, b"1", TIME_MS + 50))
    s.wait(0.1)
    token = rings.key_hash.token_of(c)
    freeze = s.freeze(s.partitions[0], s.partitions[1], 1, TokenSpan(token, token))
    before = s.partitions[0].leader.statistics()["mutations"]
    s.holds = lambda op: op.__class__ is Prepare
    s.submit(transact(Put(a, b"1"), Check(c, int(Flag.IF_PRESENT)), Put(s.key(1), b"1")))
    s.run()
    assert s.partitions[0].leader.statistics()["mutations"] == before
    s.finish_move(s.partitions[0], s.partitions[1], 1, freeze)


def test_delete_of_a_range_keeps_its_place_behind_a_waiting_write() -> None:
    s = Several()
    a = s.key(0)
    s.holds = lambda op: op.__class__ is Prepare
    first = s.submit(transact(Append(a, b"+"), Put(s.key(1), b"1")))
    write, delete, last = s.submit(Append(a, b"-")), s.submit(DeleteRange(a, a + b"\0")), s.submit(Append(a, b"1"))
    s.run()
    assert (write(), delete(), last()) == ("waits", "waits", "waits")
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert first()[0]
    assert delete() == 1
    assert s.value(a) == b"1"


def test_transaction_that_names_versions_waits_only_for_others_that_do() -> None:
    """Otherwise it could never begin at a home key that other transactions write all the time."""
    s = Several()
    b = s.key(1)
    version = s.do(Put(b, b"0"))
    s.holds = lambda op: op.__class__ is Prepare
    s.submit(transact(Append(b, b"+"), Put(s.key(0), b"1")))
    s.run()
    named = s.submit(transact(Put(b, b"1", 0, int(Flag.IF_VERSION), version), Put(s.key(0, 1), b"1")))
    s.run()
    assert len(s.held) == 2
    s.deliver(s.held[1])
    s.run()
    assert named()[0]
