"""The balancer's plans on simulated clusters: they converge, never oscillate, and keep their bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from kvstore.ring import MURMUR3, TOKENS, KeyHash, Ring, plan
from kvstore.ring.hashing import SLOTS_HASH
from kvstore.ring.ring import TokenRange
from kvstore.server.balance.observation import ServerState
from kvstore.server.balance.planner import plan as next_plan
from kvstore.server.balance.ranges import RANGES_MAX
from kvstore.server.balance.record import BACK_SETTLES, COOLDOWN_SETTLES
from kvstore.server.balance.step import Goal, Step, way_back, way_of
from kvstore.server.balance_config import BalanceConfig, BalanceMode
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import settle
from tests.server.balance.clusters import (
    AUTO,
    DATE_MS,
    TICK_S,
    Cluster,
    Key,
    cluster,
    uniform,
    with_replicas,
    with_works,
    zipfian,
)

HOUR_S = 3_600.0
SEEDS = range(3)


def touched(step: Step) -> set[str]:
    return {step.partition, step.target} if step.goal.moves_ranges else {step.partition}


def check_bounds(made: Iterable[tuple[float, Step]], config: BalanceConfig) -> None:
    """Assert what holds of every run: the budget, the rests, and that nothing is reversed soon."""
    steps = list(made)
    for (at, _), (later, _) in pairwise(steps):
        assert later - at >= config.settle_s
    for place, (at, step) in enumerate(steps):
        lately = [each for each in steps[:place] if at - each[0] < HOUR_S]
        assert len(lately) < config.moves_per_hour
        for before, other in steps[:place]:
            if at - before < COOLDOWN_SETTLES * config.settle_s:
                assert not touched(step) & touched(other), f"{step} after {other}"
            if at - before < BACK_SETTLES * config.settle_s:
                assert way_of(step) != way_back(other), f"{step} reverses {other}"


def busy_leads(random: Random) -> list[Key]:
    """Return keys of which most are on two partitions that one server leads."""
    idle = cluster(random, [], partitions=10)
    [busy, *_] = [found for server in idle.servers if len(found := idle.observe().leads_of(server)) > 1]
    keys = uniform(3_000, random)
    hot = [replace(key, weight=4 * key.weight) for key in keys if idle.ring.owner_of(key.token) in busy]
    return [*(key for key in keys if idle.ring.owner_of(key.token) not in busy), *hot]


def all_led(found: Cluster) -> bool:
    """Return True if every partition is led by a server that has its replica."""
    return all(found.leaders[each.id] in each.replicas for each in found.ring.partitions.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_skewed_load_converges_and_then_nothing_moves(seed: int) -> None:
    random = Random(seed)
    found = cluster(random, zipfian(2_000, random), partitions=random.choice([5, 8, 12, 30]))
    found.noise = 0.0
    before = found.skew()
    found.run(4 * HOUR_S)
    check_bounds(found.made, found.config)
    assert all_led(found)
    assert found.skew() <= max(1.35, max(key.weight for key in found.keys) * 5 * 1.35), f"{before:.2f}"
    assert not [step for at, step in found.made if at > 3 * HOUR_S], "constant load: the steps come to an end"


@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_of_load_lowers_sum_of_squares(seed: int) -> None:
    random = Random(seed)
    found = cluster(random, zipfian(500, random, 1.1))
    for _ in range(60):
        before, count = found.squares(), len(found.made)
        found.run(180)
        if len(found.made) > count and found.made[-1][1].goal in (Goal.LEADS, Goal.LOAD):
            found.config, config = replace(found.config, window="00:00-00:01"), found.config
            found.run(300)  # the step takes effect
            found.config = config
            assert found.squares() < before


def test_even_load_moves_nothing() -> None:
    random = Random(1)
    found = cluster(random, uniform(5_000, random), partitions=10)
    found.run(6 * HOUR_S)
    assert not found.made


@pytest.mark.parametrize(("seed", "hash"), [(0, MURMUR3), (1, SLOTS_HASH), (2, MURMUR3)])
def test_moving_load_keeps_budget_and_converges_when_it_stops(seed: int, hash: KeyHash) -> None:
    random = Random(seed)
    found = cluster(random, zipfian(400, random), partitions=10, hash=hash)
    found.config = replace(AUTO, moves_per_hour=12)
    for _ in range(36):
        found.keys = zipfian(400, random)  # other keys are hot every ten minutes
        found.run(600)
    check_bounds(found.made, found.config)
    assert all_led(found)
    assert len(found.ring.tokens) <= RANGES_MAX * len(found.ring.partitions)
    stopped, found.noise = found.now, 0.0
    found.run(6 * HOUR_S)
    check_bounds(found.made, found.config)
    assert found.skew() <= max(1.45, max(key.weight for key in found.keys) * 5 * 1.35)
    assert not [step for at, step in found.made if at > stopped + 5 * HOUR_S]


@pytest.mark.parametrize("seed", SEEDS)
def test_short_bursts_move_nothing(seed: int) -> None:
    random = Random(seed)
    found = cluster(random, uniform(500, random), partitions=10)
    quiet = found.keys
    for _ in range(60):
        hot = random.randrange(TOKENS)
        found.keys = [*quiet, *(Key((hot + i) % TOKENS, 0.05) for i in range(20))]
        found.run(30)
        found.keys = quiet
        found.run(60)
    assert not found.made, "a burst shorter than settle_s is no reason to move anything"


def test_small_differences_among_idle_partitions_move_nothing() -> None:
    """A cluster thrashed elsewhere because all of its little data was in one of many nearly empty ranges."""
    random = Random(3)
    found = cluster(random, busy_leads(random), partitions=10)
    found.ops_per_s, found.keys_stored = 90.0, 2_000
    assert found.skew() > 1.5
    found.run(2 * HOUR_S)
    assert not found.made


def test_one_hot_key_is_explained_and_not_chased() -> None:
    random = Random(4)
    found = cluster(random, [Key(7, 0.9), *(replace(key, weight=key.weight / 10) for key in uniform(300, random))])
    found.run(3 * HOUR_S)
    hot = found.ring.owner_of(7)
    assert not [step for _, step in found.made if step.goal is Goal.LOAD and step.partition == hot]
    assert not [step for at, step in found.made if at > 2 * HOUR_S]
    assert found.last is not None
    assert "which no move can split" in dict(found.last.notes)[Goal.LOAD]


@pytest.mark.parametrize("hash", [MURMUR3, SLOTS_HASH])
def test_hot_range_is_split_when_no_lead_helps(hash: KeyHash) -> None:
    random = Random(5)
    found = cluster(random, uniform(100, random), servers=3, partitions=3, hash=hash)
    spans = [span for span in found.ring.ranges() if span.owner == "p2" and span.start < span.end]
    span = max(spans, key=lambda each: each.size)
    found.keys = [Key(random.randrange(span.start + 1, span.end), 1 / 400) for _ in range(400)]
    assert found.skew() == 3.0
    found.run(3 * HOUR_S)
    assert {step.goal for _, step in found.made} == {Goal.LOAD}
    assert found.skew() < 1.3


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_of_load_and_of_shares_do_not_undo_each_other(seed: int) -> None:
    random = Random(seed)
    found = cluster(random, zipfian(300, random, 1.05), servers=3, partitions=6)
    found.keys_stored = 5_000_000
    for target in ("p1", "p2"):
        found.ring = plan.settled(found.ring)
        largest = max((s for s in found.ring.ranges() if s.owner == "p6" and s.start < s.end), key=lambda s: s.size)
        moved = plan.shift_range(found.ring, largest.start + 1, largest.end, PartitionId(target))
        found.ring = settle(moved)
    found.run(8 * HOUR_S)
    check_bounds(found.made, found.config)
    assert not [step for at, step in found.made if at > 6 * HOUR_S]


@pytest.mark.parametrize("hash", [MURMUR3, SLOTS_HASH])
def test_large_share_moves_to_small_ones_when_there_is_no_load(hash: KeyHash) -> None:
    random = Random(6)
    found = cluster(random, [], servers=3, partitions=4, hash=hash)
    found.ops_per_s, found.keys_stored = 0.0, 1_000_000
    for source in ("p2", "p3", "p4"):
        tokens = int(found.ring.shares()[PartitionId(source)] * TOKENS * 0.6)
        found.ring = settle(plan.shift(found.ring, PartitionId(source), PartitionId("p1"), tokens))
    assert max(found.ring.shares().values()) > 0.6
    found.run(12 * HOUR_S)
    assert {step.goal for _, step in found.made} == {Goal.SHARES}
    assert max(found.ring.shares().values()) <= 0.5
    assert not [step for at, step in found.made if at > 10 * HOUR_S]


@pytest.mark.parametrize("seed", SEEDS)
def test_new_server_gets_replicas_then_leads_and_zones_stay_distinct(seed: int) -> None:
    random = Random(seed)
    found = cluster(random, uniform(3_000, random), servers=4, partitions=12, zones=("a", "b", "c"))
    found.servers[ServerId("n5")] = ServerState(zone="b")
    zones = {server: state.zone for server, state in found.servers.items()}
    clashes = sum(3 - len({zones[each] for each in m.replicas}) for m in found.ring.partitions.values())
    found.run(6 * HOUR_S)
    check_bounds(found.made, found.config)
    assert clashes == 0 == sum(3 - len({zones[each] for each in m.replicas}) for m in found.ring.partitions.values())
    held = {server: sum(server in m.replicas for m in found.ring.partitions.values()) for server in found.servers}
    assert held[ServerId("n5")] >= 6
    assert found.works()[ServerId("n5")] > 0
    assert found.skew() < 1.35


def test_replicas_leave_fullest_disk_and_do_not_come_back() -> None:
    random = Random(8)
    found = cluster(random, [], servers=5, partitions=10)
    found.ops_per_s, found.keys_stored = 0.0, 1_000_000
    for number, server in enumerate(sorted(found.servers)):
        used = 90 if number == 0 else 30
        found.servers[server] = ServerState(disk_used=used << 30, disk_total=100 << 30)
    found.run(12 * HOUR_S)
    check_bounds(found.made, found.config)
    assert next(step.source for _, step in found.made if step.goal is Goal.REPLICAS) == "n1"
    assert found.servers[ServerId("n1")].used < 0.9
    assert not [step for _, step in found.made if step.target == "n1"], "it holds fewest replicas now, and most data"
    assert not [step for at, step in found.made if at > 10 * HOUR_S]


# docs/protocol.md H13
def test_numbers_of_leads_do_not_overload_a_server() -> None:
    """n2 leads one partition, which is busy. With a lead of n1 it was overloaded, and the lead came back, each hour."""
    found = cluster(Random(14), [], servers=4, partitions=10, copies=2)
    with_replicas(found, {f"p{i}": ("n1", "n2") for i in (1, 2, 3, 4)} | {"p5": ("n2", "n1")})
    with_replicas(found, {f"p{i}": ("n3", "n4") for i in (6, 7, 8)} | {f"p{i}": ("n4", "n3") for i in (9, 10)})
    with_works(found, {f"p{i}": 50.0 for i in (1, 2, 3, 4)} | {"p5": 370.0, "p6": 100.0, "p9": 100.0})
    found.run(8 * HOUR_S)
    assert not found.made
    assert found.last is not None
    assert "no lead can move without overload" in dict(found.last.notes)[Goal.LEADS]


# docs/protocol.md H13
def test_moves_for_disks_and_for_numbers_do_not_undo_each_other() -> None:
    """All servers hold eight replicas, and two disks differ by little more than the bytes of two replicas. Eight copies
    an hour went to and fro."""
    found = cluster(Random(15), [], servers=4, partitions=16, copies=2)
    found.ops_per_s, found.keys_stored, found.replica_bytes = 0.0, 3_200_000, 6 << 30
    for server, used in zip(sorted(found.servers), (80, 68, 59, 68), strict=True):
        found.servers[server] = ServerState(disk_used=used << 30, disk_total=100 << 30)
    found.run(16 * HOUR_S)
    assert [(step.goal, step.source, step.target) for _, step in found.made] == [(Goal.REPLICAS, "n1", "n3")]


def test_imbalance_lasts_while_another_side_is_sometimes_worse() -> None:
    """Of two equally busy servers, another one is the busier at each observation. The balancer began to wait again each
    time."""
    found = cluster(Random(16), [], servers=6, partitions=24)
    leaders = {each.id: str(each.replicas[0]) for each in found.ring.partitions.values()}
    assert set(leaders.values()) == set(found.servers)
    busy = {partition: leader for partition, leader in leaders.items() if leader in ("n1", "n4")}
    for tick in range(10):
        more = ("n1", "n4")[tick % 2]
        with_works(found, {each: 1_000.0 if each in busy else 300.0 for each in leaders})
        found.keys = [
            replace(key, weight=key.weight * (1.1 if busy.get(found.ring.owner_of(key.token)) == more else 1))
            for key in found.keys
        ]
        found._rates.clear()
        found.run(TICK_S)
    assert [step.goal for _, step in found.made] == [Goal.LEADS]
    assert found.made[0][0] <= 60 + 2 * TICK_S


def test_plan_of_a_large_ring_reads_its_ranges_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes one turn of the event loop. With 200 partitions, of which a third were busy, it took four seconds,
    because each pair of partitions cost an iteration over the ring."""
    found = cluster(Random(17), [], servers=10, partitions=80, copies=1)
    busy = {found.observe().leads_of(ServerId(server))[0] for server in ("n1", "n2", "n3")}
    with_works(found, {str(each): 8_000.0 if each in busy else 100.0 for each in found.ring.partitions})
    found.keys_stored = 1_000_000
    found.advance(TICK_S)
    seen, traversals, ranges = found.observe(), [0], Ring.ranges
    token_of = {found.ring.owner_of(key.token): key.token for key in found.keys}
    loads = {each: load._replace(hot=(), tokens=(token_of[each],) * 64) for each, load in seen.loads.items()}

    def counted(self: Ring) -> Iterator[TokenRange]:
        traversals[0] += 1
        return ranges(self)

    monkeypatch.setattr(Ring, "ranges", counted)
    planned = next_plan(replace(seen, loads=loads), found.config, found.record, DATE_MS)
    assert "no range of" in dict(planned.notes)[Goal.LOAD]
    assert traversals[0] <= 4


def test_single_replicas_do_not_thrash() -> None:
    """With one copy, the replica that moves is always the leader: CockroachDB's allocator thrashed there."""
    random = Random(9)
    found = cluster(random, uniform(2_000, random), servers=3, partitions=9, copies=1)
    found.servers[ServerId("n4")] = ServerState()
    found.run(8 * HOUR_S)
    check_bounds(found.made, found.config)
    assert found.skew() < 1.4
    assert not [step for at, step in found.made if at > 6 * HOUR_S]


def test_unhealthy_cluster_is_left_alone_and_step_is_still_explained() -> None:
    random = Random(10)
    found = cluster(random, busy_leads(random), partitions=10)
    found.obstacles = ("the cluster is not healthy: node n3 does not answer",)
    found.run(HOUR_S)
    assert not found.made
    assert found.last is not None
    assert found.last.step is not None
    assert found.last.due is None
    assert "n3" in found.last.waits[0]


def test_steps_begin_only_within_window() -> None:
    random = Random(11)
    found = cluster(random, busy_leads(random), partitions=10)
    found.config = BalanceConfig(mode=BalanceMode.AUTO, window="23:30-00:30")
    found.run(48 * HOUR_S)
    dates = [DATE_MS + int(at * 1000) for at, _ in found.made]
    assert dates
    minutes = [date // 60_000 % 1440 for date in dates]
    assert all(minute >= 1410 or minute < 30 for minute in minutes)


def test_plan_is_a_function_of_its_arguments() -> None:
    one, other = (cluster(Random(12), busy_leads(Random(13)), partitions=10) for _ in range(2))
    one.run(HOUR_S)
    other.run(HOUR_S)
    assert one.made == other.made
    assert one.made
