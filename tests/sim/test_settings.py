"""Every number of node.toml at its lowest and its highest allowed value: no process ends, and the cluster works."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvstore.bookie.config import StorageConfig
from kvstore.partition.state import commands
from kvstore.ranges import Range
from kvstore.server.config import NodeConfig
from tests.server.test_config_ranges import NUMBERS
from tests.sim.cluster import Cluster
from tests.sim.judges.operations import Status
from tests.sim.run import all_serve
from tests.sim.stories.scenarios import KEY, QUIET, P, Stage
from tests.sim.watching import watching
from tests.sim.world.env import SimWorld

pytestmark = pytest.mark.sim

MIB = 1 << 20
SMALL = StorageConfig(segment_bytes=MIB, reserve_bytes=2 * MIB)
LED_S_MAX = 400.0
"""Seconds: longer than the longest lease, its margin and a session."""
WRITES = 30
UNWRITABLE = {"storage.reserve_bytes": "no disk of the simulation has 1 TiB: every bookie is read-only"}
"""Settings at whose highest value no write succeeds."""
TOO_LARGE = {"storage.segment_bytes": "2 GiB for each segment: the simulation keeps them in memory"}
"""Settings whose highest value is not tried here."""
BESIDE = {
    "partition.lease_ms": {"log.orphan_age_s": 600.0},
    "partition.hidden_pause_ms": {"log.orphan_age_s": 600.0},
    "partition.write_buffer_bytes": {"partition.memory_bytes": 4 << 30},
    "partition.entry_bytes_max": {"partition.entries_in_flight_max": 32},
}
"""Settings that must change when another setting is at its highest value."""


def at_the_end_of(found: Range, kind: type, *, is_highest: bool) -> Any:
    """Return the lowest or the highest value of a range."""
    if is_highest:
        return kind(found.most) if not found.is_below else 1 - 1e-9
    return kind(0 if found.is_zero_allowed else found.least)


CASES = [
    pytest.param(
        name, at_the_end_of(found, kind, is_highest=highest), id=f"{name}-{'highest' if highest else 'lowest'}"
    )
    for name, kind, found in NUMBERS
    for highest in (False, True)
    if found is not None and not (highest and name in TOO_LARGE)
] + [
    pytest.param(name, kind(found.least), id=f"{name}-lowest above 0")
    for name, kind, found in NUMBERS
    if found is not None and found.is_zero_allowed
]


def with_value(config: Any, name: str, value: Any) -> Any:
    """Return the settings with one value replaced, given by its dotted name."""
    section, dot, rest = name.partition(".")
    return replace(config, **{section: with_value(getattr(config, section), rest, value) if dot else value})


def lowest_of_a_node(name: str, value: Any) -> Any:
    """Return the lowest value for a node, which requires larger segments than a standalone bookie."""
    return max(value, MIB) if name == "storage.segment_bytes" else value


async def works(stage: Stage, *, is_writable: bool) -> None:
    """Write, lose the leader, write again, and let every periodic task run."""
    if not is_writable:
        await asyncio.sleep(20)
        return
    node = stage.cluster.nodes[0]
    for _ in range(WRITES):
        assert (await stage.put(node, attempts=20)).status is Status.OK
    await stage.until(lambda: stage.cluster.leader(P) is not None)
    old = stage.leader
    old.crash()
    await stage.until(lambda: any(P in each.leads for each in stage.others(old)), LED_S_MAX)
    old.start()
    other = stage.others(old)[0]
    written = await stage.put(other, attempts=20)
    assert written.status is Status.OK
    await asyncio.sleep(20)
    read = await stage.ask(commands.Get(KEY), other, attempts=20)
    assert read.status is Status.OK, read
    assert next(iter(read.result)) == written.op.value


@pytest.mark.parametrize(("name", "value"), CASES)
def test_cluster_works_with_a_setting_at_its_bound(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writable = name not in UNWRITABLE or not value
    changed = {name: lowest_of_a_node(name, value), **(BESIDE.get(name, {}) if value else {})}

    def chosen(config: NodeConfig) -> NodeConfig:
        config = replace(config, storage=SMALL)
        for each, its in reversed(changed.items()):
            config = with_value(config, each, its)
        return config

    with SimWorld(1) as world:
        cluster = Cluster(world, replace(QUIET, partition=replace(QUIET.partition, retention_ms=1_000)))
        for node in cluster.nodes:
            node.config = chosen(node.config)

        async def main() -> None:
            await cluster.found()
            if is_writable:
                await all_serve(cluster, LED_S_MAX)
            await works(Stage(cluster), is_writable=is_writable)
            assert [node.name for node in cluster.nodes if not node.is_running] == []
            cluster.check()

        with watching(cluster.logbook, cluster.rules):
            world.run(main(), limit_s=4 * LED_S_MAX)
