"""Real processes: partitions join while clients read and write, and every answer is checked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import orjson
import pytest

from kvstore.client import AsyncClient
from kvstore.errors import ConditionFailed, OutcomeUnknown, Refused, StoreError
from tests.cluster.harness import Cluster, running_cluster
from tests.sim.history import History, Kind
from tests.sim.versions import check_versions

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

KEYS = [b"key%d" % number for number in range(64)]
COUNTERS = [b"counter%d" % number for number in range(16)]
STATIC = {b"static%d" % number: b"%d" % number * 20 for number in range(3000)}
WORKERS = 12


class Load:
    """Workers that do one thing at a time, each under a new name once it got an answer that says nothing."""

    def __init__(self, client: AsyncClient) -> None:
        self.history = History(time.monotonic)
        self.counted: dict[bytes, list[int]] = {key: [] for key in COUNTERS}
        self.unknown: dict[bytes, int] = dict.fromkeys(COUNTERS, 0)
        self.longest_s: dict[str, float] = {"read": 0.0, "write": 0.0}
        self.lost: list[bytes] = []
        self._client = client
        self._names = count()
        self._over = False
        self._tasks = [asyncio.create_task(self._work(Random(seed))) for seed in range(WORKERS)]

    async def stop(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _work(self, random: Random) -> None:
        name = f"w{next(self._names)}"
        while not self._over:
            began = time.monotonic()
            kind = random.choices(("get", "put", "delete", "create", "count", "static"), (35, 30, 8, 7, 15, 5))[0]
            if kind == "static":
                key = random.choice(list(STATIC))
                item = await self._client.get(key)
                if item is None or item.value != STATIC[key]:
                    self.lost.append(key)
            elif kind == "count":
                await self._count(random.choice(COUNTERS))
            elif not await self._do(kind, random.choice(KEYS), name, random):
                name = f"w{next(self._names)}"
            what = "read" if kind in ("get", "static") else "write"
            self.longest_s[what] = max(self.longest_s[what], time.monotonic() - began)

    async def _count(self, key: bytes) -> None:
        try:
            self.counted[key].append(await self._client.increment(key))
        except OutcomeUnknown:
            self.unknown[key] += 1
        except Refused:
            return

    async def _do(self, kind: str, key: bytes, name: str, random: Random) -> bool:
        """Whether the outcome is known."""
        value = b"%s-%d" % (name.encode(), random.getrandbits(60))
        kinds = {"get": Kind.GET, "put": Kind.PUT, "delete": Kind.DEL, "create": Kind.CAS}
        pending = self.history.begin(name, kinds[kind], key, value if kind in ("put", "create") else None)
        try:
            if kind == "get":
                item = await self._client.get(key)
                pending.ok(None if item is None else item.value, version=None if item is None else item.version)
            elif kind == "delete":
                pending.ok(version=await self._client.delete(key) or None)
            else:
                pending.ok(version=await self._client.put(key, value, if_absent=kind == "create"))
        except ConditionFailed as error:
            pending.fail(condition_failed=True, version=error.version or None)
        except Refused:
            pending.fail()
        except StoreError:
            pending.info()
            return False
        return True


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, partitions=1) as cluster:
        yield cluster


async def kvstore(cluster: Cluster, *words: str) -> bytes:
    """What the command prints. Raises AssertionError if it fails."""
    place = str(cluster.directory / "data")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvstore", *words, "--data-dir", place, stdout=-1, stderr=-1
    )
    printed, errors = await process.communicate()
    assert process.returncode == 0, f"{words}: {errors.decode()}{printed.decode()}"
    return printed


async def test_one_partition_becomes_three_under_load(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url) as client:
        await client.put_many(STATIC)
        load = Load(client)
        try:
            await kvstore(cluster, "ring", "add", "p2", "p3", "--wait")
        finally:
            await load.stop()
        print(f"{len(load.history)} operations, longest waits {load.longest_s}")  # noqa: T201
        ring = orjson.loads(await kvstore(cluster, "ring", "show", "--json"))
        assert sorted(each["id"] for each in ring["partitions"]) == ["p1", "p2", "p3"]
        assert all(0.3 < each["share"] < 0.37 for each in ring["partitions"])
        await judge(load, client)


async def judge(load: Load, client: AsyncClient) -> None:
    assert load.lost == []
    found = {key: item.value async for key, item in client.scan(prefix=b"static")}
    assert found == STATIC
    for key, counted in load.counted.items():
        assert len(counted) == len(set(counted)), f"{key!r}: counted twice"
        item = await client.get(key)
        stored = 0 if item is None else int(item.value)
        assert len(counted) <= stored <= len(counted) + load.unknown[key], key
    load.history.close()
    load.history.require(1000)
    check_versions(load.history)


async def test_partitions_join_while_leaders_are_killed(cluster: Cluster) -> None:
    """kill -9 of the node that leads the source, then of one that leads a target."""
    async with AsyncClient(cluster.url) as client:
        await client.put_many(STATIC)
        load = Load(client)
        try:
            await kvstore(cluster, "ring", "throttle", "--mib-per-s", "0.004", "--parallel", "1")
            await kvstore(cluster, "ring", "add", "p2", "p3")
            for partition in ("p1", "p2"):
                await asyncio.to_thread(cluster.wait_until, lambda p=partition: p in cluster.leaders(), "a leader")
                node = cluster.leaders()[partition]
                await asyncio.to_thread(cluster.kill, node)
                await asyncio.to_thread(cluster.start_node, node)
                await asyncio.to_thread(cluster.wait_ready, node)
            moves = orjson.loads(await kvstore(cluster, "ring", "status", "--json"))
            assert moves["moves"], "all was over before anybody was killed"
            await kvstore(cluster, "ring", "throttle", "--mib-per-s", "0", "--parallel", "2")
            await asyncio.to_thread(cluster.wait_until, lambda: not open_moves(cluster), "no move is open", 120)
        finally:
            await load.stop()
        print(f"{len(load.history)} operations, longest waits {load.longest_s}")  # noqa: T201
        await judge(load, client)


def open_moves(cluster: Cluster) -> bool:
    words = [sys.executable, "-m", "kvstore", "ring", "status", "--json", "--data-dir", str(cluster.directory / "data")]
    done = subprocess.run(words, capture_output=True, check=True)
    return bool(orjson.loads(done.stdout)["moves"])
