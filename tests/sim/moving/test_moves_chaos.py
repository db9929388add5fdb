"""Partitions join while random faults strike: each seed draws its own cluster and its own faults."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, play
from tests.sim.strikes.faults import FAULTS, Chaos
from tests.sim.strikes.knobs import Knobs, draw, drawn_hash, perhaps_processes

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def drawn(seed: int) -> Knobs:
    """Draw a cluster of one or two partitions with up to three kinds of faults. The retry table keeps everything
    that users may repeat, because they rely on it."""
    random = Random(f"moves/{seed}")
    names = sorted(FAULTS)
    knobs = draw(random, names)
    partitions, faults = random.choice((1, 2)), tuple(random.sample(names, random.choice((1, 2, 3))))
    partition = replace(knobs.partition, retry_window_ms=600_000, retry_bytes_max=64 << 20, retry_results_max=1024)
    knobs = replace(knobs, partitions=partitions, faults=faults, partition=partition)
    random = Random(f"moves/{seed}/cluster")
    return perhaps_processes(replace(knobs, hash=drawn_hash(random)), random)


async def join_in_trouble(world: World, users: Users) -> None:
    knobs = world.cluster.knobs
    await world.join("px", "py")
    await Chaos(world.cluster, world.cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s).run(knobs.chaos_s)


@pytest.mark.parametrize("seed", [15])  # in 15 a wait for the end of a pause ended too early
def test_moves_complete_whatever_strikes(seed: int) -> None:
    play(seed, join_in_trouble, drawn(seed), users=4, pause_s=LONG_PAUSE_S)
