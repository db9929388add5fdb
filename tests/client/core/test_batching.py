"""Operations to frames and answers back, checked against the server's own half."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client.core import operations
from kvstore.client.core.batching import FRAME_BYTES_MAX, FRAME_OPERATIONS_MAX, answered, cut, frame_of
from kvstore.client.core.operation import ClientOperation, Numbering
from kvstore.client.core.values import Item, Level
from kvstore.errors import ConditionFailed, InvalidRequest, Overloaded, StoreError
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Count,
    Delete,
    Expire,
    Flag,
    Get,
    Increment,
    Meta,
    Put,
    Record,
    RequestId,
    Scan,
)
from kvstore.proto import kv_pb2
from kvstore.server.grpc.decode import ops_of
from kvstore.server.grpc.encode import Outbox

ONE, TWO = Numbering(b"1" * 16), Numbering(b"2" * 16)


def begun(operation: ClientOperation, numbering: Numbering = ONE, partition: str = "p1") -> ClientOperation:
    operation.partition = partition
    numbering.begin(operation)
    return operation


def framed(*wanted: ClientOperation, first: int = 1, **tokens: int) -> tuple[kv_pb2.Frame, dict[int, ClientOperation]]:
    return frame_of(wanted, first, ring_version=7, timeout_ms=500, tokens=tokens)


def test_operations_of_a_partition_share_a_lane_in_order() -> None:
    wanted = [begun(operations.put(b"a", b"1")), begun(operations.get(b"b")), begun(operations.delete(b"c"))]
    frame, numbered = framed(*wanted, first=5, p1=42)
    (lane,) = frame.lanes
    assert (frame.ring_version, frame.timeout_ms, lane.partition, lane.token) == (7, 500, "p1", 42)
    assert (list(lane.codes), list(lane.keys)) == ([kv_pb2.PUT, kv_pb2.GET, kv_pb2.DELETE], [b"a", b"b", b"c"])
    assert numbered == dict(zip((5, 6, 7), wanted, strict=True))


def test_partitions_identities_and_levels_have_their_own_lanes() -> None:
    wanted = [
        begun(operations.get(b"a")),
        begun(operations.get(b"b"), TWO, "p2"),
        begun(operations.get(b"c")),
        begun(operations.get(b"d", Level.STALE)),
        begun(operations.get(b"e"), TWO, "p1"),
    ]
    frame, numbered = framed(*wanted)
    assert [list(lane.keys) for lane in frame.lanes] == [[b"a", b"c"], [b"b"], [b"d"], [b"e"]]
    assert [
        numbered[number].key for lane in frame.lanes for number in range(lane.first, lane.first + len(lane.keys))
    ] == [key for lane in frame.lanes for key in lane.keys]


def test_empty_columns_are_left_out() -> None:
    frame, _ = framed(begun(operations.get(b"a")), begun(operations.get(b"b")))
    (lane,) = frame.lanes
    assert (len(lane.values), len(lane.sequences), lane.client, len(lane.options)) == (0, 0, b"", 0)


def test_server_decodes_every_operation_as_it_was_encoded() -> None:
    numbering = Numbering(b"x" * 16)
    numbering.see(5_000)
    wanted = [
        begun(operations.get(b"k", Level.SESSION), numbering),
        begun(operations.meta(b"k", Level.SESSION), numbering),
        begun(operations.put(b"k", b"v"), numbering),
        begun(operations.put(b"k", b"v", ttl_s=2, if_version=9, return_old=True), numbering),
        begun(operations.delete(b"k", if_version=3), numbering),
        begun(operations.increment(b"k", -5), numbering),
        begun(operations.append(b"k", b"s"), numbering),
        begun(operations.expire(b"k", None), numbering),
        begun(operations.batch([operations.put(b"k", b"v"), operations.increment(b"k", 2)]), numbering),
        begun(operations.scan("p1", b"a", b"z", 10, Level.SESSION, flags=kv_pb2.KEYS_ONLY), numbering),
        begun(operations.count("p1", Level.SESSION), numbering),
    ]
    frame, _ = framed(*wanted, p1=77)
    ops = [op for lane in frame.lanes for op in ops_of(lane)]

    def request(sequence: int) -> RequestId:
        return RequestId(b"x" * 16, sequence, 1, 5_000)

    flags = Flag.RELATIVE_TTL | Flag.IF_VERSION | Flag.RETURN_OLD
    in_batch = (Put(b"k", b"v", 0, 0, 0, None), Increment(b"k", 2, None))
    assert sorted(ops, key=str) == sorted(
        [
            Get(b"k", Level.SESSION, 77),
            Meta(b"k", Level.SESSION, 77),
            Put(b"k", b"v", 0, 0, 0, request(1)),
            Put(b"k", b"v", 2_000, flags, 9, request(2)),
            Delete(b"k", Flag.IF_VERSION, 3, request(3)),
            Increment(b"k", -5, request(4)),
            Append(b"k", b"s", request(5)),
            Expire(b"k", 0, 0, request(6)),
            Batch(b"k", in_batch, 0, request(7)),
            Scan(b"a", b"z", 10, Flag.KEYS_ONLY, Level.SESSION, 77),
            Count(level=Level.SESSION),
        ],
        key=str,
    )


def test_frame_is_bounded_in_operations_and_bytes() -> None:
    many = deque(begun(operations.get(b"k"), Numbering(b"m" * 16)) for _ in range(FRAME_OPERATIONS_MAX + 1))
    assert (len(cut(many)), len(many)) == (FRAME_OPERATIONS_MAX, 1)
    large = deque(operations.put(b"k", bytes(FRAME_BYTES_MAX // 2)) for _ in range(5))
    assert [len(cut(large)) for _ in range(3)] == [2, 2, 1]
    swaps = deque(operations.put(b"k", b"v", return_old=True) for _ in range(5))
    assert len(cut(swaps)) == 2


def add(outbox: Outbox, number: int, op: Any, result: Any) -> None:
    outbox.add_all(number, [op], [(0, result)], 1 << 30, Overloaded("full"))


def messages(outbox: Outbox) -> Iterator[kv_pb2.Answers]:
    while not outbox.is_empty():
        yield outbox.take().message()


def roundtrip(*results: tuple[ClientOperation, Any, Any]) -> dict[bytes, Any]:
    """From (operation, the server's operation, its result), return the client's results by key."""
    outbox, open_ = Outbox(), {}
    for number, (operation, op, result) in enumerate(results, start=1):
        add(outbox, number, op, result)
        open_[number] = operation
    found: dict[bytes, Any] = {}
    for answers in messages(outbox):
        sent = kv_pb2.Answers.FromString(answers.SerializeToString())
        for number, answer in answered(sent):
            operation = open_.pop(number)
            is_error = isinstance(answer, StoreError)
            found[operation.key] = answer if is_error else operations.decode(operation, answer)
    assert open_ == {}
    return found


def test_answers_reach_their_operations_unchanged() -> None:
    record = Record(b"v", 3, 1, 1_000, 0)
    brief = Record(b"w", 4, 2, 1_001, 9_000)
    error = ConditionFailed(8)
    found = roundtrip(
        (operations.get(b"found"), Get(b"k"), record),
        (operations.get(b"brief"), Get(b"k"), brief),
        (operations.get(b"absent"), Get(b"k"), None),
        (operations.put(b"put", b""), Put(b"", b""), 12),
        (operations.delete(b"deleted"), Delete(b""), 0),
        (operations.increment(b"number"), Increment(b"k", 1), (-7, 13)),
        (operations.expire(b"expired", 1), Expire(b"k", 1), False),
        (operations.meta(b"meta"), Meta(b"k"), (5, 3, 1, 1_000, 0)),
        (
            operations.put(b"old", b"", return_old=True),
            Put(b"", b"", 0, Flag.RETURN_OLD, 0, None),
            (True, 14, None),
        ),
        (operations.delete(b"popped", return_old=True), Delete(b"", Flag.RETURN_OLD, 0, None), (15, record)),
        (operations.put(b"failed", b""), Put(b"", b""), error),
        (operations.get(b"full"), Get(b"k"), Overloaded("full")),
    )
    failed, full = found.pop(b"failed"), found.pop(b"full")
    assert (type(failed), failed.version, type(full), str(full)) == (ConditionFailed, 8, Overloaded, "full")
    assert found == {
        b"found": Item(b"v", 3, 1, 1_000, 0),
        b"brief": Item(b"w", 4, 2, 1_001, 9_000),
        b"absent": None,
        b"put": 12,
        b"deleted": 0,
        b"number": -7,
        b"expired": False,
        b"meta": (5, 3, 1, 1_000, 0),
        b"old": (True, 14, None),
        b"popped": Item(b"v", 3, 1, 1_000, 0),
    }


def test_error_of_many_operations_is_sent_once() -> None:
    outbox = Outbox()
    error = Overloaded("full")
    for number in range(100):
        add(outbox, number, Get(b"k"), error)
    (answers,) = messages(outbox)
    assert [len(each.numbers) for each in answers.failures] == [100]
    assert outbox.is_empty()


def test_large_answers_are_spread_over_messages() -> None:
    outbox = Outbox()
    for number in range(5):
        add(outbox, number, Get(b"k"), Record(bytes(700_000), 1, 1, 1, 0))
    assert outbox.bytes == 3_500_000
    assert [len(answers.found) for answers in messages(outbox)] == [2, 2, 1]
    assert (outbox.bytes, outbox.count) == (0, 0)


def test_answers_come_with_their_numbers() -> None:
    answers = kv_pb2.Answers(numbers=[9], versions=[1], absent=[8])
    assert list(answered(answers)) == [(9, 1), (8, None)]


def test_reads_with_ambiguous_expiries_are_not_answered() -> None:
    """Servers before 0.2.0 joined messages that way. Unanswered operations are repeated alone."""
    found = {"found": [1, 2], "values": [b"a", b"b"], "found_versions": [1, 2], "created": [1, 2], "written_ms": [1, 2]}
    assert [number for number, _ in answered(kv_pb2.Answers(absent=[3], expiries_ms=[60_000], **found))] == [3]
    assert [number for number, _ in answered(kv_pb2.Answers(absent=[3], **found))] == [1, 2, 3]


def test_oversized_batch_is_not_sent() -> None:
    with pytest.raises(InvalidRequest, match="expected at most 10000 operations in a batch, got 10001"):
        operations.batch([operations.get(b"k", 0)] * 10_001)
    with pytest.raises(InvalidRequest, match=r"at least one operation in a batch, got none$"):
        operations.batch([])
