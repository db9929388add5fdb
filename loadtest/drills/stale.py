"""Readers that ask one server directly, whatever the topology says: a stopped leader must not answer with an old
state."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import grpc

from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import channel_options
from tests.sim.judges.history import History, Kind

READERS = 2
TIMEOUT_S = 20.0


class StaleReaders:
    """Linearizable reads of given keys at one server, with a history. Some reads wait in the server while it is
    stopped."""

    def __init__(self, history: History, address: str, keys: Sequence[bytes]) -> None:
        self.answers = 0
        self._history, self._address, self._keys = history, address, keys
        self._numbers = itertools.count(1)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options())
        self._stub = kv_pb2_grpc.KVStub(self._channel)
        self._tasks = [
            asyncio.create_task(self._read(key, f"direct/{self._address}/{number}"))
            for number, key in itertools.product(range(READERS), self._keys)
        ]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._channel.close()

    async def _read(self, key: bytes, name: str) -> None:
        while not self._stopping:
            pending = self._history.begin(f"{name}#{next(self._numbers)}", Kind.GET, key, node=self._address)
            try:
                found = await self._stub.Get(kv_pb2.GetRequest(key=key), timeout=TIMEOUT_S)
            except grpc.RpcError:
                pending.fail()
            else:
                self.answers += 1
                record = found.record if found.HasField("record") else None
                pending.ok(record.value if record else None, version=record.version if record else None)
            await asyncio.sleep(0.05)
