"""Clients of a model cluster that is addressed by a name, with their own name server: the result of each, and how
often it had asked the name server by then. Runs in a namespace in which the system asks that name server
(tests/env/name_server.py)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from kvstore.client import AsyncClient, Client
from kvstore.errors import Unavailable
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error
from tests.beside import beside
from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread
from tests.env.name_server import NameServer


def main(mode: str) -> None:
    server = NameServer(mode)
    with beside(server.run), serving_in_a_thread(ModelCluster(1, 1)) as servers:
        port = servers.cluster.endpoints[servers.cluster.servers[0].id].grpc.rpartition(":")[2]
        told = {
            kind: tried(each, server, f"server-{number}.test", port) for number, (kind, each) in enumerate(WAYS.items())
        }
    sys.stdout.write(json.dumps({"told": told, "asked": sum(server.asked.values())}))


def tried(way: Callable[[str], Any], server: NameServer, host: str, port: str) -> tuple[str, int]:
    try:
        way(f"{host}:{port}")
    except Unavailable as error:
        return f"Unavailable: {error}", server.asked_of(host)
    return "done", server.asked_of(host)


def blocking(address: str) -> None:
    with Client(f"kv://{address}?timeout=2s") as client:
        client.put(b"k", b"v")
        found = client.get(b"k")
        assert found is not None
        assert found.value == b"v"


def on_asyncio(address: str) -> None:
    async def put() -> None:
        async with AsyncClient(f"kv://{address}?timeout=2s") as client:
            await client.put(b"k", b"v")
            found = await client.get(b"k")
            assert found is not None
            assert found.value == b"v"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(put())


def command(address: str) -> None:
    """Connect as the command line does."""
    import grpc

    from kvstore.proto import kv_pb2, kv_pb2_grpc

    with open_channel(address, None) as channel:
        try:
            kv_pb2_grpc.KVStub(channel).Topology(kv_pb2.TopologyRequest(), timeout=2)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


WAYS = {"blocking": blocking, "asyncio": on_asyncio, "command": command}

if __name__ == "__main__":
    main(sys.argv[2])
