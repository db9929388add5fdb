"""Users of a simulated cluster: they send operations to any node, wait, retry operations that are safe to retry, and
record their answers. A client is not a node: it never crashes, and its links to the nodes have latency and can be
cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from msgspec.structs import replace

from kvstore.errors import OutcomeUnknown, Refused, Retryable, StoreError
from kvstore.partition.state.commands import Check, Op, RequestId
from kvstore.partition.state.traits import WRITES
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId
from tests.sim.asking.calls import Call, EndpointNode, Frame, is_answer
from tests.sim.judges.operations import Operation, Recorder, Status, changes_nothing
from tests.sim.judges.probes import declare, probe
from tests.sim.world.network import SimNetwork

declare("client.unknown", "client.retried_after_unknown", "client.abandoned")


class Population(Protocol):
    """The parts of a cluster that clients need."""

    ring: Ring
    network: SimNetwork
    recorder: Recorder

    @property
    def endpoints(self) -> list[EndpointNode]: ...


class Identity:
    """A client id with its request numbers, shared by concurrent workers."""

    def __init__(self, random: Random) -> None:
        self.id = random.randbytes(16)
        self.seen_ms = 0
        self._last = 0
        self._open: set[int] = set()

    def next(self) -> RequestId:
        """Return the number of a new request."""
        self._last += 1
        self._open.add(self._last)
        return RequestId(self.id, self._last, min(self._open), self.seen_ms)

    def done(self, request: RequestId) -> None:
        """Mark a request as answered or abandoned: no attempt of it is sent again."""
        self._open.discard(request.sequence)


class Worker:
    """One user. It performs one operation at a time."""

    def __init__(self, cluster: Population, name: str, random: Random, identity: Identity) -> None:
        self.name, self.random, self.identity = name, random, identity
        self.ring = cluster.ring
        """The latest ring of any node that has answered."""
        self.tokens: dict[PartitionId, int] = {}
        """The highest sequence seen of each partition."""
        self.timeout_s = 2.0
        self.attempts_max = 6
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()

    async def do(self, op: Op, *, with_id: bool = True, partition: PartitionId | None = None) -> Operation:
        """Perform `op`, retry as long as this is safe, and return its record."""
        return (await self.do_all([op], with_id=with_id, partition=partition))[0]

    async def do_all(
        self, ops: Sequence[Op], *, with_id: bool = True, partition: PartitionId | None = None
    ) -> list[Operation]:
        """Perform several operations, which are sent together and retried together."""
        begun = [self._begin(op, with_id, partition) for op in ops]
        left = [_Attempts(each) for each in begun]
        for attempt in range(self.attempts_max):
            if attempt:
                await asyncio.sleep(self.random.expovariate(1 / 0.05))
            calls = self._send([each.operation for each in left])
            await asyncio.gather(*(self._take(*each) for each in zip(left, calls, strict=True)))
            left = [each for each in left if each.operation.status is Status.OPEN]
            if not left:
                break
        for each in left:
            self._end(each.operation, *each.abandoned())
        return begun

    async def _take(self, attempts: _Attempts, call: Call) -> None:
        result = await self._answer(call)
        if isinstance(result, StoreError):
            attempts.operation.errors.append((result, self._loop.time()))
        status = attempts.status_after(result)
        if status is not Status.OPEN:
            self._end(attempts.operation, status, result)

    def _end(self, operation: Operation, status: Status, result: Any) -> None:
        self._cluster.recorder.end(operation, status, result, self._loop.time())
        for partition, seq in operation.positions.items():
            self.tokens[partition] = max(self.tokens.get(partition, 0), seq)
        if operation.request is not None:
            self.identity.done(operation.request)

    def _begin(self, op: Op, with_id: bool, partition: PartitionId | None) -> Operation:
        request = None
        # Front ends drop the request id of a batch that changes nothing (docs/protocol.md P13).
        if with_id and op.code in WRITES and not isinstance(op, Check) and not changes_nothing(op):
            request = self.identity.next()
            op = replace(op, request=request)
        where = partition or self.ring.partition_of(op.key)
        return self._cluster.recorder.begin(self.name, op, where, self._loop.time(), request, is_keyed=not partition)

    async def _attempt(self, operation: Operation) -> Any:
        """Return the result or the StoreError of one submission."""
        return await self._answer(self._send([operation])[0])

    def _send(self, operations: list[Operation]) -> list[Call]:
        node = self.random.choice(self._cluster.endpoints)
        for operation in operations:
            operation.attempts.append(node.name)
        return Frame(self._cluster.network, self.name, node, operations, self.ring.routed).calls

    async def _answer(self, call: Call) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s * self.random.uniform(0.5, 1.5)):
                answer = await call.answer
        except TimeoutError:
            return call.lost("no answer in time")
        except StoreError as error:
            return error
        for partition, (seq, time_ms) in answer.progress.items():
            self.identity.seen_ms = max(self.identity.seen_ms, time_ms)
            self.tokens[partition] = max(self.tokens.get(partition, 0), seq)
        if answer.ring.routed > self.ring.routed:
            self.ring = answer.ring
        call.operation.floor = answer.floor
        return answer.result


class _Attempts:
    """The submissions of one operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._was_unknown = False
        self._result: Any = None

    def status_after(self, result: Any) -> Status:
        """Return the status of the operation after this answer; OPEN if a retry is safe."""
        operation, self._result = self.operation, result
        if isinstance(result, OutcomeUnknown):
            probe("client.unknown")
            self._was_unknown = True
            return self.abandoned()[0] if operation.is_write and operation.request is None else Status.OPEN
        if isinstance(result, Retryable):
            return Status.OPEN
        if isinstance(result, Refused) and self._was_unknown:
            return self.abandoned()[0]  # a refused retry does not tell the outcome of earlier attempts
        if isinstance(result, StoreError) and not is_answer(result):
            return Status.INFO if self._was_unknown else Status.FAIL
        if self._was_unknown:
            probe("client.retried_after_unknown")
        return Status.OK

    def abandoned(self) -> tuple[Status, Any]:
        """Return the status and result of an operation that is not sent again."""
        if self._was_unknown and self.operation.is_write:
            probe("client.abandoned")
            return Status.INFO, self._result
        return Status.FAIL, self._result
