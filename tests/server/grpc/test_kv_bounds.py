"""The KV service with large answers and with clients that disconnect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from kvstore.env.real import real_env
from kvstore.errors import OutcomeUnknown, Overloaded
from kvstore.partition.state.commands import Op, Sink
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import channel_options
from kvstore.rpc.status import from_rpc_error
from kvstore.server.grpc import kv
from kvstore.server.grpc.batch_budget import BatchBudget
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving
from tests.server.grpc.test_kv import failure_of
from tests.waiting import PATIENCE_S


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    async with serving(ModelCluster()) as running:
        yield running


@pytest.fixture
async def stub(servers: Servers) -> AsyncIterator[Any]:
    address = servers.cluster.endpoints[servers.cluster.ids[0]].grpc
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        yield kv_pb2_grpc.KVStub(channel)


async def test_batch_with_an_oversized_answer_is_not_reported_as_refused(stub: Any) -> None:
    value = b"x" * (1 << 20)
    operations = [kv_pb2.Operation(code=kv_pb2.GET, key=b"k")] * 5 + [kv_pb2.Operation(code=kv_pb2.PUT, key=b"k")]
    batch = kv_pb2.BatchRequest(operations=operations)
    parts = [kv_pb2.Options(index=i, operations=operations[i * 2 :][:2]) for i in range(3)]
    frame = kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"k"] * 3, codes=[kv_pb2.BATCH] * 3, options=parts)])
    for method, request in ((stub.Execute, frame), (stub.Batch, batch)):
        await stub.Put(kv_pb2.PutRequest(key=b"k", value=value), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as caught:
            await method(request, timeout=PATIENCE_S)
        assert caught.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert isinstance(from_rpc_error(caught.value), OutcomeUnknown)  # type: ignore[arg-type]
        assert not (await stub.Get(kv_pb2.GetRequest(key=b"k"), timeout=PATIENCE_S)).record.value, "done"


async def test_unary_batches_share_the_budget_with_frames(
    stub: Any, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchBudget, "sink", full)
    operations = [kv_pb2.Operation(code=kv_pb2.GET, key=b"k")]
    error = await failure_of(stub.Batch(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S))
    assert isinstance(error, Overloaded)
    lane = kv_pb2.Lane(first=1, keys=[b"k"], codes=[kv_pb2.BATCH], options=[kv_pb2.Options(operations=operations)])
    answers = await stub.Execute(kv_pb2.Frame(lanes=[lane]), timeout=PATIENCE_S)
    assert [each.reason for each in answers.failures] == ["OVERLOADED"]


async def test_writes_that_return_the_old_record_share_the_budget(
    stub: Any, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchBudget, "sink", full)
    for call in (
        stub.Put(kv_pb2.PutRequest(key=b"k", flags=kv_pb2.RETURN_OLD), timeout=PATIENCE_S),
        stub.Delete(kv_pb2.DeleteRequest(key=b"k", flags=kv_pb2.RETURN_OLD), timeout=PATIENCE_S),
    ):
        assert isinstance(await failure_of(call), Overloaded)
    assert (await stub.Put(kv_pb2.PutRequest(key=b"k"), timeout=PATIENCE_S)).version


def full(room: BatchBudget, op: Op, sink: Sink) -> Sink:
    raise Overloaded("no room")


async def test_client_that_disconnects_during_a_stream_is_not_an_error(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hundreds of such clients would fill the log with tracebacks."""

    async def write_nothing(*args: Any) -> AsyncIterator[kv_pb2.ScanResponse]:
        yield kv_pb2.ScanResponse()

    owners = list[str]()

    async def watch(feeds: Any, request: Any, context: Any, owner: str) -> None:
        owners.append(owner)
        await context.write(kv_pb2.WatchResponse())

    class Gone:
        def peer(self) -> str:
            return "ipv4:10.0.0.9:51112"

        async def write(self, message: Any) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    monkeypatch.setattr(kv, "scan_pages", write_nothing)
    monkeypatch.setattr(kv, "send_watch", watch)
    service = kv.KV(real_env(tmp_path), servers.cluster.servers[0], "n1", cast("Any", object()))
    await service.Scan(kv_pb2.ScanRequest(), cast("Any", Gone()))
    await service.Watch(kv_pb2.WatchRequest(), cast("Any", Gone()))
    service._caller = lambda: "tenant"
    await service.Watch(kv_pb2.WatchRequest(), cast("Any", Gone()))
    assert owners == ["ipv4:10.0.0.9", "tenant"]
