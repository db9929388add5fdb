"""Times to live, pins and retention under clocks that jump by up to an hour, and other faults (docs/protocol.md, P28
to P31)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.partition.config import PartitionConfig
from kvstore.wal.config import LogConfig
from tests.sim.clients import Identity, Worker
from tests.sim.clocks.lodgers import KeptFor, Lodgers
from tests.sim.cluster import Cluster
from tests.sim.judges import probes
from tests.sim.nodes import small_journals
from tests.sim.run import CALM_S, RECOVERY_S_MAX, TAIL, UP_S_MAX, all_serve, heal, until_broken
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import Knobs
from tests.sim.watching import watching
from tests.sim.workloads import Workload
from tests.sim.world.env import SimWorld

pytestmark = pytest.mark.sim

CHAOS_S = 25.0
KNOBS = Knobs(
    partition=PartitionConfig(flush_s=0.5, trim_s=0.5, retention_ms=6_000),
    log=LogConfig(roll_entries=8, check_every_s=0.3),
    faults=("clock_jumps", "clock_jumps", "kill_leader", "hand_over", "pause", "session_expiry", "cut_a_link"),
    pace_s=1.0,
)
MOST_JUMP = replace(KNOBS, faults=("clocks_of_a_majority", "clocks_of_a_majority", *KNOBS.faults[2:]))
SEEDS = 3


async def _scenario(cluster: Cluster) -> None:
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    KeptFor(cluster)
    random = cluster.world.fork("lodgers")
    workload = Workload(cluster, random, replace(KNOBS.load, registers=1, counters=1, banks=0, readers=1))
    lodgers, store = Lodgers(cluster, (4.0, 10.0)), await cluster.metadata.connect()
    users = [cluster.spawn(each, name="user") for each in workload.workers]
    for number in range(4):
        worker = Worker(cluster, f"lodger{number}", cluster.world.fork(f"lodger{number}"), Identity(random))
        users.append(cluster.spawn(lodgers.live(worker), name="lodger"))
    users += [cluster.spawn(lodgers.pin(store, each), name="pin") for each in cluster.partitions]
    await Chaos(cluster, cluster.world.fork("chaos"), list(cluster.knobs.faults), cluster.knobs.pace_s).run(CHAOS_S)
    heal(cluster)
    await all_serve(cluster, RECOVERY_S_MAX)
    await asyncio.sleep(CALM_S)
    workload.stop()
    lodgers.stop()
    for user in users:
        await user
    await store.close()


def play(seed: int, knobs: Knobs = KNOBS) -> None:
    with SimWorld(seed) as world:
        cluster = Cluster(world, knobs)
        try:
            with watching(cluster.logbook, cluster.rules), small_journals(knobs):
                world.run(until_broken(cluster, _scenario(cluster)), limit_s=300.0)
        except BaseException as error:
            error.add_note(f"seed {seed}\n{world.trace.tail(TAIL)}")
            raise


@pytest.mark.parametrize("knobs", [KNOBS, MOST_JUMP], ids=["one clock", "clocks of a majority"])
def test_nothing_expires_early_or_stays(knobs: Knobs, seed: int) -> None:
    before = {name: probes.hits[name] for name in ("lodger.there", "lodger.gone", "lodger.pinned")}
    for number in range(SEEDS):
        play(seed + number, knobs)
    for name, hits in before.items():
        assert probes.hits[name] > hits, f"the step {name} never happened"
