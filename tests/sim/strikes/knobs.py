"""The settings that differ from seed to seed: sizes, limits, timings, and the active faults. This is swarm testing:
a run with all faults explores less than many runs with few faults each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.bookie.config import BookieConfig
from kvstore.namespaces import Namespace
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.range_delete import RANGE_KEYS_MAX
from kvstore.ring.hashing import MURMUR3, SLOTS_HASH, KeyHash
from kvstore.server.balance_config import MOVES_MAX, BalanceConfig, BalanceMode
from kvstore.types import Quorum
from kvstore.wal.config import LogConfig
from tests.sim.workloads import Load

NO_AUDITOR = AutorecoveryConfig(auditor=False)
HASH = SLOTS_HASH
"""Key hash of runs that draw none."""
MACHINES = 3
"""Number of machines of runs with several servers per machine: as many as a write has copies."""
NO_BALANCER = BalanceConfig(mode=BalanceMode.OFF)
BALANCER = BalanceConfig(mode=BalanceMode.AUTO, settle_s=1.0, moves_per_hour=MOVES_MAX)
BALANCED_SHARE = 1 / 4
"""Share of the runs that have a balancer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The settings of one run. Durations are in seconds unless stated otherwise."""

    nodes: int = 3
    bookies: int = 0
    """Number of standalone bookies. If there are any, the other nodes are servers without bookies."""
    machines: int = 0
    """Number of machines, if some of them run several servers. 0: each server has its own."""
    older: int = 0
    """Number of servers that begin with the first release and are upgraded in the middle of the faults."""
    spaces: tuple[Namespace, ...] = ()
    """Namespaces over the keys of tenants and of other users."""
    partitions: int = 1
    hash: KeyHash = HASH
    zones: tuple[str, ...] = ()
    """Zones, assigned to the nodes in turn."""
    session_s: float = 3.0
    quorum: Quorum = field(default_factory=lambda: Quorum(3, 3, 2))
    log: LogConfig = field(default_factory=LogConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    autorecovery: AutorecoveryConfig = field(default_factory=lambda: NO_AUDITOR)
    balance: BalanceConfig = NO_BALANCER
    balances_ranges: bool = False
    """True if the balancer, if there is one, moves ranges too and not only leads and replicas."""
    balances_blindly: bool = False
    """True if the balancer of each server acts, and at any time: it may be wrong, late or doubled (H13)."""
    moves_rest_s: float = 0.1
    """Maximum time in seconds between two moves to one partition: short, because runs are short."""
    range_keys: int = RANGE_KEYS_MAX
    """Maximum number of keys that one entry of a range delete may delete."""
    segment_bytes: int = 64 << 10
    reclaim_s: float = 5.0
    scrub_first_s: float = 600.0
    directories: int = 1
    """Number of journal directories of each bookie."""
    load: Load = field(default_factory=Load)
    faults: tuple[str, ...] = ()
    """Names in tests.sim.strikes.faults.FAULTS."""
    pace_s: float = 0.5
    """Mean time in seconds between two faults."""
    chaos_s: float = 5.0
    power_cut_at_end: bool = True
    search: bool = True
    """Judge registers also with the checker that searches for an order."""

    @property
    def is_balanced(self) -> bool:
        """Return True if a balancer moves leads, replicas and ranges by itself (tests/sim/strikes/balancing.py)."""
        return self.balance.mode is BalanceMode.AUTO

    @property
    def may_lose_dates(self) -> bool:
        """Return True if all machines may reboot while most wall clocks are wrong, for which P28 promises nothing."""
        return "clocks_of_a_majority" in self.faults and not {"power_cut", "power_cut_all"}.isdisjoint(self.faults)

    def bookie(self, name: str, listen: str) -> BookieConfig:
        """Return the configuration of a bookie."""
        return BookieConfig(
            name=name,
            listen=listen,
            segment_bytes=self.segment_bytes,
            reserve_bytes=4 * self.segment_bytes,
            reclaim_interval_s=self.reclaim_s,
            sparse_share=0.5,
            rewrite_bytes_per_s=1 << 20,
            scrub_bytes_per_s=64 << 10,
            scrub_first_s=self.scrub_first_s,
        )


QUORUMS = {
    3: (Quorum(3, 3, 2),),
    4: (Quorum(3, 3, 2), Quorum(4, 3, 2)),
    5: (Quorum(3, 3, 2), Quorum(5, 3, 2), Quorum(4, 4, 3)),
}


def draw(random: Random, faults: list[str]) -> Knobs:
    """Draw the knobs of one run. `faults` are all existing faults."""
    nodes = random.choice((3, 3, 3, 4, 5))
    quorum = random.choice(QUORUMS[nodes])
    return Knobs(
        nodes=nodes,
        partitions=random.choice((1, 1, 2, 3)),
        session_s=random.choice((2.0, 3.0, 6.0)),
        quorum=quorum,
        log=LogConfig(
            quorum=quorum,
            roll_entries=random.choice((3, 8, 30, 200, 250_000)),
            roll_age_s=random.choice((1.0, 3.0, 900.0)),
            roll_fragments=random.choice((3, 32)),
            check_every_s=random.choice((0.3, 2.0)),
            orphan_age_s=random.choice((3.0, 600.0)),
        ),
        partition=_partition(random),
        segment_bytes=random.choice((8, 32, 256)) << 10,
        reclaim_s=random.choice((1.0, 4.0, 60.0)),
        load=Load(
            registers=random.randint(1, 3),
            counters=random.randint(0, 2),
            banks=random.randint(0, 2),
            readers=random.randint(0, 2),
            pause_s=random.choice((0.05, 0.1, 0.2)),
            value_bytes=random.choice((20, 200, 2000)),
        ),
        faults=tuple(random.sample(faults, min(len(faults), random.choice((1, 2, 3, 5, 8))))),
        pace_s=random.choice((0.2, 0.5, 1.0)),
        chaos_s=random.uniform(3.0, 6.0),
        power_cut_at_end=random.random() < 0.5,
        search=random.random() < 0.25,
        autorecovery=_autorecovery(random),
        directories=random.choice((1, 1, 2, 3)),
    )


def perhaps_split(knobs: Knobs, random: Random) -> Knobs:
    """In an eighth of the runs, put servers and bookies on separate machines."""
    return replace(knobs, bookies=knobs.nodes) if random.random() < 1 / 8 else knobs


def perhaps_processes(knobs: Knobs, random: Random) -> Knobs:
    """In a third of the runs with more than three servers, put the servers on three machines."""
    shares = random.random() < 1 / 3
    return replace(knobs, machines=MACHINES) if shares and knobs.nodes > MACHINES else knobs


def perhaps_balanced(knobs: Knobs, random: Random, *, ranges: bool) -> Knobs:
    """In a quarter of the runs, let a balancer work, which also moves `ranges` or does not. It has something to do only
    with several partitions and a server without replicas, and moves only leads that their preferred servers have."""
    if random.random() >= BALANCED_SHARE:
        return knobs
    return replace(
        knobs,
        balance=BALANCER,
        balances_ranges=ranges,
        balances_blindly=random.random() < 1 / 2,
        nodes=max(knobs.nodes, 4),
        partitions=max(knobs.partitions, random.choice((2, 3))),
        partition=replace(knobs.partition, lead_back_s=1.0),
    )


def perhaps_older(knobs: Knobs, random: Random) -> Knobs:
    """In an eighth of the runs, let half of the servers, or all, begin with the first release."""
    if random.random() >= 1 / 8:
        return knobs
    return replace(knobs, older=random.choice((knobs.nodes // 2 + 1, knobs.nodes)))


def drawn_hash(random: Random) -> KeyHash:
    """Return the key hash of a new cluster. Clusters that the first release founded have murmur3."""
    return random.choice((MURMUR3, SLOTS_HASH))


def hinted(seed: int, faults: tuple[str, ...], hints: dict[str, Any]) -> Knobs:
    """Return knobs of a seed under which a rare event is likely: with these faults, and with knobs set by name
    (`log.x`, `partition.x` and `load.x` for nested ones)."""
    drawn, hash = draw(Random(f"{seed}/hinted"), []), drawn_hash(Random(f"{seed}/hash"))
    changes: dict[str, Any] = {
        "hash": hash,
        "faults": faults,
        "pace_s": 0.4,
        "autorecovery": NO_AUDITOR,
    }
    if "directory_dies" in faults:
        changes["directories"] = max(2, drawn.directories)
    for name, value in hints.items():
        part, _, inner = name.rpartition(".")
        if part:
            changes[part] = replace(changes.get(part, getattr(drawn, part)), **{inner: value})
        else:
            changes[name] = value
    return replace(drawn, **changes)


def _autorecovery(random: Random) -> AutorecoveryConfig:
    """In a third of the runs, use an auditor and workers that are far too hasty: repairs meet writers, takeovers and
    each other, and bookies that are only away count as lost."""
    if random.random() < 2 / 3:
        return NO_AUDITOR
    return AutorecoveryConfig(
        lost_bookie_delay_s=random.choice((0, 1, 3)),
        check_interval_s=random.choice((0, 2.0, 5.0)),
        placement_interval_s=random.choice((0, 3.0)),
        bytes_per_s=random.choice((2_000, 20_000, 16 << 20)),
        open_ledger_grace_s=random.choice((0.3, 1.0, 3.0)),
    )


def _partition(random: Random) -> PartitionConfig:
    return PartitionConfig(
        lease_ms=random.choice((500, 500, 500, 100, 1000, 0)),
        entries_in_flight_max=random.choice((1, 2, 4, 4)),
        entry_bytes_max=random.choice((1 << 10, 256 << 10)),
        retry_window_ms=random.choice((4_000, 600_000, 600_000)),
        retry_bytes_max=random.choice((8_000, 64 << 20, 64 << 20)),
        retry_results_max=random.choice((2, 1024)),
        check_every=random.choice((3, 20, 1000)),
        flush_s=random.choice((0.3, 1.0, 5.0)),
        trim_s=random.choice((0.5, 2.0)),
        retention_ms=random.choice((0, 1_000, 3_600_000)),
    )
