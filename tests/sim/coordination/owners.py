"""Processes that coordinate on a simulated cluster: the real sessions and locks of kvstore.client.coordination, on
clients that the simulation can pause at any moment, as SIGSTOP does, or end, as kill -9 does."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Self

from kvstore.client.coordination import AsyncSession
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import CHECK, DELETE, GET, PUT, ClientOperation
from kvstore.client.core.scanning import scan_bounds
from kvstore.client.core.values import Item, Page
from kvstore.client.core.watching import Change
from kvstore.env.clock import Unjudged
from kvstore.env.library_env import LibraryEnv
from kvstore.env.nursery import TaskNursery
from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Op
from kvstore.proto import kv_pb2
from tests.sim.clients import Identity, Worker
from tests.sim.cluster import Cluster
from tests.sim.judges.operations import Status

LOOK_S = 0.1
PAGE = 1000


class LoopClock(Unjudged):
    """The simulation's true time. It continues while a process is paused."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return 0


class Owner:
    """One process: the parts of a client that AsyncSession needs. Its calls neither leave nor return while the
    process is paused."""

    def __init__(self, cluster: Cluster, name: str, random: Random) -> None:
        self.random, self._cluster = random, cluster
        self.worker = Worker(cluster, name, random, Identity(random))
        self._runs = asyncio.Event()
        self._runs.set()
        self._stops_with_answer = False
        self.nursery = TaskNursery(name)

    def session(self, tag: bytes, *, ttl_s: float, grace_s: float) -> AsyncSession:
        env = LibraryEnv(LoopClock(), self.random, self.nursery)
        return AsyncSession(self, tag, ttl_s=ttl_s, grace_s=grace_s, env=env)  # type: ignore[arg-type]

    def stop(self, *, with_an_answer: bool = False) -> None:
        """Pause now, or when the next answer arrives, before the process has seen it."""
        if with_an_answer:
            self._stops_with_answer = True
        else:
            self._runs.clear()

    def resume(self) -> None:
        self._stops_with_answer = False
        self._runs.set()

    async def runs(self) -> None:
        """Return when the process is not paused."""
        await self._runs.wait()

    async def batch(self, batch: Batch, *, timeout_s: float) -> list[Any]:
        ops = tuple(map(op_of, batch.operations))
        results: list[Any] = await self._do(commands.Batch(ops[0].key, ops), timeout_s)
        codes = [operation.code for operation in batch.operations]
        return [result_of(code, each) for code, each in zip(codes, results, strict=True)]

    async def meta(self, key: bytes, *, timeout_s: float = 10.0) -> Any:
        return await self._do(commands.Meta(key), timeout_s)

    async def page(
        self, token: str | None, *, prefix: bytes, limit: int, keys_only: bool, timeout_s: float | None
    ) -> Page:
        first, end = scan_bounds(b"", b"", prefix)
        partition = self.worker.ring.partition_of(first)
        start: bytes | None = first
        found: list[tuple[bytes, Item]] = []
        while start is not None and len(found) < limit:
            page = commands.Scan(start, end, min(limit - len(found), PAGE))
            items, start = await self._do(page, timeout_s or 10.0, partition)
            found += [(key, Item(*record)) for key, record in items]
        return Page(found, None)

    def watch(self, key: bytes | None, *, prefix: bytes, keys_only: bool) -> Looks:
        return Looks(self)

    async def _do(self, op: Op, timeout_s: float, partition: Any = None) -> Any:
        await self.runs()
        try:
            async with asyncio.timeout(timeout_s):
                while not self.worker.identity.seen_ms:
                    await self.worker.do(commands.Get(b"time"))
                done = await self.worker.do(op, partition=partition)
        except TimeoutError:
            await self.runs()
            raise OutcomeUnknown("no answer in time") from None
        if self._stops_with_answer:
            self._runs.clear()
        await self.runs()
        if isinstance(done.result, StoreError):
            raise OutcomeUnknown(str(done.result)) if done.status is Status.INFO else done.result
        if done.status is not Status.OK:
            raise Unavailable(str(done.result))
        return done.result


class Looks:
    """A watch that reports a possible change every tenth of a second. Watches have their own tests."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ended: object) -> None:
        """Do nothing: nothing is open."""

    async def __anext__(self) -> Change:
        await asyncio.sleep(LOOK_S)
        await self._owner.runs()
        return Change(b"", Item(b"", 1, 1, 0, 0), 1, 0, "", False)


def result_of(code: int, found: Any) -> Any:
    """Return the client's result of an answer to its own batch."""
    if code == GET and found:
        return Item(*found)
    return found[0] if code == kv_pb2.INCREMENT else found


def op_of(operation: ClientOperation) -> Op:
    """Return the operation that a front end makes of it."""
    options = operation.options or kv_pb2.Options()
    flags, version, expires_ms = options.flags, options.version, options.expires_ms
    match operation.code:
        case kv_pb2.EXPIRE:
            return commands.Expire(operation.key, expires_ms, flags)
        case code if code == PUT:
            return commands.Put(operation.key, operation.value, expires_ms, flags, version)
        case code if code == DELETE:
            return commands.Delete(operation.key, flags, version)
        case code if code == GET:
            return commands.Get(operation.key)
        case kv_pb2.INCREMENT:
            return commands.Increment(operation.key, options.delta)
        case code if code == CHECK:
            return commands.Check(operation.key, flags, version)
    raise AssertionError(f"unknown operation {operation.code}")
