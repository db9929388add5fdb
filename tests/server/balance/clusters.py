"""A cluster of loads for tests of the balancer: a real ring, keys with weights, and steps that take time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random

from kvstore.loadtest.generator.choosers import Ranks
from kvstore.ring import MURMUR3, TOKENS, KeyHash, Ring, new_ring, plan, replicas
from kvstore.ring.ring import PartitionState
from kvstore.server.balance.observation import Observation, ServerState
from kvstore.server.balance.planner import Patience, Plan
from kvstore.server.balance.planner import plan as next_plan
from kvstore.server.balance.record import BalanceRecord, Intent, Made, applied
from kvstore.server.balance.step import Goal, Step
from kvstore.server.balance_config import BalanceConfig, BalanceMode
from kvstore.server.load.load import HALF_LIFE_S, HotKey, PartitionLoad
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import settle

TICK_S = 15.0
HANDOVER_S, COPY_S = 12.0, 90.0
"""Time that a lead, and a replica or a range, takes to move."""
AUTO = BalanceConfig(mode=BalanceMode.AUTO, moves_per_hour=60)
DATE_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Key:
    token: int
    weight: float
    """Part of all operations."""


def uniform(count: int, random: Random) -> list[Key]:
    return [Key(random.randrange(TOKENS), 1 / count) for _ in range(count)]


def zipfian(count: int, random: Random, constant: float = 0.99) -> list[Key]:
    ranks = Ranks(count, constant)
    return [Key(random.randrange(TOKENS), ranks.share(rank)) for rank in range(count)]


class Drawn:
    """The keys of one partition, from which operations are drawn."""

    def __init__(self, keys: Sequence[Key]) -> None:
        ordered = sorted(keys, key=lambda key: key.token)
        self._tokens = [key.token for key in ordered]
        self._sums = list(accumulate(key.weight for key in ordered))
        self.weight = self._sums[-1] if self._sums else 0.0
        self._hot: tuple[HotKey, ...] = ()
        if self.weight:
            hottest = max(keys, key=lambda key: key.weight)
            self._hot = (HotKey(b"%d" % hottest.token, hottest.weight / self.weight),)

    def sample(self, random: Random) -> tuple[tuple[int, ...], tuple[HotKey, ...]]:
        """Return sampled tokens, sorted, and the hottest key."""
        if not self.weight:
            return (), ()
        last = len(self._tokens) - 1
        drawn = (self._tokens[min(bisect_left(self._sums, random.random() * self.weight), last)] for _ in range(64))
        return tuple(sorted(drawn)), self._hot


@dataclass
class Cluster:
    """Servers, a ring and a load. `keys` may be replaced at any time."""

    random: Random
    servers: dict[ServerId, ServerState]
    ring: Ring
    keys: Sequence[Key]
    ops_per_s: float = 10_000.0
    write_part: float = 0.2
    keys_stored: int = 0
    replica_bytes: int = 0
    """Bytes of each replica; 0: each has an equal part of its disk."""
    noise: float = 0.05
    config: BalanceConfig = AUTO
    now: float = 0.0
    record: BalanceRecord = field(default_factory=BalanceRecord)
    made: list[tuple[float, Step]] = field(default_factory=list)
    last: Plan | None = None
    obstacles: tuple[str, ...] = ()
    _arrivals: dict[PartitionId, tuple[float, ServerId]] = field(default_factory=dict)
    _busy: tuple[float, Callable[[], None]] | None = None
    _rates: dict[PartitionId, float] = field(default_factory=dict)
    _patience: Patience = field(default_factory=Patience)
    _split_of: tuple[object, object, dict[PartitionId, Drawn]] | None = None

    def __post_init__(self) -> None:
        self.leaders = {each.id: each.replicas[0] for each in self.ring.partitions.values()}

    def true_ops(self) -> dict[PartitionId, float]:
        return {each: drawn.weight * self.ops_per_s for each, drawn in self._split().items()}

    def _split(self) -> dict[PartitionId, Drawn]:
        """Return the keys of each partition. Computed again only if the ring or the keys have changed."""
        if self._split_of is None or self._split_of[0] is not self.ring.tokens or self._split_of[1] is not self.keys:
            owners = self.ring.owners_of([key.token for key in self.keys])
            found: dict[PartitionId, list[Key]] = {each: [] for each in self.ring.partitions}
            for owner, key in zip(owners, self.keys, strict=True):
                found[owner].append(key)
            self._split_of = self.ring.tokens, self.keys, {each: Drawn(keys) for each, keys in found.items()}
        return self._split_of[2]

    def works(self) -> dict[ServerId, float]:
        """Return the true work of each server as a leader."""
        found = dict.fromkeys(self.servers, 0.0)
        for partition, ops in self.true_ops().items():
            found[self.leaders[partition]] += ops * (1 + 3 * self.write_part)
        return found

    def skew(self) -> float:
        """Return max/mean of the servers' work."""
        works = self.works()
        return max(works.values()) * len(works) / max(sum(works.values()), 1e-9)

    def squares(self) -> float:
        return sum(work * work for work in self.works().values())

    def advance(self, seconds: float) -> None:
        """Let time pass: handovers and copies end, and measured loads follow the true ones."""
        self.now += seconds
        for partition, (at, server) in list(self._arrivals.items()):
            if self.now >= at:
                self.leaders[partition] = server
                del self._arrivals[partition]
        if self._busy is not None and self.now >= self._busy[0]:
            end, self._busy = self._busy[1], None
            end()
        weight = 1 - math.exp(-seconds / HALF_LIFE_S)
        for partition, ops in self.true_ops().items():
            seen = ops * (1 + self.noise * (2 * self.random.random() - 1))
            before = self._rates.get(partition, seen)
            self._rates[partition] = before + weight * (seen - before)

    def observe(self) -> Observation:
        shares = self.ring.shares()
        moving = ("a replica or a range moves",) if self._busy is not None else ()
        return Observation(
            ring=self.ring,
            servers=self.servers,
            leaders=dict(self.leaders),
            loads={each: self._load(each, drawn) for each, drawn in self._split().items()},
            keys={each: int(self.keys_stored * shares[each]) for each in shares},
            obstacles=(*self.obstacles, *moving),
        )

    def _load(self, partition: PartitionId, drawn: Drawn) -> PartitionLoad:
        ops = self._rates.get(partition, 0.0)
        tokens, hot = drawn.sample(self.random)
        return PartitionLoad(partition, ops, ops * self.write_part, 0.0, hot, tokens)

    def run(self, seconds: float) -> None:
        """Run the balancer for so long."""
        until = self.now + seconds
        while self.now < until:
            self.advance(TICK_S)
            date_ms = DATE_MS + int(self.now * 1000)
            self.last = next_plan(self.observe(), self.config, self.record, date_ms)
            lasts_s = self._patience.lasts_s(self.last, self.now)
            step = self.last.due
            if step is not None and lasts_s >= self.config.settle_s:
                made = Made(step=step, at_ms=date_ms, by="n1")
                self.record = applied(self.record, Intent(made=made, config=self.config))
                self.made.append((self.now, step))
                self.apply(step)

    def apply(self, step: Step) -> None:
        """Begin a step, as the operator's command would."""
        partition = PartitionId(step.partition)
        match step.goal:
            case Goal.LEADS:
                target = ServerId(step.target)
                self.ring = replicas.prefer_leader(self.ring, partition, target)
                self._arrivals[partition] = (self.now + HANDOVER_S, target)
            case Goal.REPLICAS:
                self._begin_replacing(partition, ServerId(step.source), ServerId(step.target))
            case Goal.LOAD | Goal.SHARES:
                planned = plan.shift_range(self.ring, step.first, step.last, PartitionId(step.target))

                def flip() -> None:
                    self.ring = settle(planned)
                    self._rates.clear()  # measured again, at once, because the flip is at one moment

                self._busy = (self.now + COPY_S, flip)

    def _begin_replacing(self, partition: PartitionId, source: ServerId, target: ServerId) -> None:
        self.ring = replicas.begin_replacing(self.ring, partition, target, source)

        def finish() -> None:
            self.ring = replicas.finish_replacing(self.ring, partition, target)
            if self.leaders[partition] == source:
                self.leaders[partition] = target
            part = 1 / sum(source in each.replicas for each in self.ring.partitions.values())
            moved = self.replica_bytes or int(self.servers[source].disk_used * part)
            for server, more in ((source, -moved), (target, moved)):
                state = self.servers[server]
                self.servers[server] = replace(state, disk_used=max(0, state.disk_used + more))

        self._busy = (self.now + COPY_S, finish)


def with_works(found: Cluster, works: Mapping[str, float]) -> None:
    """Give each partition this constant work in reads per second, all on one key of the partition."""
    ops, owners = sum(works.values()), {found.ring.owner_of(token): token for token in range(0, TOKENS, TOKENS >> 12)}
    found.keys = [Key(owners[PartitionId(partition)], work / ops) for partition, work in works.items() if work]
    found.ops_per_s, found.write_part, found.noise = ops, 0.0, 0.0


def with_replicas(found: Cluster, placed: Mapping[str, Sequence[str]]) -> None:
    """Place the replicas of these partitions, the leader first."""
    members = dict(found.ring.partitions)
    for partition, servers in placed.items():
        id = PartitionId(partition)
        members[id] = replace(members[id], replicas=tuple(map(ServerId, servers)))
    found.ring = replace(found.ring, partitions=members)
    found.leaders = {each.id: each.replicas[0] for each in members.values()}


def cluster(
    random: Random,
    keys: Sequence[Key],
    *,
    servers: int = 5,
    partitions: int = 12,
    copies: int = 3,
    zones: Sequence[str] = ("",),
    hash: KeyHash = MURMUR3,
) -> Cluster:
    """Return a cluster with an even ring."""
    states = {ServerId(f"n{i + 1}"): ServerState(zone=zones[i % len(zones)]) for i in range(servers)}
    placed = {server: state.zone for server, state in states.items()}
    ring = new_ring([PartitionId(f"p{i + 1}") for i in range(partitions)], placed, copies, hash)
    assert all(each.state is PartitionState.SERVING for each in ring.partitions.values())
    return Cluster(random, states, ring, keys)
