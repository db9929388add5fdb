"""A backend whose partitions carry out transactions together, for tests of the Redis port.

It stands for the transactions of a cluster: nothing else runs during a transaction, which therefore is atomic. A test
can let it refuse transactions with Conflict. tests/cluster has tests of the Redis port on a real cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.errors import Conflict, StoreError
from kvstore.partition.state.commands import Batch, Check, Delete, Flag, Op, Put, Sink, Transact
from kvstore.server.routing.read_transaction import only_reads_several
from kvstore.types import PartitionId
from tests.server.backends import OneServer

_CONDITIONS = int(Flag.IF_ABSENT | Flag.IF_PRESENT | Flag.IF_VERSION)


class Transacting:
    """Takes the place of the `submit` of a OneServer."""

    def __init__(self, backend: OneServer) -> None:
        self._backend, self._submit = backend, backend.submit
        backend.submit = self.submit  # type: ignore[method-assign]
        self.transactions: list[Transact] = []
        """Transactions that were submitted, in order, also refused ones."""
        self.conflicts = 0
        """Number of transactions that are refused next."""
        self.failure: StoreError | None = None
        """The error with which every transaction ends, if any."""
        self.when_refused: Callable[[], None] = lambda: None
        """Called after each refusal."""
        self._running: asyncio.Task[None] | None = None
        self._held: list[tuple[Any, ...]] = []

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        if self._running is not None:
            self._held.append((ops, sink, tokens, ring_version, partition))
        elif isinstance(ops[0], Transact) and self._backend.refuses(ops[0], sink, tokens[0]):
            pass
        elif isinstance(ops[0], Transact) and not only_reads_several(ops[0], self._backend.topology.ring.partition_of):
            ((op,), (token,)) = ops, tokens
            self.transactions.append(op)
            self._running = asyncio.get_running_loop().create_task(self._run(op, sink, token))
        else:
            self._submit(ops, sink, tokens, ring_version, partition)

    async def _run(self, op: Transact, sink: Sink, token: int) -> None:
        try:
            result: Any = await self._result(op)
        except StoreError as error:
            result = error
        self._running = None
        sink.complete(token, result)
        sink.flush()
        if isinstance(result, Conflict):
            self.when_refused()
        held, self._held = self._held, []
        for each in held:
            self.submit(*each)

    async def _result(self, op: Transact) -> tuple[list[Any], list[tuple[str, int]]]:
        if self.failure is not None:
            raise self.failure
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict("another transaction holds a key")
        owner_of = self._backend.topology.ring.partition_of
        owners = sorted({owner_of(each.key) for each in op.ops})
        for owner in owners:
            conditions = [
                _condition(each) for each in op.ops if owner_of(each.key) == owner and _aborts(each, op.flags)
            ]
            if conditions:
                await self._batch(conditions, 0)
        results: list[Any] = [None] * len(op.ops)
        for owner in owners:
            places = [place for place, each in enumerate(op.ops) if owner_of(each.key) == owner]
            found = await self._batch([op.ops[place] for place in places], op.flags)
            for place, result in zip(places, found, strict=True):
                results[place] = result
        return results, [(owner, self._backend.partitions[owner].state.seq) for owner in owners]

    async def _batch(self, ops: list[Op], flags: int) -> list[Any]:
        answer = _Answer()
        self._submit([Batch(ops[0].key, tuple(ops), flags)], answer, [0])
        found = await answer.found
        if isinstance(found, StoreError):
            raise found
        results: list[Any] = found
        return results


def _aborts(op: Op, flags: int) -> bool:
    """Return True if the operation has a condition that undoes the transaction."""
    return isinstance(op, Check) or (not flags and isinstance(op, Put | Delete) and bool(op.flags & _CONDITIONS))


def _condition(op: Op) -> Check:
    assert isinstance(op, Check | Put | Delete)
    return Check(op.key, op.flags & _CONDITIONS, op.version)


class _Answer(Sink):
    def __init__(self) -> None:
        self.found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def complete(self, token: int, result: Any) -> None:
        self.found.set_result(result)

    def flush(self) -> None:
        """Do nothing: the future wakes the transaction."""
