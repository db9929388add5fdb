"""Operations of gRPC messages, as the partition receives them."""

from __future__ import annotations

import pytest

from kvstore.access import Right
from kvstore.errors import InvalidRequest, StoreError
from kvstore.limits import CLIENT_BYTES
from kvstore.partition.state.commands import Code, Op, RequestId
from kvstore.partition.state.traits import IN_BATCH, INTERNAL, NEEDS
from kvstore.proto import kv_pb2
from kvstore.server.grpc.decode import batch_op, ops_of, transact_op
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
    assert not any(isinstance(each, StoreError) for each in found), found
    return [each for each in found if not isinstance(each, StoreError)]


# docs/protocol.md P13
@pytest.mark.parametrize("code", sorted(IN_BATCH))
def test_batch_of_reads_has_no_request_id(code: int) -> None:
    """A request id is logged with its results: megabytes of values, and a full retry table refuses new clients."""
    writes = Right.WRITE in NEEDS[code]
    (batch,) = of_lane(Code.BATCH, batch=parts(Code.GET, Code.CHECK, code))
    assert (batch.request is not None) is writes
    assert (batch_op(parts(Code.GET, code), 0, ID).request is not None) is writes
    (alone,) = of_lane(code)
    assert (alone.request is not None) is writes


@pytest.mark.parametrize("code", sorted(INTERNAL))
def test_operation_of_leaders_is_refused_from_a_client(code: int) -> None:
    lane = kv_pb2.Lane(keys=[b"a"])
    lane.codes.append(code)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="expected an operation code from 1 to 15"):
        ops_of(lane)
    with pytest.raises(InvalidRequest, match="expected operations that are allowed in a batch"):
        transact_op(parts(Code.PUT, code), 0, None)


# docs/protocol.md Tx2
def test_key_of_a_transaction_is_the_first_that_it_writes() -> None:
    def keyed(*pairs: tuple[int, bytes]) -> list[kv_pb2.Operation]:
        return [kv_pb2.Operation(code=code, key=key) for code, key in pairs]  # type: ignore[arg-type]

    writes = keyed((Code.GET, b"a"), (Code.CHECK, b"b"), (Code.DELETE, b"c"), (Code.PUT, b"d"))
    (of_lane_,) = of_lane(Code.TRANSACT, batch=writes)
    assert (of_lane_.key, of_lane_.request is not None) == (b"c", True)
    assert transact_op(writes, 0, ID).key == b"c"
    reads = transact_op(keyed((Code.META, b"b"), (Code.GET, b"a")), 0, ID)
    assert (reads.key, reads.request) == (b"b", None)


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
