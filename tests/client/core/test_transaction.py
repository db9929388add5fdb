"""The reads of a transaction, the writes that it keeps back, and its commit."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.core import operations
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.transaction import TransactionState
from kvstore.client.core.values import Item, Level
from kvstore.errors import ConditionFailed, Conflict, InvalidRequest
from kvstore.limits import TRANSACTION_KEYS_MAX, TRANSACTION_PARTITIONS_MAX
from kvstore.proto import kv_pb2

FOUND = Item(b"5", 7, 3, 1, 0)


def having(**found: Item | None) -> TransactionState:
    """Return a transaction that has read these keys."""
    state = TransactionState()
    for key, item in found.items():
        state.take(key.encode(), item, Level.LINEARIZABLE)
    return state


def committed(state: TransactionState) -> list[tuple[int, bytes, int]]:
    """Return code, key and version of each operation of the commit."""
    return [(each.code, each.key, each.options.version if each.options else 0) for each in state.commit()]


def test_commit_checks_what_was_read_and_then_writes_in_order() -> None:
    state = having(a=FOUND, b=None)
    state.require(operations.condition(b"c", present=True))
    for each in (operations.put(b"b", b"1"), operations.delete(b"a"), operations.put(b"b", b"2")):
        state.write(each)
    assert committed(state) == [
        (kv_pb2.CHECK, b"a", 7),
        (kv_pb2.CHECK, b"b", 0),
        (kv_pb2.CHECK, b"c", 0),
        (kv_pb2.PUT, b"b", 0),
        (kv_pb2.DELETE, b"a", 0),
        (kv_pb2.PUT, b"b", 0),
    ]


def test_single_linearizable_read_needs_no_commit() -> None:
    assert TransactionState().commit() == []
    assert having(a=FOUND).commit() == []
    stale = TransactionState()
    stale.take(b"a", FOUND, Level.STALE)
    assert committed(stale) == [(kv_pb2.CHECK, b"a", 7)]
    assert len(having(a=FOUND, b=None).commit()) == 2


def test_first_of_several_reads_of_a_key_counts() -> None:
    state = having(a=FOUND)
    state.take(b"a", FOUND._replace(version=8), Level.LINEARIZABLE)
    assert state.item(b"a") == FOUND
    assert state.unread([b"a", b"b"]) == [b"b"]


def test_reads_see_the_own_writes() -> None:
    state = having(a=FOUND, b=None)
    state.write(operations.increment(b"a", -2))
    state.write(operations.append(b"b", b"x"))
    state.write(operations.append(b"b", b"y"))
    state.write(operations.put(b"c", b"1", ttl_s=1))
    state.write(operations.delete(b"d"))
    assert state.unread([b"c", b"d", b"e"]) == [b"e"], "their values follow from the writes"
    found = {key: state.item(key) for key in (b"a", b"b", b"c", b"d")}
    assert found == {
        b"a": Item(b"3", 0, 0, 0, 0),
        b"b": Item(b"xy", 0, 0, 0, 0),
        b"c": Item(b"1", 0, 0, 0, 0),
        b"d": None,
    }
    state.write(operations.increment(b"d"))
    assert state.item(b"d") == Item(b"1", 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("before", "condition", "kind"),
    [
        ([operations.put(b"a", b"1")], {"if_absent": True}, ConditionFailed),
        ([operations.put(b"a", b"1")], {"if_present": True}, None),
        ([operations.put(b"a", b"1")], {"if_version": 7}, InvalidRequest),
        ([operations.put(b"a", b"1", if_absent=True)], {"if_absent": True}, ConditionFailed),
        ([operations.append(b"a", b"1")], {"if_absent": True}, ConditionFailed),
        ([operations.put(b"a", b"1"), operations.delete(b"a")], {"if_absent": True}, None),
        ([operations.delete(b"a")], {"if_present": True}, ConditionFailed),
        ([operations.put(b"b", b"1")], {"if_absent": True}, None),
    ],
)
def test_condition_of_a_write_considers_the_own_writes(
    before: list[ClientOperation], condition: dict[str, Any], kind: type[Exception] | None
) -> None:
    """The store reports the key's new version, which looks like a change by another client."""
    state = having(a=FOUND)
    for each in before:
        state.write(each)
    write = operations.put(b"a", b"2", **condition)
    if kind is None:
        state.write(write)
        assert len(state.commit()) == 1 + len(before) + 1
        return
    with pytest.raises(kind) as caught:
        state.write(write)
    if kind is ConditionFailed:
        assert isinstance(caught.value, ConditionFailed)
        assert (caught.value.key, caught.value.version) == (b"a", 0)


@pytest.mark.parametrize("value", [b"five", b"", b"%d" % ((1 << 63) - 1)])
def test_value_that_cannot_be_incremented_is_reported_by_the_read(value: bytes) -> None:
    state = having(a=FOUND._replace(value=value))
    state.write(operations.increment(b"a"))
    with pytest.raises(InvalidRequest):
        state.item(b"a")


def test_ended_transaction_refuses_reads_and_writes() -> None:
    state = TransactionState()
    state.end()
    for call in (
        lambda: state.unread([b"a"]),
        lambda: state.take(b"a", None, 0),
        lambda: state.write(operations.delete(b"a")),
        lambda: state.require(operations.condition(b"a", present=True)),
    ):
        with pytest.raises(InvalidRequest, match="the transaction has ended"):
            call()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConditionFailed(8, b"a"), Conflict),
        (ConditionFailed(0, b"a"), Conflict),
        (ConditionFailed(7, b"a"), ConditionFailed),
        (ConditionFailed(8, b"c"), ConditionFailed),
        (ConditionFailed(8), ConditionFailed),
    ],
    ids=["changed", "deleted", "as read", "not read", "not read and too long to be named"],
)
def test_changed_read_is_a_conflict_and_an_unmet_condition_is_not(error: ConditionFailed, kind: type) -> None:
    assert type(having(a=FOUND).failure(error)) is kind
    assert TransactionState().failure(error) is error


def test_unnamed_condition_may_be_of_a_read_key_that_is_too_long() -> None:
    state = TransactionState()
    state.take(b"\xff" * 400, FOUND, Level.LINEARIZABLE)
    assert type(state.failure(ConditionFailed(8))) is Conflict


# ── the request ──────────────────────────────────────────────────────────────────────────────────────────────────────


def partition_of(key: bytes) -> str:
    return f"p{key.partition(b'/')[0].decode()}"


def test_transaction_goes_to_the_first_key_that_it_writes() -> None:
    parts = [operations.condition(b"1/a", version=1), operations.get(b"2/a"), operations.delete(b"3/a")]
    whole = operations.transact(parts, partition_of)
    assert (whole.code, whole.key, whole.is_read) == (kv_pb2.TRANSACT, b"3/a", False)
    reads = operations.transact(parts[:2], partition_of)
    assert (reads.key, reads.is_read) == (b"1/a", True), "its outcome is never unknown"


def test_transaction_beyond_its_limits_is_refused_before_it_is_sent() -> None:
    of_one = [operations.delete(b"1/%d" % number) for number in range(TRANSACTION_KEYS_MAX)]
    assert operations.transact([*of_one, operations.delete(b"1/x")], partition_of).key == b"1/0"
    with pytest.raises(InvalidRequest, match="at most 100 keys in a transaction over several partitions, got 101"):
        operations.transact([*of_one, operations.delete(b"2/x")], partition_of)
    of_many = [operations.delete(b"%d/k" % number) for number in range(TRANSACTION_PARTITIONS_MAX + 1)]
    assert operations.transact(of_many[1:], partition_of).key == b"1/k"
    with pytest.raises(InvalidRequest, match="at most 16 partitions in a transaction, got keys of 17"):
        operations.transact(of_many, partition_of)
    large = [operations.put(b"%d" % number, bytes(1 << 19)) for number in range(2)]
    with pytest.raises(InvalidRequest, match="at most 1048576 bytes in a transaction, got 1048578"):
        operations.transact(large, partition_of)
