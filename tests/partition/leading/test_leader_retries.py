"""A mutation with a request id is applied once, whatever the client and the leaders do."""

from typing import Any

import pytest

from kvstore.errors import ConditionFailed, InvalidRequest, NotLeader, OutcomeUnknown, Overloaded, RequestExpired
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Delete,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Increment,
    Meta,
    Put,
    Record,
    RequestId,
)
from kvstore.partition.state.results import decode_result, encode_result
from kvstore.partition.state.transfer import StateExport, StateImport
from kvstore.server.grpc.encode import result_message
from tests.partition.one_partition import TIME_MS, UNKNOWN, Partition
from tests.partition.state.engine_memory import MemoryEngine

X, Y = b"x" * 16, b"y" * 16


def request(sequence: int, first_unacked: int = 1, seen_ms: int = TIME_MS, client: bytes = X) -> RequestId:
    return RequestId(client, sequence, first_unacked, seen_ms)


@pytest.fixture
def p() -> Partition:
    made = Partition().start()
    made.do(Put(b"a", b"1"), Put(b"n", b"5"))
    return made


def takeover(p: Partition) -> None:
    """Return another leader, whose state contains only what the engine and the log hold."""
    p.leader.stop(NotLeader("p1"))
    p.state.load()
    p.open()
    p.start()


OPS = [
    Put(b"a", b"2", request=request(1)),
    Put(b"a", b"2", flags=Flag.RETURN_OLD, request=request(1)),
    Put(b"a", b"2", flags=Flag.RETURN_OLD | Flag.IF_ABSENT, request=request(1)),
    Delete(b"a", request=request(1)),
    Delete(b"a", flags=Flag.RETURN_OLD, request=request(1)),
    Delete(b"absent", request=request(1)),
    Increment(b"n", 3, request=request(1)),
    Append(b"a", b"x", request=request(1)),
    Expire(b"a", 60_000, Flag.RELATIVE_TTL, request=request(1)),
    Expire(b"absent", 60_000, Flag.RELATIVE_TTL, request=request(1)),
    Batch(b"a", (Increment(b"n", 1), Get(b"a"), Delete(b"a", Flag.IF_ABSENT)), Flag.INDEPENDENT, request=request(1)),
    DeleteRange(b"", b"", request=request(1)),
]


# docs/protocol.md P12
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("other_leader", [False, True])
def test_retry_gets_the_first_answer_and_changes_nothing(p: Partition, op: Any, other_leader: bool) -> None:
    first = p.do(op)
    p.do(Put(b"absent", b"now"), Put(b"a", b"later"))
    if other_leader:
        takeover(p)
    fingerprint, seq = p.state.fingerprint(), p.state.seq
    again = p.do(op)
    assert repr(again) == repr(first)
    assert type(again) is type(first)
    assert (p.state.fingerprint(), p.state.seq) == (fingerprint, seq)


@pytest.mark.parametrize("op", OPS)
def test_retry_gets_the_answer_of_an_attempt_in_flight(p: Partition, op: Any) -> None:
    first = p.submit(op)[0]
    again = p.submit(op)[0]
    assert p.result(again) == "waits"
    p.acknowledge()
    assert repr(p.result(again)) == repr(p.result(first))
    assert len(p.log.in_flight) == 0


def test_retry_within_one_entry_gets_the_same_answer(p: Partition) -> None:
    op = Increment(b"n", 1, request=request(1))
    assert p.do(op, op, op) == [(6, 3)] * 3


def test_retry_of_a_lost_write_is_applied_by_the_next_leader(p: Partition) -> None:
    op = Put(b"a", b"2", request=request(1))
    (token,) = p.submit(op)
    p.log.fail(UNKNOWN)
    p.settle()
    assert isinstance(p.result(token), OutcomeUnknown)
    takeover(p)
    assert p.do(op) == 3


def test_retry_of_a_lost_entry_is_unknown(p: Partition) -> None:
    op = Put(b"a", b"2", request=request(1))
    p.submit(op)
    (again,) = p.submit(op)
    p.log.fail(UNKNOWN)
    p.settle()
    assert isinstance(p.result(again), OutcomeUnknown)


def test_retry_answer_needs_the_lease(p: Partition) -> None:
    op = Put(b"a", b"2", request=request(1))
    p.do(op)
    p.wait(1)
    (again,) = p.submit(op)
    assert p.result(again) == "waits"
    p.acknowledge()
    assert p.result(again) == 3


# docs/protocol.md P13
def test_refused_request_is_not_remembered(p: Partition) -> None:
    op = Put(b"a", b"2", flags=Flag.IF_ABSENT, request=request(1))
    assert isinstance(p.do(op), ConditionFailed)
    p.do(Delete(b"a"))
    assert p.do(op) == 4


def test_late_duplicate_of_an_acknowledged_request_is_refused(p: Partition) -> None:
    p.do(Put(b"a", b"2", request=request(1)))
    p.do(Put(b"a", b"3", request=request(2, first_unacked=2)))
    assert isinstance(p.do(Put(b"a", b"2", request=request(1))), RequestExpired)
    assert p.do(Get(b"a")).value == b"3"


def test_late_duplicate_is_refused_while_acknowledgement_is_in_flight(p: Partition) -> None:
    """Request 1 was refused, and its client knows; request 2 acknowledges it."""
    p.submit(Put(b"a", b"3", request=request(2, first_unacked=2)))
    (late,) = p.submit(Put(b"a", b"2", request=request(1)))
    p.acknowledge()
    assert isinstance(p.result(late), RequestExpired)


def test_same_sequence_on_another_key_is_another_request(p: Partition) -> None:
    assert p.do(Put(b"a", b"2", request=request(1)), Put(b"b", b"2", request=request(1))) == [3, 4]


REUSES = [
    Put(b"a", b"v", request=request(1)),
    Put(b"a", b"v", flags=Flag.RETURN_OLD, request=request(1)),
    Delete(b"a", request=request(1)),
    Delete(b"a", flags=Flag.RETURN_OLD, request=request(1)),
    Increment(b"a", 1, request=request(1)),
    Append(b"a", b"x", request=request(1)),
    Expire(b"a", 60_000, Flag.RELATIVE_TTL, request=request(1)),
    Batch(b"a", (Get(b"a"), Put(b"a", b"v")), request=request(1)),
    Batch(b"a", (Increment(b"a", 1),), request=request(1)),
    Batch(b"a", (Meta(b"a"), Delete(b"a", Flag.RETURN_OLD)), request=request(1)),
    DeleteRange(b"a", b"b", request=request(1)),
]


@pytest.mark.parametrize("first", REUSES)
@pytest.mark.parametrize("second", REUSES)
def test_reused_request_id_never_gets_an_answer_of_another_kind(p: Partition, first: Any, second: Any) -> None:
    """Code that formats answers by the requested operation would fail on them."""
    given = p.do(first)
    answer = p.do(second)
    assert isinstance(answer, InvalidRequest) or (answer == given and result_message(second, answer) is not None)
    assert isinstance(answer, InvalidRequest) or type(first) is type(second) or type(answer) in (int, tuple)
    assert p.do(first) == given


def test_forgotten_request_is_never_applied_again() -> None:
    p = Partition(PartitionConfig(retry_window_ms=1000, expiry_sweep_s=0)).start()
    op = Put(b"a", b"1", request=request(1))
    p.do(op)
    p.wait(1.5)
    p.do(Put(b"a", b"2"))
    assert len(p.state.retries) == 0
    assert isinstance(p.do(op), RequestExpired)
    assert p.do(Get(b"a")).value == b"2"


@pytest.mark.parametrize("is_copied", [False, True])
def test_forgotten_request_is_refused_after_the_window_is_raised(is_copied: bool) -> None:
    first = Partition(PartitionConfig(retry_window_ms=1000, expiry_sweep_s=0)).start()
    op = Put(b"a", b"1", request=request(1))
    first.do(op)
    first.wait(1.5)
    first.do(Put(b"a", b"2"))
    raised = PartitionConfig(retry_window_ms=60_000, expiry_sweep_s=0)
    restarted = Partition(raised, MemoryEngine() if is_copied else first.engine, loop=first.loop)
    if is_copied:
        chunk = StateExport(first.state).next_chunk(1 << 20)
        assert chunk is not None
        assert StateImport(restarted.state, frozenset()).add(chunk)
    restarted.epoch = first.epoch
    restarted.open()
    restarted.start()
    assert isinstance(restarted.do(op), RequestExpired)
    assert restarted.do(Get(b"a")).value == b"2"


def test_client_without_a_time_is_refused(p: Partition) -> None:
    assert isinstance(p.do(Put(b"a", b"1", request=request(1, seen_ms=0))), RequestExpired)


def test_full_table_refuses_new_clients_retryably() -> None:
    p = Partition(PartitionConfig(retry_bytes_max=1000, expiry_sweep_s=0)).start()
    assert p.do(Put(b"a", b"1", request=request(1))) == 1
    assert p.do(Put(b"a", b"1", request=request(2))) == 2
    assert isinstance(p.do(Put(b"a", b"1", request=request(1, client=Y))), Overloaded)
    assert p.do(Put(b"a", b"1", request=request(3, first_unacked=3))) == 3


def test_batch_is_remembered_with_the_tokens_of_its_keys(p: Partition) -> None:
    p.do(Batch(b"a", (Put(b"a", b"1"), Put(b"b", b"1"), Get(b"c")), request=request(1)))
    entry = p.log.acknowledged[-1]
    from kvstore.partition.state.entry import decode
    from kvstore.ring.hashing import MURMUR3

    requests = decode(entry.payload).requests
    assert requests is not None
    tokens = [requests.touched[0][at : at + 4] for at in range(0, 12, 4)]
    assert tokens == sorted(MURMUR3.token_of(key).to_bytes(4, "big") for key in (b"a", b"b", b"c"))
    assert requests.mutations == [1]


@pytest.mark.parametrize(
    "result",
    [
        0,
        -(1 << 63),
        (1 << 64) - 1,
        True,
        None,
        b"",
        (True, 5, None),
        (False, 5, Record(b"v", 1, 2, 3, 4)),
        [1, (2, 3), None, ConditionFailed(7), Record(b"", 1, 1, 1, 0), NotLeader("p1", "n1", "h:1")],
    ],
)
def test_result_round_trips_through_the_log(result: Any) -> None:
    decoded = decode_result(encode_result(result))
    assert repr(decoded) == repr(result)
    assert type(decoded) is type(result)
