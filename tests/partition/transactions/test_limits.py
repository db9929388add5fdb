"""Which operations may be a transaction over several partitions."""

from __future__ import annotations

import pytest

from kvstore.coordination_keys import KINDS, is_coordination_key
from kvstore.errors import InvalidRequest
from kvstore.limits import BATCH_BYTES_MAX, KEY_BYTES_MAX, TRANSACTION_KEYS_MAX, TRANSACTION_PARTITIONS_MAX
from kvstore.partition.state.commands import Check, Flag, Get, Op, Put, Scan, Transact
from kvstore.partition.transactions.limits import check_transaction
from kvstore.types import PartitionId
from tests.partition.several_partitions import Several, transact


def puts(count: int) -> tuple[Op, ...]:
    return tuple(Put(b"%d" % number, b"") for number in range(count))


@pytest.mark.parametrize(
    ("ops", "partitions", "expected"),
    [
        (puts(TRANSACTION_KEYS_MAX), 2, ""),
        ((*puts(TRANSACTION_KEYS_MAX), *puts(TRANSACTION_KEYS_MAX)), 2, ""),
        (puts(TRANSACTION_KEYS_MAX + 1), 2, "expected at most 100 keys in a transaction over several partitions, got"),
        (puts(TRANSACTION_KEYS_MAX + 1), 1, ""),
        (puts(50), TRANSACTION_PARTITIONS_MAX, ""),
        (puts(50), TRANSACTION_PARTITIONS_MAX + 1, "expected keys of at most 16 partitions in a transaction, got"),
        ((Put(b"1", bytes(BATCH_BYTES_MAX)), Put(b"2", bytes(KEY_BYTES_MAX))), 2, "expected up to 1048576 bytes"),
        ((), 1, "expected one or more operations"),
        ((Get(b"1"), Scan(b"2", b"", 1)), 2, "expected one or more operations that may be in a batch"),
    ],
)
def test_transaction_above_a_limit_is_refused(ops: tuple[Op, ...], partitions: int, expected: str) -> None:
    op = Transact(b"0" if ops and ops[0].key == b"0" else b"1", ops)

    def partition_of(key: bytes) -> PartitionId:
        return PartitionId(f"p{int(key) % partitions}")

    if not expected:
        return check_transaction(op, partition_of)
    with pytest.raises(InvalidRequest, match=expected):
        check_transaction(op, partition_of)


def test_transaction_with_another_home_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected the first key that the transaction writes as its home key"):
        check_transaction(Transact(b"1", (Get(b"1"), Put(b"2", b""))), lambda key: PartitionId("p1"))


# ── keys of sessions and locks ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_coordination_keys_are_recognised_by_their_names(kind: bytes) -> None:
    assert is_coordination_key(b"{jobs}/" + kind + b"/name")
    assert not is_coordination_key(b"{jobs}/" + kind), "a key that a session may have under its own name"
    assert not is_coordination_key(b"jobs/" + kind + b"/name")
    assert not is_coordination_key(b"{}/" + kind + b"/name")


# docs/protocol.md Tx1
@pytest.mark.parametrize("op", [Put(b"{a}/lock/l/1", b""), Check(b"{a}/lock/l/1", int(Flag.IF_PRESENT))])
def test_home_refuses_keys_of_locks_over_several_partitions(op: Op) -> None:
    s = Several()
    lock = s.of(op.key)
    other = s.key(1 - lock.place)
    refused = s.do(transact(Put(other, b"1"), op))
    assert isinstance(refused, InvalidRequest)
    assert "got b'{a}/lock/l/1'" in str(refused)
    assert not len(lock.state.intents), "nothing keeps the lock from expiring"


def test_keys_of_locks_may_be_in_a_transaction_in_one_partition() -> None:
    s = Several()
    key = b"{a}/session/1"
    mine = next(s.key(s.of(key).place, number) for number in range(9))
    assert s.do(transact(Put(mine, b"1"), Put(key, b"2")))[0]
