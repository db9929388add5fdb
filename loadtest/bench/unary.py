"""Make plain unary calls, as a client without our library does. As a program, this module is a server that does
nothing, which shows the cost of gRPC itself.

    python -m loadtest.bench.unary HOST:PORT
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import uvloop

from kvstore.loadtest.loads import Generator, LoadSpec
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import channel_options, server_options

KEYS = 1_000
VALUE = bytes(100)


async def calls_per_second(
    address: str, method: str, tag: str, *, in_flight: int, seconds: float, warmup_s: float = 0.5
) -> float:
    """Return the Get or Put calls per second for keys that the node leads."""
    load = LoadSpec(
        seconds=seconds,
        warmup_s=warmup_s,
        in_flight=in_flight,
        mix=((method.lower(), 1),),
        keys=KEYS,
        prefix=b"{%b}:" % tag.encode(),
    )
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = kv_pb2_grpc.KVStub(channel)

        async def put(key: bytes) -> None:
            await stub.Put(kv_pb2.PutRequest(key=key, value=VALUE), timeout=5)

        async def get(key: bytes) -> None:
            await stub.Get(kv_pb2.GetRequest(key=key), timeout=5)

        await put(load.prefix)
        return (await Generator(load, {"put": put, "get": get}).run()).rate


class Empty(kv_pb2_grpc.KVServicer):
    """A handler that answers at once."""

    async def Get(self, request: kv_pb2.GetRequest, context: Any) -> kv_pb2.GetResponse:
        return kv_pb2.GetResponse(record=kv_pb2.Record(value=VALUE, version=1))

    async def Put(self, request: kv_pb2.PutRequest, context: Any) -> kv_pb2.PutResponse:
        return kv_pb2.PutResponse(version=1)


async def serve_nothing(address: str) -> None:
    server = grpc.aio.server(options=server_options())
    kv_pb2_grpc.add_KVServicer_to_server(Empty(), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve_nothing(sys.argv[1]))
