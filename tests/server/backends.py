"""Backends for tests of interfaces and dispatchers: real state and leaders of partitions over a log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstore import versions
from kvstore.env.ports import Env
from kvstore.env.real import real_env
from kvstore.errors import InvalidRequest, NotLeader, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.leader import Leader
from kvstore.partition.state.commands import NOT_NOW, Code, Get, NotNow, Op, Sink, Transact
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.transactions.limits import check_transaction
from kvstore.ring.builder import new_ring
from kvstore.ring.hashing import MURMUR3, KeyHash
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.read_transaction import only_reads_several, transact_read_only
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq, ServerId
from kvstore.wal.ports import AppendDone
from tests.partition.state.engine_memory import MemoryEngine
from tests.waiting import PATIENCE_S


class MemoryLog:
    """A LeaderLog whose entries are acknowledged on the next turn of the event loop, or when `gate` allows it."""

    waited = True
    lost: StoreError | None = None

    def __init__(self, env: Env, ledger: int = 1) -> None:
        self.epoch = ledger
        self.recovered_end = Position(LedgerId(0), EntryId(-1))
        self.payloads: list[bytes] = []
        self.is_held = False
        self._held: list[Callable[[], None]] = []
        self._env, self._ledger = env, ledger
        self._lost: Callable[[StoreError], None] = lambda _: None

    def append(self, payload: bytes, first_seq: Seq, done: AppendDone) -> None:
        position = Position(LedgerId(self._ledger), EntryId(len(self.payloads)))
        self.payloads.append(payload)
        sent_at = self._env.clock.now()
        if self.is_held:
            self._held.append(lambda: done(position, sent_at, None))
        else:
            asyncio.get_running_loop().call_soon(done, position, sent_at, None)

    def let_go(self) -> None:
        """Acknowledge the held entries, and hold no more."""
        self.is_held = False
        held, self._held = self._held, []
        for acknowledge in held:
            acknowledge()

    def close_for_good(self) -> None:
        self._held.clear()

    def statistics(self) -> dict[str, int]:
        return {}

    async def seal(self) -> None:
        """Do nothing: there is nothing to close."""

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        return 0

    def on_lost(self, lost: Callable[[StoreError], None]) -> None:
        self._lost = lost


class LedPartition:
    """A replica that leads, as a dispatcher hosts it."""

    def __init__(self, env: Env, partition: PartitionId, hash: KeyHash) -> None:
        self.id = partition
        config = PartitionConfig(lease_ms=60_000, expiry_sweep_s=0)
        self.state = ReplicaState(partition, MemoryEngine(), config, hash=hash)
        self.state.log_version = versions.LATEST
        self.log = MemoryLog(env)
        self.leader = Leader(env, config, self.state, self.log, lambda _: None)
        self.is_up = True

    @property
    def serving(self) -> bool:
        return self.is_up and self.leader.serving

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        self.leader.submit(ops, sink, tokens)

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        return self.leader.reads.now(keys, tokens, now, in_turn=in_turn) if self.serving else NOT_NOW

    def redirect_moved(self) -> None:
        self.leader.redirect_moved()

    def stop(self) -> None:
        self.leader.stop(NotLeader(self.id))


class OneServer:
    """A Backend that leads every partition of its ring."""

    def __init__(self, env: Env, partitions: int = 3, hash: KeyHash = MURMUR3) -> None:
        ids = [PartitionId(f"p{number}") for number in range(1, partitions + 1)]
        self.topology = ClusterTopology(new_ring(ids, {ServerId("n1"): ""}, 1, hash))
        self.partitions = {each: LedPartition(env, each, hash) for each in ids}
        self._now = env.clock.now
        self.submitted: list[Op] = []
        """Submitted operations, including reads that were answered at once."""
        self.held_reads: list[tuple[Op, Sink, int]] | None = None
        """If it is a list, reads are added to it and not executed."""
        self.failure: StoreError | None = None
        """The error with which every operation ends, if any."""

    async def start(self) -> None:
        for each in self.partitions.values():
            await each.leader.start()

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        state = self.partitions[partition].state
        return state.seq, state.record_time_ms

    def refuses(self, op: Transact, sink: Sink, token: int) -> bool:
        """Refuse a transaction that a dispatcher refuses."""
        try:
            check_transaction(op, self.topology.ring.partition_of)
        except InvalidRequest as error:
            asyncio.get_running_loop().call_soon(self._fail, sink, token, error)
            return True
        return False

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        self.submitted += ops
        if isinstance(ops[0], Transact):
            if self.refuses(ops[0], sink, tokens[0]):
                return None
            if only_reads_several(ops[0], self.topology.ring.partition_of):
                return transact_read_only(self, ops[0], sink, tokens[0], ring_version)
        together: dict[PartitionId, tuple[list[Op], list[int]]] = {}
        for op, token in zip(ops, tokens, strict=True):
            if self.failure is not None:
                asyncio.get_running_loop().call_soon(self._fail, sink, token, self.failure)
            elif self.held_reads is not None and op.code in (Code.GET, Code.META):
                self.held_reads.append((op, sink, token))
            else:
                some, numbers = together.setdefault(partition or self.topology.ring.partition_of(op.key), ([], []))
                some.append(op)
                numbers.append(token)
        for owner, (some, numbers) in together.items():
            self.partitions[owner].submit(some, sink, numbers)

    def submit_uncharged(self, op: Op, sink: Sink, token: int, ring_version: int = 0) -> None:
        self.partitions[self.topology.ring.partition_of(op.key)].submit((op,), sink, (token,))

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        owners = self.topology.ring.partitions_of(keys)
        if self.failure is not None or self.held_reads is not None or owners.count(owners[0]) < len(keys):
            return NOT_NOW
        found = self.partitions[owners[0]].read_now(keys, self.topology.ring.hash.tokens_of(keys), self._now())
        if found is not NOT_NOW:
            self.submitted += map(Get, keys)
        return found

    def _fail(self, sink: Sink, token: int, error: StoreError) -> None:
        sink.complete(token, error)
        sink.flush()

    def hold(self) -> None:
        """Acknowledge nothing until `let_go`."""
        for each in self.partitions.values():
            each.log.is_held = True

    def let_go(self) -> None:
        for each in self.partitions.values():
            each.log.let_go()

    def do_held_reads(self) -> None:
        held, self.held_reads = self.held_reads or [], None
        for op, sink, token in held:
            self.partitions[self.topology.ring.partition_of(op.key)].submit((op,), sink, (token,))

    def stop(self) -> None:
        for each in self.partitions.values():
            each.stop()


@asynccontextmanager
async def one_server(root: Path, partitions: int = 3, hash: KeyHash = MURMUR3) -> AsyncIterator[tuple[Env, OneServer]]:
    """Run a OneServer on real ports below `root`."""
    env = real_env(root)
    backend = OneServer(env, partitions, hash)
    await backend.start()
    try:
        yield env, backend
    finally:
        backend.stop()
        await env.nursery.close()


class Collector(Sink):
    """A Sink that keeps results, and lets a test wait for them."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.flushes = 0
        self._changed = asyncio.Event()

    def complete(self, token: int, result: Any) -> None:
        assert token not in self.results, f"{token} was completed twice"
        self.results[token] = result

    def flush(self) -> None:
        self.flushes += 1
        self._changed.set()

    async def wait(self, *tokens: int) -> list[Any]:
        """Return the results of these requests once all have arrived."""
        async with asyncio.timeout(PATIENCE_S):
            while not set(tokens) <= set(self.results):
                self._changed.clear()
                await self._changed.wait()
        return [self.results[token] for token in tokens]
