"""Samples operations of each partition that this server leads. At intervals, a tap is placed in front of the replica
and a short burst of operations passes through it.

Between bursts, sampling costs nothing per operation. Counters provide the total number of operations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvstore.env import Env
from kvstore.errors import StoreError
from kvstore.partition.state.commands import NOT_NOW, Code, NotNow, Op, Sink
from kvstore.partition.state.traits import POINT_READS
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.load.load import LoadTracker, PartitionLoad, decode, encode
from kvstore.server.peer_calls import PeerCalls
from kvstore.server.routing.pending import written_bytes
from kvstore.server.routing.ports import LocalReplica
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

LOADS = PartitionId("@loads")
"""The id under which servers ask each other for loads. No partition has this name."""
CALL_S = 1.0
TICK_S = 0.1
"""Interval between bursts."""
BURST = 32
"""Sampled operations of one partition per burst: at most 320 samples per second."""
COUNT_S, IDLE_S = 1.0, 2.0
"""Interval at which operations are counted, and at which idle partitions are checked."""
_KEYED_MAX = int(Code.BATCH)
"""Highest code of the operations on a single key."""


class Tap:
    """Stands in front of a replica and samples operations until a burst has passed."""

    __slots__ = ("_load_sampler", "_replica", "partition", "seen", "state")

    def __init__(self, load_sampler: LoadSampler, partition: PartitionId, replica: LocalReplica) -> None:
        self._load_sampler, self.partition, self._replica = load_sampler, partition, replica
        self.seen: list[tuple[bytes, int]] = []
        self.state = getattr(replica, "state", None)

    @property
    def serving(self) -> bool:
        return self._replica.serving

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        for op in ops[: BURST - len(self.seen)]:
            if op.code <= _KEYED_MAX:
                self.see(op.key, 0 if op.code in POINT_READS else len(op.key) + written_bytes(op))
        self._replica.submit(ops, sink, tokens)

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        rows = self._replica.read_now(keys, tokens, now, in_turn=in_turn)
        if rows is not NOT_NOW:
            for key in keys[: BURST - len(self.seen)]:
                self.see(key, 0)
        return rows

    def see(self, key: bytes, written: int) -> None:
        if len(self.seen) < BURST:
            self.seen.append((key, written))
            if len(self.seen) == BURST:
                self._load_sampler.remove(self)

    def redirect_moved(self) -> None:
        self._replica.redirect_moved()


class CountingReplica(LocalReplica, Protocol):
    """A replica that counts its operations."""

    def counts(self) -> tuple[int, int] | None:
        """Return the number of operations answered during this leadership and the number of mutations logged; None
        if the replica does not lead."""
        ...


class Hosted(Protocol):
    """The local replicas. Implemented by kvstore.server.hosting.Hosting."""

    def leading(self) -> Mapping[PartitionId, CountingReplica]: ...


class Swaps(Protocol):
    """Where operations are routed to replicas. Implemented by kvstore.server.routing.dispatch.Dispatcher."""

    @property
    def topology(self) -> ClusterTopology: ...

    def swap(self, partition: PartitionId, old: LocalReplica, new: LocalReplica) -> bool: ...


class LoadSampler:
    """Measures the load of the partitions that this server leads."""

    def __init__(self, env: Env, hosted: Hosted, dispatcher: Swaps) -> None:
        self._env, self._hosted, self._dispatcher = env, hosted, dispatcher
        self._nursery = env.nursery.child("taps")
        self._heats: dict[PartitionId, LoadTracker] = {}
        self._open: dict[PartitionId, tuple[Tap, LocalReplica]] = {}
        self._counted_at = 0.0
        self._has_seen = True
        """True if operations have arrived since the last check."""

    def start(self) -> None:
        self._nursery.spawn(self._poll(), name="poll")

    async def close(self) -> None:
        await self._nursery.close()
        for tap, _ in list(self._open.values()):
            self.remove(tap)

    def loads(self) -> list[PartitionLoad]:
        """Return the loads of the partitions that this server leads."""
        return [self._heats[partition].load() for partition in sorted(self._heats)]

    async def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with the loads of the partitions that this server leads."""
        return encode(self.loads())

    def numbers(self) -> dict[PartitionId, dict[str, float]]:
        return {partition: heat.numbers() for partition, heat in sorted(self._heats.items())}

    def remove(self, tap: Tap) -> None:
        """Remove a tap when its burst is over or has taken too long."""
        found = self._open.get(tap.partition)
        if found is None or found[0] is not tap:
            return
        del self._open[tap.partition]
        self._dispatcher.swap(tap.partition, tap, found[1])
        self._has_seen = self._has_seen or bool(tap.seen)
        heat = self._heats.get(tap.partition)
        if heat is not None:
            heat.sampled(tap.seen)

    async def _poll(self) -> None:
        while True:
            # Idle partitions are not sampled: their taps stay in place and are checked at the counting interval.
            if self._has_seen or any(tap.seen for tap, _ in self._open.values()):
                await asyncio.sleep(TICK_S * (0.5 + self._env.random.random()))
            else:
                await self._env.beat.pause(IDLE_S)
            self.poll()

    def poll(self) -> None:
        """Start new bursts, and record how many operations have been answered."""
        self._has_seen = False
        leading = self._hosted.leading()
        for partition, (tap, replica) in list(self._open.items()):
            if tap.seen or leading.get(partition) is not replica:
                self.remove(tap)
        hash = self._dispatcher.topology.ring.hash
        self._heats = {each: self._heats.get(each) or LoadTracker(each, hash) for each in sorted(leading)}
        now = self._env.clock.now()
        if now - self._counted_at >= COUNT_S * 0.9:
            self._counted_at = now
            for partition, replica in sorted(leading.items()):
                if (counts := replica.counts()) is not None:
                    self._heats[partition].counted(*counts, now)
        for partition, replica in sorted(leading.items()):
            if partition not in self._open:
                tap = Tap(self, partition, replica)
                if self._dispatcher.swap(partition, replica, tap):
                    self._open[partition] = (tap, replica)


async def loads_of_cluster(
    links: PeerCalls, load_sampler: LoadSampler, own: ServerId, servers: Iterable[ServerId]
) -> dict[PartitionId, PartitionLoad]:
    """Return the loads of all partitions whose leaders answer."""
    found = {load.partition: load for load in load_sampler.loads()}
    for server in servers:
        if server == own:
            continue
        try:
            loads = decode(await links.call(server, LOADS, "loads", b"", CALL_S))
        except (StoreError, msgspec.MsgspecError) as error:
            log.info("server=%s did not report its load: %r", server, error)
            continue
        found |= {load.partition: load for load in loads}
    return found
