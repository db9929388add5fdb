"""Operations of gRPC messages, as the partition receives them."""

from __future__ import annotations

import pytest

from kvstore.access import Right
from kvstore.limits import CLIENT_BYTES
from kvstore.partition.state.commands import Code, Op, RequestId
from kvstore.partition.state.traits import IN_BATCH, NEEDS
from kvstore.proto import kv_pb2
from kvstore.server.grpc.decode import batch_op, ops_of
from tests.partition.one_partition import MADE, TIME_MS, Partition

CLIENT = b"c" * CLIENT_BYTES
ID = RequestId(CLIENT, 1, 1, TIME_MS)


def parts(*codes: int) -> list[kv_pb2.Operation]:
    return [kv_pb2.Operation(code=code, key=b"a") for code in codes]  # type: ignore[arg-type]


def of_lane(*codes: int, batch: list[kv_pb2.Operation] | None = None) -> list[Op]:
    lane = kv_pb2.Lane(client=CLIENT, first_unacknowledged=1, seen_ms=TIME_MS, keys=[b"a"] * len(codes))
    lane.codes.extend(codes)  # type: ignore[arg-type]
    lane.sequences.extend(range(1, len(codes) + 1))
    if batch is not None:
        lane.options.add(index=0, operations=batch)
    found = ops_of(lane)
    assert all(isinstance(each, tuple) for each in found), found
    return [each for each in found if isinstance(each, tuple)]


# docs/protocol.md P13
@pytest.mark.parametrize("code", sorted(IN_BATCH))
def test_batch_of_reads_has_no_request_id(code: int) -> None:
    """A request id is logged with its results: megabytes of values, and a full retry table refuses new clients."""
    writes = Right.WRITE in NEEDS[code]
    (batch,) = of_lane(Code.BATCH, batch=parts(Code.GET, Code.CHECK, code))
    assert (batch[-1] is not None) is writes
    assert (batch_op(parts(Code.GET, code), 0, ID)[-1] is not None) is writes
    (alone,) = of_lane(code)
    assert any(isinstance(each, RequestId) for each in alone) is writes


@pytest.mark.parametrize("codes", [(Code.GET, Code.META), (Code.CHECK, Code.GET), (Code.CHECK,)])
def test_batch_without_effects_is_not_logged(codes: tuple[int, ...]) -> None:
    partition = Partition().start()
    try:
        before, size = partition.state.seq, partition.state.retries.bytes
        first = partition.do(batch_op(parts(*codes), 0, ID))
        assert partition.do(batch_op(parts(*codes), 0, ID)) == first
        assert (partition.state.seq, partition.state.retries.bytes) == (before, size)
    finally:
        MADE.remove(partition)
        partition.loop.close()
