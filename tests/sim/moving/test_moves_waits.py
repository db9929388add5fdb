"""Waiting times of operations while their range changes hands: a few round trips, whatever delay the metadata
store's watches have."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.moves.mover import PAUSE_MAX_S, PAUSE_SHARE
from kvstore.types import PartitionId
from tests.sim.moving.moves import Users, World, at_each_step, first_range, hash_for, keys_in, play
from tests.sim.moving.test_moves import TWO, join_one
from tests.sim.strikes.knobs import Knobs
from tests.sim.world.disk import DiskConfig
from tests.sim.world.metadata import MetadataConfig
from tests.sim.world.network import NetworkConfig

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEYS, COUNTERS = keys_in(SPAN, 4, b"k"), keys_in(SPAN, 1, b"c")
PAIR = (PartitionId("p1"), PartitionId("p2"))
MOVES = 6
SEEDS = range(1, 5)
TIMED = replace(TWO, autorecovery=AutorecoveryConfig(auditor=False, worker=False))
"""Timed requests share their session with no request that was slow before the clock began."""
ROUND_TRIP_S, SYNC_S = 0.001, 0.0001
EVEN_NETWORK = NetworkConfig(
    latency_s=(ROUND_TRIP_S / 2, ROUND_TRIP_S / 2), jitter_s=0.0, spike_chance=0.0, recut_chance=0.0
)
EVEN_DISK = DiskConfig(sync_s=(SYNC_S, SYNC_S), slow_chance=0.0)
"""Every message and every sync takes the same time, so that a duration shows the number of sequential steps,
whatever a seed draws."""
RECORD_S = ROUND_TRIP_S + SYNC_S
"""Seconds for one record in a log."""
RECORDS = 3
"""Number of records while a range is frozen: the target has everything, the source releases, the target owns."""
POLL_S = 0.0005
LEAST_S = 1e-9
"""Error bound of float additions."""


async def until(is_so: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 30.0
    while not is_so():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(POLL_S)


class Hands(NamedTuple):
    """Durations of moves of a range back and forth, in seconds."""

    frozen: list[float]
    told: list[float]
    """Time from the first endpoint to the last endpoint that learns of the move."""
    calls: int
    """1 if the leaders of source and target are on two nodes: a request between them is then a round trip."""


def to_and_fro(seed: int, users: int) -> Hands:
    times: dict[str, list[float]] = {"after freeze": [], "before flip": []}
    told: list[float] = []
    leaders: set[tuple[str, ...]] = set()

    def reached(means: Means, step: str, move: int) -> None:
        if step in times:
            times[step].append(asyncio.get_running_loop().time())

    async def story(world: World, _users: Users) -> None:
        loop = asyncio.get_running_loop()
        metadata = world.cluster.metadata
        metadata.config = replace(metadata.config, slow_p=0.0)
        await asyncio.sleep(metadata.config.slow_s)  # slow messages complete before the measurement
        endpoints = [node.endpoint[1] for node in world.cluster.nodes if node.endpoint is not None]
        for target in ("p2", "p1") * (MOVES // 2):
            leaders.add(tuple(sorted(node.name for node in map(world.leader_of, PAIR) if node is not None)))
            await world.shift(SPAN, target)
            await until(
                lambda target=target: any(each.topology.ring.partition_of(KEYS[0]) == target for each in endpoints)
            )
            began = loop.time()
            await until(
                lambda target=target: all(each.topology.ring.partition_of(KEYS[0]) == target for each in endpoints)
            )
            told.append(loop.time() - began)
            await world.moved()

    with at_each_step(reached):
        hash, network, disk = hash_for(seed), EVEN_NETWORK, EVEN_DISK
        play(seed, story, TIMED, users=users, keys=KEYS, counters=COUNTERS, network=network, disk=disk, hash=hash)
    ((one, other),) = leaders
    frozen = [own - freeze for freeze, own in zip(times["after freeze"], times["before flip"], strict=True)]
    assert len(frozen) == MOVES
    return Hands(frozen, told, int(one != other))


@pytest.mark.parametrize("seed", SEEDS)
def test_move_of_range_logs_three_records_and_asks_one_question(seed: int) -> None:
    hands = to_and_fro(seed, users=0)
    assert max(hands.frozen) <= RECORDS * RECORD_S + hands.calls * ROUND_TRIP_S + LEAST_S, hands


@pytest.mark.parametrize("seed", SEEDS)
def test_move_under_load_logs_one_more_record_and_all_endpoints_know_soon(seed: int) -> None:
    """The record contains everything written until the freeze. Each record may wait for a sync in progress. An
    endpoint that is notified of the flip reads the ring, and reads it again behind a sync if it was older
    (docs/protocol.md, H9)."""
    hands = to_and_fro(seed, users=3)
    records_s = (RECORDS + 1) * (RECORD_S + SYNC_S)
    assert max(hands.frozen) <= records_s + hands.calls * ROUND_TRIP_S + LEAST_S, hands
    answer_s = MetadataConfig().latency_s[1]  # the first endpoint to know may differ from the one that changed the ring
    reads_s = 3 * 2 * MetadataConfig().latency_s[1]
    assert max(hands.told) <= answer_s + ROUND_TRIP_S / 2 + reads_s + POLL_S + LEAST_S, hands


STEADY = Knobs(partition=PartitionConfig(lead_back_s=100.0), moves_rest_s=PAUSE_MAX_S)
"""The next leader of a partition does not know that the partition pauses."""


def test_partition_takes_many_ranges_one_by_one_and_pauses_between() -> None:
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}

    def reached(means: Means, step: str, move: int) -> None:
        now = asyncio.get_running_loop().time()
        if step == "before begin":
            begun.setdefault(move, now)
        elif step == "after flip":
            ended[move] = now

    with at_each_step(reached):
        play(5, join_one, STEADY, users=1)
    order = sorted(begun, key=begun.__getitem__)
    assert len(order) > 2
    for former, later in itertools.pairwise(order):
        took = ended[former] - begun[former]
        assert begun[later] - ended[former] >= 0.9 * min(PAUSE_SHARE * took, PAUSE_MAX_S)
