"""Users of a simulated cluster: they send operations to any node, wait, retry what is safe, and write down what they
saw. A client is no node: it is never crashed, and its links to the nodes have latency and can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from kvstore.errors import ConditionFailed, OutcomeUnknown, Refused, Retryable, StoreError, Unavailable
from kvstore.partition.state.commands import NOT_NOW, Code, Op, RequestId, Sink
from kvstore.partition.state.rows import record_of
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId
from tests.sim.judges.operations import WRITES, Operation, Recorder, Status
from tests.sim.judges.probes import declare, probe
from tests.sim.world.loop import Process
from tests.sim.world.network import SimNetwork

declare(
    "client.put_together",
    "client.read_at_once",
    "client.unknown",
    "client.retried_after_unknown",
    "client.answer_of_a_late_attempt",
    "client.abandoned",
)

HELD_POLL_S = 0.05
HELD_MAX_S = 5.0
"""What a cut link holds back for longer is lost."""
_REQUEST_AT = {
    Code.PUT: 6,
    Code.DELETE: 4,
    Code.INCREMENT: 3,
    Code.APPEND: 3,
    Code.EXPIRE: 4,
    Code.BATCH: 4,
    Code.DELETE_RANGE: 3,
}


class Doors(Protocol):
    """A node as its clients see it."""

    name: str

    @property
    def door(self) -> tuple[Process, Any] | None:
        """The running process and its Backend; None if its port refuses connections."""
        ...


class Population(Protocol):
    """What clients need of a cluster."""

    ring: Ring
    network: SimNetwork
    recorder: Recorder

    @property
    def doors(self) -> list[Doors]: ...


class Identity:
    """A client id with its request numbers, shared by workers that run side by side."""

    def __init__(self, random: Random) -> None:
        self.id = random.randbytes(16)
        self.seen_ms = 0
        self._last = 0
        self._open: set[int] = set()

    def next(self) -> RequestId:
        """A number for a new request."""
        self._last += 1
        self._open.add(self._last)
        return RequestId(self.id, self._last, min(self._open), self.seen_ms)

    def done(self, request: RequestId) -> None:
        """It was answered, or given up: no attempt of it is sent any more."""
        self._open.discard(request.sequence)


class Worker:
    """One user: does one thing at a time."""

    def __init__(self, cluster: Population, name: str, random: Random, identity: Identity) -> None:
        self.name, self.random, self.identity = name, random, identity
        self.ring = cluster.ring
        """The latest that a node had which has answered."""
        self.tokens: dict[PartitionId, int] = {}
        """The highest sequence seen of each partition."""
        self.timeout_s = 2.0
        self.attempts_max = 6
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()

    async def do(self, op: Op, *, with_id: bool = True, partition: PartitionId | None = None) -> Operation:
        """Carry `op` out, retrying as far as that is safe, and return its record."""
        request = None
        if with_id and op[0] in WRITES:
            request = self.identity.next()
            place = _REQUEST_AT[op[0]]
            op = (*op[:place], request, *op[place + 1 :])
        where = partition or self.ring.partition_of(op[1])
        operation = self._cluster.recorder.begin(self.name, op, where, self._loop.time(), request)
        status, result = await self._attempts(operation)
        self._cluster.recorder.end(operation, status, result, self._loop.time())
        if request is not None:
            self.identity.done(request)
        return operation

    async def _attempts(self, operation: Operation) -> tuple[Status, Any]:
        was_unknown = False
        result: Any = None
        for attempt in range(self.attempts_max):
            if attempt:
                await asyncio.sleep(self.random.expovariate(1 / 0.05))
            result = await self._attempt(operation)
            if isinstance(result, OutcomeUnknown):
                probe("client.unknown")
                was_unknown = True
                if operation.is_write and operation.request is None:
                    break
            elif isinstance(result, Retryable):
                continue
            elif isinstance(result, Refused) and was_unknown:
                break  # a refused retry says nothing of what was sent before
            elif isinstance(result, StoreError) and not _is_answer(result):
                return (Status.INFO if was_unknown else Status.FAIL), result
            else:
                if was_unknown:
                    probe("client.retried_after_unknown")
                return Status.OK, result
        if was_unknown and operation.is_write:
            probe("client.abandoned")
            return Status.INFO, result
        return Status.FAIL, result

    async def _attempt(self, operation: Operation) -> Any:
        """The result or the StoreError of one submission."""
        node = self.random.choice(self._cluster.doors)
        operation.attempts.append(node.name)
        call = _Call(self._cluster.network, self.name, node, operation, self.ring.routed)
        try:
            async with asyncio.timeout(self.timeout_s * self.random.uniform(0.5, 1.5)):
                result, progress, ring = await call.answer
        except TimeoutError:
            return call.lost("no answer in time")
        except StoreError as error:
            return error
        for partition, (seq, time_ms) in progress.items():
            self.identity.seen_ms = max(self.identity.seen_ms, time_ms)
            self.tokens[partition] = max(self.tokens.get(partition, 0), seq)
        if ring.routed > self.ring.routed:
            self.ring = ring
        return result


def _is_answer(error: StoreError) -> bool:
    """A failed condition tells something about the state, and nothing went wrong."""
    return isinstance(error, ConditionFailed)


class _Call(Sink):
    """One submission on its way to a node and back. A Sink on the node's side."""

    def __init__(self, network: SimNetwork, client: str, node: Doors, operation: Operation, ring_version: int) -> None:
        loop = network.loop
        self._ring_version = ring_version
        self.answer: asyncio.Future[tuple[Any, dict[PartitionId, tuple[int, int]], Ring]] = loop.create_future()
        self._network, self._operation = network, operation
        self._there, self._back = network.link(client, node.name), network.link(node.name, client)
        self._sent_at = loop.time()
        door = node.door
        if door is None:
            self._later(self._there.delay(), self._fail, Unavailable(f"{node.name} refuses connections"))
            return
        self._process, self._backend = door
        self._process.on_death.append(self._died)
        self._later(self._there.delay(), self._arrive)

    def lost(self, why: str) -> StoreError:
        """What to think of the operation when its answer will not come."""
        return OutcomeUnknown(why) if self._operation.is_write else Unavailable(why)

    def complete(self, token: int, result: Any) -> None:
        """On the node: the operation has ended."""
        ring, operation = self._backend.topology.ring, self._operation
        asked = {operation.partition, *([ring.partition_of(operation.key)] if operation.key else [])}
        progress = {each: self._backend.progress(each) for each in sorted(asked)}
        answered_at = self._network.loop.time()
        self._later(self._back.delay(), self._return, (result, progress, ring), answered_at)

    def flush(self) -> None:
        """Each answer is sent at once."""

    def _arrive(self) -> None:
        if not self._network.is_open(self._there):
            if self._network.loop.time() - self._sent_at < HELD_MAX_S:
                self._later(HELD_POLL_S, self._arrive)
        elif self._process.alive:
            op, partition = self._operation.op, self._operation.partition
            by_key = None if op[1] else partition
            context = self._process.context.copy()
            version = self._ring_version
            self._network.loop.call_soon(self._submit, op, version, by_key, context=context)

    def _submit(self, op: Op, ring_version: int, by_key: PartitionId | None) -> None:
        """On the node: half of the plain GETs and PUTs go the short way, as those of the Redis door do."""
        backend, drawn = self._backend, int(self._sent_at * 1e6)
        if drawn & 1 and ring_version <= backend.topology.ring.routed:
            if op[0] == Code.GET and tuple(op[2:]) == (0, 0):
                together = backend.read_all_now([op[1]]) if drawn & 2 else backend.read_now(op[1])
                found = together[0] if isinstance(together, list) else together
                if found is not NOT_NOW:
                    probe("client.read_at_once")
                    return self.complete(0, None if found is None else record_of(found))
            elif op[0] == Code.PUT and op[1]:
                probe("client.put_together")
                return backend.submit_puts([op], self, [0])
        backend.submit(op, self, 0, ring_version, by_key)

    def _return(self, answer: tuple[Any, dict[PartitionId, tuple[int, int]], Ring], answered_at: float) -> None:
        if not self._network.is_open(self._back):
            if self._network.loop.time() - answered_at < HELD_MAX_S:
                self._later(HELD_POLL_S, self._return, answer, answered_at)
            return
        if self._died in self._process.on_death:
            self._process.on_death.remove(self._died)
        if self.answer.done():
            probe("client.answer_of_a_late_attempt")
        elif isinstance(answer[0], StoreError) and not _is_answer(answer[0]):
            self.answer.set_exception(answer[0])
        else:
            self.answer.set_result(answer)

    def _died(self) -> None:
        """The kernel of the node resets the connection; an answer that is under way may still come first."""
        self._later(self._back.delay(), self._fail, self.lost("connection reset"))

    def _fail(self, error: StoreError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def _later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        self._network.at(self._network.loop.time() + delay, callback, *args)
