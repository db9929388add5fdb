"""The KV service over a real loopback connection, in front of a model of the store."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client.core.batching import answered
from kvstore.errors import ConditionFailed, InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.partition.state.commands import Code, Flag, Level
from kvstore.partition.state.traits import INTERNAL
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.proto.page_token import PageToken
from kvstore.rpc.channels import channel_options
from kvstore.rpc.status import from_rpc_error, restore
from kvstore.types import PartitionId
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving
from tests.waiting import PATIENCE_S

CLIENT = b"c" * 16
P1 = PartitionId("p1")


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    async with serving(ModelCluster()) as running:
        yield running


@pytest.fixture
async def channel(servers: Servers) -> AsyncIterator[grpc.aio.Channel]:
    address = servers.cluster.endpoints[servers.cluster.ids[0]].grpc
    async with grpc.aio.insecure_channel(address, options=channel_options()) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return kv_pb2_grpc.KVStub(channel)


async def failure_of(call: Any) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)  # type: ignore[arg-type]


async def test_put_value_is_returned_with_its_version(stub: Any) -> None:
    put = await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=PATIENCE_S)
    got = await stub.Get(kv_pb2.GetRequest(key=b"k"), timeout=PATIENCE_S)
    assert (got.record.value, got.record.version, put.applied) == (b"v", put.version, True)
    assert got.progress.sequence == put.version


async def test_absent_key_has_no_record(stub: Any) -> None:
    assert not (await stub.Get(kv_pb2.GetRequest(key=b"k"), timeout=PATIENCE_S)).HasField("record")


async def test_call_without_a_deadline_is_answered(stub: Any) -> None:
    assert (await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"))).version == 1


async def test_unmet_condition_returns_the_version(stub: Any) -> None:
    put = kv_pb2.PutRequest(key=b"k", value=b"v", flags=Flag.IF_ABSENT)
    first = await stub.Put(put, timeout=PATIENCE_S)
    error = await failure_of(stub.Put(put, timeout=PATIENCE_S))
    assert isinstance(error, ConditionFailed)
    assert error.version == first.version


async def test_return_old_returns_the_previous_record(stub: Any) -> None:
    await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"1"), timeout=PATIENCE_S)
    put = await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"2", flags=Flag.RETURN_OLD), timeout=PATIENCE_S)
    deleted = await stub.Delete(kv_pb2.DeleteRequest(key=b"k", flags=Flag.RETURN_OLD), timeout=PATIENCE_S)
    assert (put.old.value, deleted.old.value, deleted.sequence) == (b"1", b"2", 3)


@pytest.mark.parametrize(
    "request_", [kv_pb2.PutRequest(key=b"", value=b"v"), kv_pb2.PutRequest(key=b"k" * 4097, value=b"v")]
)
async def test_key_of_invalid_size_is_refused(stub: Any, request_: kv_pb2.PutRequest) -> None:
    assert isinstance(await failure_of(stub.Put(request_, timeout=PATIENCE_S)), InvalidRequest)


async def test_batch_over_two_partitions_is_refused_with_both_names(stub: Any, servers: Servers) -> None:
    keys = [servers.cluster.key_of(PartitionId("p1")), servers.cluster.key_of(PartitionId("p2"))]
    operations = [kv_pb2.Operation(code=kv_pb2.PUT, key=key, value=b"v") for key in keys]
    error = await failure_of(stub.Batch(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S))
    assert isinstance(error, InvalidRequest)
    assert "p1" in str(error)
    assert "p2" in str(error)


async def test_batch_returns_a_result_for_each_operation(stub: Any) -> None:
    operations = [
        kv_pb2.Operation(code=kv_pb2.PUT, key=b"k", value=b"7"),
        kv_pb2.Operation(code=kv_pb2.INCREMENT, key=b"k", options=kv_pb2.Options(delta=-9)),
        kv_pb2.Operation(code=kv_pb2.GET, key=b"k"),
    ]
    results = (await stub.Batch(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S)).results
    assert [(each.version, each.integer, each.record.value) for each in results] == [
        (1, 0, b""),
        (2, -2, b""),
        (2, 0, b"-2"),
    ]


async def test_transaction_returns_results_and_positions(stub: Any) -> None:
    operations = [
        kv_pb2.Operation(code=kv_pb2.CHECK, key=b"k", options=kv_pb2.Options(flags=Flag.IF_ABSENT)),
        kv_pb2.Operation(code=kv_pb2.PUT, key=b"k", value=b"7"),
        kv_pb2.Operation(code=kv_pb2.GET, key=b"k"),
    ]
    request = kv_pb2.RequestId(client=CLIENT, sequence=1, first_unacknowledged=1)
    call = kv_pb2.BatchRequest(operations=operations, request=request)
    first = await stub.Transact(call, timeout=PATIENCE_S)
    assert [(each.version, each.record.value) for each in first.results] == [(0, b""), (1, b""), (1, b"7")]
    assert [(each.partition, each.sequence) for each in first.positions] == [(first.progress.partition, 1)]
    assert await stub.Transact(call, timeout=PATIENCE_S) == first, "a retry is told the same"


async def test_unmet_condition_of_a_transaction_names_the_key(stub: Any) -> None:
    operations = [
        kv_pb2.Operation(code=kv_pb2.PUT, key=b"k", value=b"7"),
        kv_pb2.Operation(code=kv_pb2.CHECK, key=b"k", options=kv_pb2.Options(flags=Flag.IF_ABSENT)),
    ]
    error = await failure_of(stub.Transact(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S))
    assert isinstance(error, ConditionFailed)
    assert error.key == b"k"
    assert not (await stub.Get(kv_pb2.GetRequest(key=b"k"), timeout=PATIENCE_S)).HasField("record")


# docs/protocol.md Tx1
async def test_transaction_over_partitions_with_a_lock_is_refused(stub: Any, servers: Servers) -> None:
    lock = b"{a}/lock/l/1"
    owner = servers.cluster.ring.partition_of(lock)
    other = servers.cluster.key_of(next(PartitionId(each) for each in ("p1", "p2") if each != owner))
    operations = [kv_pb2.Operation(code=kv_pb2.PUT, key=key, value=b"1") for key in (other, lock)]
    error = await failure_of(stub.Transact(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S))
    assert isinstance(error, InvalidRequest)
    assert "expected no key of a session, lock," in str(error)
    assert repr(lock) in str(error)


async def test_transaction_that_reads_several_partitions_is_answered(stub: Any, servers: Servers) -> None:
    keys = [servers.cluster.key_of(PartitionId(each)) for each in ("p1", "p2", "p3")]
    for key in keys[:2]:
        await stub.Put(kv_pb2.PutRequest(key=key, value=b"of " + key), timeout=PATIENCE_S)
    operations = [kv_pb2.Operation(code=kv_pb2.GET, key=key) for key in keys]
    found = await stub.Transact(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S)
    assert [each.record.value for each in found.results] == [b"of " + keys[0], b"of " + keys[1], b""]
    assert [(each.partition, each.sequence) for each in found.positions] == [("p1", 1), ("p2", 1), ("p3", 0)]


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Get", kv_pb2.GetRequest(key=b"k", level=9)),  # type: ignore[arg-type]
        ("Get", kv_pb2.GetRequest(key=b"k", token={"p1": 1 << 63, "p2": 1 << 63, "p3": 1 << 63})),
        ("Put", kv_pb2.PutRequest(key=b"k", expires_ms=(1 << 64) - 1)),
        ("Put", kv_pb2.PutRequest(key=b"k", flags=1 << 31)),
        ("Put", kv_pb2.PutRequest(key=b"k", request=kv_pb2.RequestId(client=b"short", sequence=1))),
        ("Put", kv_pb2.PutRequest(key=b"k", request=kv_pb2.RequestId(client=CLIENT, sequence=1 << 63))),
        ("Delete", kv_pb2.DeleteRequest(key=b"k", version=1 << 63)),
        ("Batch", kv_pb2.BatchRequest()),
        ("Transact", kv_pb2.BatchRequest()),
        ("Transact", kv_pb2.BatchRequest(operations=[kv_pb2.Operation(code=kv_pb2.SCAN, key=b"k")])),
        (
            "Transact",
            kv_pb2.BatchRequest(operations=[kv_pb2.Operation(code=kv_pb2.PUT, key=b"k", value=bytes(1 << 20))]),
        ),
        (
            "Transact",
            kv_pb2.BatchRequest(operations=[kv_pb2.Operation(code=kv_pb2.GET, key=b"k%d" % n) for n in range(101)]),
        ),
        ("Batch", kv_pb2.BatchRequest(operations=[kv_pb2.Operation(code=kv_pb2.SCAN, key=b"k")])),
        ("Batch", kv_pb2.BatchRequest(operations=[kv_pb2.Operation(code=kv_pb2.PUT, key=b"k", value=bytes(1 << 20))])),
    ],
    ids=str,
)
async def test_value_that_cannot_be_stored_is_refused_at_the_service(stub: Any, method: str, request_: Any) -> None:
    assert isinstance(await failure_of(getattr(stub, method)(request_, timeout=PATIENCE_S)), InvalidRequest)


@pytest.mark.parametrize(
    "request_",
    [
        kv_pb2.ScanRequest(start=b"k" * 4098),
        kv_pb2.ScanRequest(end=b"k" * 4098),
        kv_pb2.ScanRequest(token={"p1": 1 << 63}),
    ],
    ids=["start", "end", "token"],
)
async def test_scan_with_oversized_bounds_is_refused(stub: Any, request_: Any) -> None:
    assert isinstance(await failure_of(stub.Scan(request_, timeout=PATIENCE_S).read()), InvalidRequest)


@pytest.mark.parametrize("method", ["Get", "Put", "Batch", "Execute", "Topology"])
async def test_malformed_message_ends_the_call_and_not_the_server(
    channel: grpc.aio.Channel, stub: Any, method: str
) -> None:
    with pytest.raises(grpc.RpcError):
        await channel.unary_unary(f"/kvstore.v1.KV/{method}")(b"\xff" * 100, timeout=PATIENCE_S)
    assert (await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=PATIENCE_S)).version == 1


async def test_malformed_frame_ends_the_stream_and_not_the_server(channel: grpc.aio.Channel, stub: Any) -> None:
    call = channel.stream_stream("/kvstore.v1.KV/Session")()
    await call.write(b"\xff" * 100)
    assert await call.code() is not grpc.StatusCode.OK
    assert (await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=PATIENCE_S)).version == 1


async def test_oversized_message_is_refused(servers: Servers, stub: Any) -> None:
    address = servers.cluster.endpoints[servers.cluster.ids[0]].grpc
    async with grpc.aio.insecure_channel(address) as unbounded:
        with pytest.raises(grpc.RpcError) as caught:
            await unbounded.unary_unary("/kvstore.v1.KV/Put")(bytes(5 << 20), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert (await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=PATIENCE_S)).version == 1


def lane(*ops: tuple[int, bytes, bytes, int], first: int = 1, **fields: Any) -> kv_pb2.Lane:
    codes, keys, values, sequences = zip(*ops, strict=True)
    return kv_pb2.Lane(
        partition="p1", first=first, codes=codes, keys=keys, values=values, sequences=sequences, client=CLIENT, **fields
    )


class Stream:
    """A session with its answers by number."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Session()
        self.answers: dict[int, Any] = {}

    async def send(self, *lanes: kv_pb2.Lane, timeout_ms: int = 0) -> None:
        await self.call.write(kv_pb2.Frame(lanes=lanes, timeout_ms=timeout_ms))

    async def receive(self, *numbers: int) -> list[Any]:
        while not self.answers.keys() >= set(numbers):
            message = await self.call.read()
            assert message is not grpc.aio.EOF
            self.take(message)
        return [self.answers.pop(number) for number in numbers]

    def take(self, message: kv_pb2.Answers) -> None:
        answers = dict(zip(message.numbers, message.versions, strict=True))
        answers |= dict(zip(message.found, message.values, strict=True))
        answers |= dict.fromkeys(message.absent)
        answers |= {each.number: each for each in message.results}
        for failure in message.failures:
            error = restore(failure.reason, failure.message, failure.metadata)
            answers |= dict.fromkeys(failure.numbers, error)
        assert not answers.keys() & self.answers.keys()
        self.answers |= answers


async def test_calls_are_timed_by_method_and_frames_by_lane(servers: Servers, stub: Any) -> None:
    await stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=PATIENCE_S)
    await failure_of(stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v", flags=Flag.IF_ABSENT), timeout=PATIENCE_S))
    await stub.Get(kv_pb2.GetRequest(key=b"k"), timeout=PATIENCE_S)
    await stub.Execute(
        kv_pb2.Frame(lanes=[lane((Code.GET, b"k", b"", 0), (Code.GET, b"x", b"", 0))]), timeout=PATIENCE_S
    )
    stream = Stream(stub)
    await stream.send(lane((Code.GET, b"k", b"", 0)), lane((Code.GET, b"x", b"", 0), first=2))
    await stream.receive(1, 2)
    counts = {name: each.count for name, each in servers.service(servers.cluster.ids[0]).histograms.items()}
    assert counts == {"Get": 1, "Put": 2, "Delete": 0, "Batch": 0, "Transact": 0, "Execute": 1, "Session": 2}


async def test_session_answers_every_operation_by_its_number(stub: Any) -> None:
    stream = Stream(stub)
    await stream.send(
        lane((Code.PUT, b"a", b"1", 1), (Code.PUT, b"b", b"2", 2), (Code.GET, b"a", b"", 0), (Code.GET, b"x", b"", 0))
    )
    first, second, found, absent = await stream.receive(1, 2, 3, 4)
    assert (first > 0, second > 0, found, absent) == (True, True, b"1", None)
    await stream.send(lane((Code.DELETE, b"a", b"", 3), (Code.META, b"b", b"", 0), first=5))
    deleted, meta = await stream.receive(5, 6)
    assert deleted > 0
    assert (meta.integer, meta.record.version) == (1, meta.version)


async def test_repeated_request_id_is_applied_once(stub: Any, servers: Servers) -> None:
    key = servers.cluster.key_of(P1)
    stream = Stream(stub)
    await stream.send(lane((Code.PUT, key, b"1", 1)), lane((Code.PUT, key, b"1", 1), first=2))
    assert await stream.receive(1, 2) == [1, 1]
    assert servers.cluster.doubly_applied() == []


@pytest.mark.parametrize(
    "bad",
    [
        kv_pb2.Lane(first=1, codes=[Code.PUT, Code.PUT], keys=[b"k"]),
        kv_pb2.Lane(first=1, codes=[Code.PUT, Code.PUT], keys=[b"k", b"l"], sequences=[1, 2], client=b"short"),
        kv_pb2.Lane(first=1, codes=[99, 98], keys=[b"k", b"l"]),
        kv_pb2.Lane(first=1, codes=[Code.GET, Code.GET], keys=[b"k", b"l"], level=9),
        kv_pb2.Lane(first=1, codes=[Code.GET, Code.GET], keys=[b"", b"k" * 4097]),
        kv_pb2.Lane(first=1, codes=[Code.PUT, Code.PUT], keys=[b"k", b"l"], sequences=[1, 1 << 63], client=CLIENT),
        kv_pb2.Lane(first=1, codes=[Code.GET, Code.GET], keys=[b"k", b"l"], token=1 << 63),
        kv_pb2.Lane(
            first=1,
            codes=[Code.PUT, Code.SCAN_TOKENS],
            keys=[b"k", b""],
            options=[kv_pb2.Options(index=0, version=1 << 63), kv_pb2.Options(index=1, token=1 << 32)],
        ),
    ],
    ids=["columns", "client", "codes", "level", "keys", "sequences", "token", "options"],
)
async def test_malformed_lane_is_refused_and_the_stream_stays_open(stub: Any, bad: kv_pb2.Lane) -> None:
    stream = Stream(stub)
    await stream.send(bad, lane((Code.GET, b"k", b"", 0), first=3))
    errors = await stream.receive(1, 2)
    assert [type(error) for error in errors] == [InvalidRequest, InvalidRequest]
    assert await stream.receive(3) == [None]


async def test_lane_with_a_malformed_operation_answers_the_others(stub: Any) -> None:
    stream = Stream(stub)
    await stream.send(lane((Code.PUT, b"k", b"v", 0), (Code.PUT, b"", b"v", 0), (99, b"k", b"", 0)))
    done, empty, unknown = await stream.receive(1, 2, 3)
    assert (done, type(empty), type(unknown)) == (1, InvalidRequest, InvalidRequest)


async def test_operation_without_an_outcome_in_time_is_unknown(stub: Any, servers: Servers) -> None:
    servers.cluster.servers[0].intercept = lambda op, answer: True
    stream = Stream(stub)
    await stream.send(lane((Code.PUT, b"k", b"v", 1)), timeout_ms=50)
    assert isinstance((await stream.receive(1))[0], OutcomeUnknown)


async def test_timeout_without_a_leader_names_the_partition(stub: Any, servers: Servers) -> None:
    servers.cluster.servers[0].intercept = lambda op, answer: True
    owner = servers.cluster.ring.partition_of(b"k")
    servers.cluster.lead(owner, None)
    stream = Stream(stub)
    await stream.send(lane((Code.PUT, b"k", b"v", 1), (Code.GET, b"k", b"", 0)), timeout_ms=50)
    answers = await stream.receive(1, 2)
    assert list(map(type, answers)) == [OutcomeUnknown, Unavailable]
    assert all(f"partition {owner} has no leader" in str(each) for each in answers)


async def test_late_result_is_not_answered_twice(stub: Any, servers: Servers) -> None:
    held: list[Any] = []
    backend = servers.cluster.servers[0]
    backend.intercept = lambda op, answer: not held.append(answer)
    stream = Stream(stub)
    await stream.send(lane((Code.PUT, b"k", b"v", 1)), timeout_ms=50)
    await stream.receive(1)
    held[0](7)
    backend.intercept = lambda op, answer: False
    await stream.send(lane((Code.GET, b"x", b"", 0), first=2))
    assert await stream.receive(2) == [None]
    assert stream.answers == {}


async def test_cancelled_put_is_applied(stub: Any, servers: Servers) -> None:
    held: list[Any] = []
    backend = servers.cluster.servers[0]

    def hold(op: Any, answer: Any) -> bool:
        held.append(lambda: answer(backend._result(op, None)))
        return True

    backend.intercept = hold
    for timeout_s in (0.2, 2.0, 20.0):
        error = await failure_of(stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), timeout=timeout_s))
        assert isinstance(error, OutcomeUnknown)
        if held:  # otherwise the deadline would have passed before it arrived
            break
    held[0]()
    backend.intercept = lambda op, answer: False
    assert (await stub.Get(kv_pb2.GetRequest(key=b"k"), timeout=PATIENCE_S)).record.value == b"v"


async def test_unary_frame_gets_all_its_answers(stub: Any) -> None:
    frame = kv_pb2.Frame(lanes=[lane((Code.PUT, b"k", b"v", 0), (Code.GET, b"x", b"", 0))])
    answers = await stub.Execute(frame, timeout=PATIENCE_S)
    assert (list(answers.numbers), list(answers.absent)) == ([1], [2])


async def test_reads_that_do_not_fit_a_unary_answer_are_refused(stub: Any) -> None:
    big = b"v" * (1 << 20)
    for i in range(4):
        await stub.Put(kv_pb2.PutRequest(key=b"k%d" % i, value=big), timeout=PATIENCE_S)
    frame = kv_pb2.Frame(lanes=[lane(*((int(Code.GET), b"k%d" % i, b"", 0) for i in range(4)))])
    answers = await stub.Execute(frame, timeout=PATIENCE_S)
    assert len(answers.found) == 2
    assert [(each.reason, len(each.numbers)) for each in answers.failures] == [("OVERLOADED", 2)]


@pytest.mark.parametrize("with_ttl", [b"first", b"last", b""])
async def test_reads_of_a_large_unary_answer_keep_their_expiries(stub: Any, with_ttl: bytes) -> None:
    """In an answer merged from several messages, some omit their expiries because all of them are 0."""
    keys, value = (b"first", b"middle", b"last"), b"v" * (600 << 10)
    for key in keys:
        ttl = {"expires_ms": 60_000, "flags": int(Flag.RELATIVE_TTL)} if key == with_ttl else {}
        await stub.Put(kv_pb2.PutRequest(key=key, value=value, **ttl), timeout=PATIENCE_S)
    frame = kv_pb2.Frame(lanes=[lane(*((int(Code.GET), key, b"", 0) for key in keys))])
    answers = await stub.Execute(frame, timeout=PATIENCE_S)
    assert len(answers.found) == len(keys)
    items = {keys[number - 1]: item for number, item in answered(answers)}
    assert [key for key in keys if items[key].expires_ms] == [key for key in keys if key == with_ttl]


async def test_scan_returns_all_partitions_in_order(stub: Any) -> None:
    keys = sorted(b"k%04d" % i for i in range(500))
    for start in range(0, 500, 100):
        ops = [(int(Code.PUT), key, b"v", 0) for key in keys[start : start + 100]]
        await stub.Execute(kv_pb2.Frame(lanes=[lane(*ops)]), timeout=PATIENCE_S)
    scanned = [key async for page in stub.Scan(kv_pb2.ScanRequest(), timeout=PATIENCE_S) for key in page.keys]
    assert scanned == keys
    part = kv_pb2.ScanRequest(start=keys[10], end=keys[400], limit=20, keys_only=True)
    pages = [page async for page in stub.Scan(part, timeout=PATIENCE_S)]
    assert [key for page in pages for key in page.keys] == keys[10:30]
    assert {record.value for page in pages for record in page.records} == {b""}
    down = kv_pb2.ScanRequest(start=keys[10], end=keys[400], limit=20, reverse=True)
    scanned = [key async for page in stub.Scan(down, timeout=PATIENCE_S) for key in page.keys]
    assert scanned == keys[399:379:-1]


# docs/protocol.md P37
async def test_pages_continue_by_a_token_alone(stub: Any) -> None:
    keys = sorted(b"k%04d" % i for i in range(250))
    for start in range(0, 250, 50):
        ops = [(int(Code.PUT), key, b"v", 0) for key in keys[start : start + 50]]
        await stub.Execute(kv_pb2.Frame(lanes=[lane(*ops)]), timeout=PATIENCE_S)
    page = await stub.Page(kv_pb2.PageRequest(prefix=b"k"), timeout=PATIENCE_S)
    assert (list(page.keys), len(page.records), page.records[0].value) == (keys[:100], 100, b"v")
    rest = kv_pb2.PageRequest(page_token=page.page_token, limit=10_000, bare=True)
    page = await stub.Page(rest, timeout=PATIENCE_S)
    assert (list(page.keys), len(page.records), page.page_token) == (keys[100:], 0, "")
    down = await stub.Page(kv_pb2.PageRequest(end=keys[200], reverse=True, limit=150, keys_only=True))
    assert (list(down.keys), down.records[0].value) == (keys[199:49:-1], b"")
    down = await stub.Page(kv_pb2.PageRequest(page_token=down.page_token), timeout=PATIENCE_S)
    assert (list(down.keys), down.page_token) == (keys[49::-1], "")


async def test_page_is_bounded_in_bytes_over_all_partitions(stub: Any) -> None:
    keys = [b"k%02d" % i for i in range(9)]
    for key in keys:
        await stub.Put(kv_pb2.PutRequest(key=key, value=b"v" * (1 << 19)), timeout=PATIENCE_S)
    found, request = list[bytes](), kv_pb2.PageRequest(limit=1000)
    while True:
        page = await stub.Page(request, timeout=PATIENCE_S)
        assert len(page.keys) <= 3
        found += page.keys
        if not page.page_token:
            break
        request = kv_pb2.PageRequest(page_token=page.page_token, limit=1000)
    assert found == keys


@pytest.mark.parametrize(
    "request_",
    [
        kv_pb2.PageRequest(page_token="nonsense"),
        kv_pb2.PageRequest(page_token=PageToken(b"a", b"b").encode(), prefix=b"b"),
        kv_pb2.PageRequest(prefix=b"b", end=b"c"),
        kv_pb2.PageRequest(limit=10_001),
        kv_pb2.PageRequest(start=b"k" * 5000),
    ],
)
async def test_impossible_page_is_refused(stub: Any, request_: kv_pb2.PageRequest) -> None:
    assert isinstance(await failure_of(stub.Page(request_, timeout=PATIENCE_S)), InvalidRequest)


async def test_unsupported_flag_of_a_scan_is_refused(stub: Any) -> None:
    op = kv_pb2.Options(limit=5, flags=kv_pb2.REVERSE)
    frame = kv_pb2.Frame(lanes=[kv_pb2.Lane(partition="p1", first=1, codes=[kv_pb2.SCAN], keys=[b""], options=[op])])
    (failure,) = (await stub.Execute(frame, timeout=PATIENCE_S)).failures
    assert failure.reason == "INVALID_REQUEST"


async def test_topology_names_leaders_and_endpoints(stub: Any, servers: Servers) -> None:
    topology = await stub.Topology(kv_pb2.TopologyRequest(), timeout=PATIENCE_S)
    assert [(each.id, each.leader) for each in topology.partitions] == [("p1", "n1"), ("p2", "n2"), ("p3", "n3")]
    assert {each.id: each.grpc for each in topology.servers} == {
        id: endpoint.grpc for id, endpoint in servers.cluster.endpoints.items()
    }
    assert topology.tokens == sorted(topology.tokens)


async def test_known_topology_is_awaited_until_it_changes(stub: Any, servers: Servers) -> None:
    known = (await stub.Topology(kv_pb2.TopologyRequest(), timeout=PATIENCE_S)).known
    same = await stub.Topology(kv_pb2.TopologyRequest(known=known, wait_ms=20), timeout=PATIENCE_S)
    assert same.known == known
    waiting = stub.Topology(kv_pb2.TopologyRequest(known=known, wait_ms=20_000), timeout=PATIENCE_S)
    servers.cluster.lead(P1, servers.cluster.ids[1])
    assert {each.id: each.leader for each in (await waiting).partitions}["p1"] == "n2"


async def test_watch_without_a_feed_is_unimplemented(stub: Any) -> None:
    error = await failure_of(stub.Watch(kv_pb2.WatchRequest(), timeout=PATIENCE_S).read())
    assert "change feed" in str(error)


async def test_health_and_reflection_name_the_service(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="kvstore.v1.KV"), timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = reflection.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
    )
    listed = (await call.read()).list_services_response.service
    assert "kvstore.v1.KV" in {each.name for each in listed}


def test_wire_numbers_equal_those_of_the_partition() -> None:
    public = {code.name: code.value for code in Code if code not in INTERNAL}
    assert dict(kv_pb2.Code.items()) == {"CODE_UNSPECIFIED": 0, **public}
    assert dict(kv_pb2.Level.items()) == {level.name: level.value for level in Level}
    assert dict(kv_pb2.Flag.items()) == {"NONE": 0, **{str(flag.name): flag.value for flag in Flag}}


# docs/protocol.md Tx1
@pytest.mark.parametrize("code", sorted(INTERNAL))
async def test_operation_of_leaders_is_refused_in_every_call(stub: Any, code: int) -> None:
    """A client that could send them would free or forge the locks of other clients' transactions."""
    put = kv_pb2.Operation(code=kv_pb2.PUT, key=b"a", value=b"v")
    parts = [put, kv_pb2.Operation(code=code, key=b"a")]  # type: ignore[arg-type]
    for call in (stub.Batch, stub.Transact):
        assert isinstance(await failure_of(call(kv_pb2.BatchRequest(operations=parts))), InvalidRequest)
    lane = kv_pb2.Lane(first=1, keys=[b"a"] * 3)
    lane.codes.extend([code, Code.BATCH, Code.TRANSACT])  # type: ignore[list-item]
    for index in (1, 2):
        lane.options.add(index=index, operations=parts)
    frame = kv_pb2.Frame(lanes=[lane])
    session = stub.Session(iter([frame]), timeout=PATIENCE_S)
    for answers in (await stub.Execute(frame, timeout=PATIENCE_S), await session.read()):
        failed = {number: each.reason for each in answers.failures for number in each.numbers}
        assert failed == dict.fromkeys((1, 2, 3), "INVALID_REQUEST")
    assert not (await stub.Get(kv_pb2.GetRequest(key=b"a"), timeout=PATIENCE_S)).HasField("record")
