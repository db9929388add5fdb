"""Clients of real processes while nodes are killed: nothing acknowledged is lost, nothing read is stale."""

import asyncio
import doctest
import json
import subprocess
import sys
import sysconfig
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.client.blocking import client as blocking_client
from kvstore.client.blocking import watch as blocking_watch
from kvstore.client.coordination import blocking as blocking_coordination
from loadtest.drills.load import Load
from tests.client.serving import PATIENT
from tests.cluster.harness import Cluster, running_cluster
from tests.sim.judges.linearizable import check
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ENOUGH = 150
"""Acknowledged writes of each partition that a run needs to prove something."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


async def under_load(cluster: Cluster, work: Callable[[Load], Awaitable[None]]) -> None:
    """Run `work` under load. Then two checkers judge the recorded history, and all acknowledged writes must exist."""
    async with AsyncClient(cluster.url) as client:
        load = Load(client)
        load.start()
        try:
            await wait_for_writes(load)
            await work(load)
            await wait_for_writes(load)
        finally:
            await load.stop()
        assert await load.verify() == []
    check(load.history)


async def wait_for_writes(load: Load) -> None:
    """Return when every partition has acknowledged ENOUGH more writes."""
    goals = {partition: len(load.acknowledged[partition]) + ENOUGH for partition in load.partitions}

    async def reached() -> bool:
        return all(len(load.acknowledged[partition]) >= goal for partition, goal in goals.items())

    await wait_until(reached, timeout_s=60, what=f"{ENOUGH} writes of each partition")


async def test_killed_node_loses_nothing_and_comes_back(cluster: Cluster) -> None:
    async def work(load: Load) -> None:
        leaders = await asyncio.to_thread(cluster.wait_led)
        node = sorted(leaders.values())[0]
        await asyncio.to_thread(cluster.kill, node)
        await wait_for_writes(load)
        await asyncio.to_thread(cluster.start_node, node)
        await asyncio.to_thread(cluster.wait_ready, node)

    await under_load(cluster, work)


async def test_clients_leave_a_node_that_stands_still(cluster: Cluster) -> None:
    async def work(load: Load) -> None:
        leaders = await asyncio.to_thread(cluster.wait_led)
        node = sorted(leaders.values())[-1]
        cluster.pause(node)
        try:
            await wait_for_writes(load)
        finally:
            cluster.resume(node)
        await asyncio.to_thread(cluster.wait_ready, node)

    await under_load(cluster, work)


@pytest.mark.parametrize("module", [blocking_client, blocking_watch, blocking_coordination])
def test_docstring_example_with_waiting_runs(cluster: Cluster, module: types.ModuleType) -> None:
    with Client(cluster.url) as client:
        for each in doctest.DocTestFinder().find(module):
            each.globs["client"] = client
            if any(example.options.pop(doctest.SKIP, False) for example in each.examples):
                assert doctest.DocTestRunner().run(each).failed == 0, each.name


def test_tree_is_loaded_and_verified_while_nodes_are_killed(cluster: Cluster) -> None:
    folder = Path(sysconfig.get_path("stdlib")) / "encodings"
    options = ["--data-dir", str(cluster.local.data_dir), "--json", "--timeout", "60", "--prefix", "tree/"]
    for verb, node in (("load-tree", "n1"), ("verify-tree", "n2")):
        command = [sys.executable, "-m", "kvstore", verb, str(folder), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            cluster.kill(node)
            out, _ = running.communicate(timeout=120)
        cluster.start_node(node)
        cluster.wait_ready(node)
        found = json.loads(out)
        assert (running.returncode, found["problems"]) == (0, [])
        assert found["files"] > 100
    with Client(cluster.url + PATIENT) as client:
        item = client.get(b"tree/__init__.py")
        assert item is not None
        assert item.value == (folder / "__init__.py").read_bytes()
