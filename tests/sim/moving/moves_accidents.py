"""Accidents of a simulated cluster while ranges move: crashes at a step, repeated requests, and requests of a node's
own endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Sink
from kvstore.types import PartitionId
from tests.sim.clients import Identity, Worker
from tests.sim.judges.operations import Operation, Status
from tests.sim.moving.moves import World
from tests.sim.nodes import Node

TRIES = 30


@asynccontextmanager
async def same_again(world: World) -> AsyncIterator[None]:
    """Increment a counter before the block, and send the identical request again after it, as if the answer had been
    lost. The answer must be the same."""
    random = world.cluster.world.fork(f"again/{asyncio.get_running_loop().time()}")
    worker = Worker(world.cluster, f"again{world.ring.version}", random, Identity(random))
    while not worker.identity.seen_ms:
        await worker.do(commands.Get(world.counters[0]))
    key = world.counters[0]
    request = worker.identity.next()
    recorder = world.cluster.recorder
    asked = recorder.begin(worker.name, commands.Increment(key, 1, request), world.ring.partition_of(key), 0.0, request)
    first = await _answered(worker, asked)
    recorder.end(asked, Status.OK, first, asyncio.get_running_loop().time())
    yield
    asked.partition = world.ring.partition_of(key)
    second = await _answered(worker, asked)
    assert tuple(second) == tuple(first), f"a retry of {asked} got {second} after {first}"


async def _answered(worker: Worker, asked: Operation) -> Any:
    """Send the request again until it is answered."""
    for _ in range(TRIES):
        result = await worker._attempt(asked)
        if not isinstance(result, StoreError):
            return result
        await asyncio.sleep(worker.random.expovariate(1 / 0.05))
    raise AssertionError(f"not answered: {asked}, {result}")


class _Answer(Sink):
    """The sink of one operation that the test itself sends."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def complete(self, token: int, result: Any) -> None:
        if isinstance(result, StoreError):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)

    def flush(self) -> None:
        """Do nothing: the waiter is woken directly."""


def asker(node: Node, ring_version: int = 0) -> Callable[[Any, PartitionId | None], Coroutine[Any, Any, Any]]:
    """Return a function that sends operations as the node's own endpoints do, for a client with this version of the
    ring."""

    async def ask(op: Any, partition: PartitionId | None) -> Any:
        assert node.endpoint is not None
        process, backend = node.endpoint
        answer = _Answer()
        loop = asyncio.get_running_loop()
        loop.call_soon(backend.submit, (op,), answer, (0,), ring_version, partition, context=process.context.copy())
        return await answer.done

    return ask


class Accident:
    """Strikes once, when a mover reaches a step for the `nth` time."""

    def __init__(self, step: str, nth: int = 1) -> None:
        self.step, self._left = step, nth
        self.has_struck = False
        self.seen: list[str] = []
        self.strike: Callable[[], None] = lambda: None

    def reached(self, means: Means, step: str, move: int) -> None:
        self.seen.append(step)
        if step == self.step and not self.has_struck:
            self._left -= 1
            if not self._left:
                self.has_struck = True
                asyncio.get_running_loop().call_soon(self.strike, context=Context())


def crash(world: World, partitions: Sequence[str], back_s: float = 0.4) -> None:
    """kill -9 of the nodes that lead these partitions. Each is restarted a little later."""
    nodes = {node.name: node for name in partitions if (node := world.leader_of(PartitionId(name))) is not None}
    for _, node in sorted(nodes.items()):
        node.crash()
        loop = world.cluster.world.loop
        loop.call_later(back_s, node.start, context=Context())
