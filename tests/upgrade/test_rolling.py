"""Real processes: a cluster of the last release is upgraded node by node, rolled back, and upgraded again. Meanwhile it
is under load that a checker of linearizability judges, with a move and a snapshot between different versions
(docs/protocol.md, Versions)."""

from __future__ import annotations

import asyncio
import compileall
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import ResponseError

from kvstore import versions
from kvstore.client import AsyncClient
from kvstore.client.pinned.pins import pin_store, unpin
from kvstore.client.pinned.read import read_pinned
from kvstore.devcluster.layout import NodePlace
from kvstore.errors import NotYetRaised
from kvstore.ring import MURMUR3, SLOTS_HASH, Ring, encode, new_ring
from kvstore.ring.hashing import SLOTS, KeyHash, KeyHashName
from kvstore.server.app import VERSION
from kvstore.spark.snapshots import verify
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.types import PartitionId, ServerId
from loadtest.drills.ring_load import RingLoad
from loadtest.drills.ring_stage import PROBLEMS, RingStage
from loadtest.drills.stage import Report
from tests.cluster.harness import Cluster
from tests.spark.snapshots.taken import rows_of
from tests.upgrade import base
from tests.waiting import wait_until, wait_until_blocking

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEYS, VALUE_BYTES = 1_000, 100
TOGETHER = [b"together%d" % number for number in range(20)]
REST_S = 0.25
"""Pause of a caller between two operations, because restarting nodes need the processors, too."""


class Releases:
    """A cluster whose nodes each run this tree or the last release from their next start on."""

    def __init__(self, directory: Path) -> None:
        self.cluster = Cluster(directory, partitions=1, key_hash=KeyHashName.MURMUR3)
        self._tree = base.check_out(directory / "release")
        compileall.compile_dir(self._tree, quiet=1)  # otherwise each of three starting nodes does it
        self._old = {"n1", "n2", "n3"}
        self._command: Callable[[NodePlace], list[str]] = self.cluster.local._command
        self.cluster.local._command = self._command_of  # type: ignore[method-assign]

    def _command_of(self, node: NodePlace) -> list[str]:
        command = self._command(node)
        if node.id not in self._old:
            return command
        python, *words = command
        return ["/usr/bin/env", f"PYTHONPATH={self._tree}", python, "-P", *words]  # -P: not this directory's

    async def restart(self, node: str, *, old: bool = False) -> None:
        """Stop a node cleanly, and start it as the release or as this tree. Return once all is served."""
        (self._old.add if old else self._old.discard)(node)
        cluster = self.cluster
        await asyncio.to_thread(cluster.terminate, node)
        await asyncio.to_thread(cluster.start_node, node)
        await asyncio.to_thread(cluster.wait_ready, node)
        assert (await asyncio.to_thread(self.status, node))["version"] == (base.RELEASE if old else VERSION)

    def status(self, node: str) -> dict[str, Any]:
        """Return the node's status page. Retry if it does not arrive in time."""
        found: dict[str, Any] = {}

        def has_come() -> bool:
            with suppress(OSError):
                found.update(self.cluster.status(node))
            return bool(found)

        wait_until_blocking(has_come, what=f"the status of {node}")
        return found

    def log_versions(self) -> set[int | None]:
        """Return the cluster versions in which replicas find their logs written; None: a node does not know."""
        tables = [self.status(node)["partitions"] for node in self.cluster.ids]
        return {replica.get("log_version") for table in tables for replica in table.values()}


async def version(stage: RingStage, *words: str) -> Any:
    """Return the output of an operator's command."""
    code, document = await stage.command("cluster", "version", *words)
    assert code == 0
    return document


async def waits_for(stage: RingStage, why: str) -> Any:
    """Return the version status once the version waits for this first. Before, reports of a node may be late, or it may
    be absent for a moment."""
    said: Any = None

    async def is_said() -> bool:
        nonlocal said
        said = await version(stage)
        return str(said["waits_for"]).startswith(why)

    try:
        await wait_until(is_said, what=f"that it waits for: {why}")
    except TimeoutError as error:
        raise AssertionError(f"{error}; it says {said}") from None
    return said


@asynccontextmanager
async def under_load(stage: RingStage, planned: list[Any], *, least: int) -> AsyncIterator[RingLoad]:
    """Run the block under load in these ranges, and judge all answers. `least` is the number of operations without
    which there was no load."""
    async with AsyncClient(stage.cluster.url) as client:
        load = RingLoad(client, stage.statics, 1, pause_s=REST_S)
        load.aim(planned)
        await load.start()
        try:
            yield load
        finally:
            await load.stop()
        problems = await stage.judge(load)
    assert {what: problems[what] for what in PROBLEMS} == dict.fromkeys(PROBLEMS, 0)
    assert len(load.waits) > least, "it was under load"


def read_all(url: str) -> dict[bytes, tuple[str, bytes]]:
    """Return the statics of the whole store at one moment: the partition that has each, and its value."""
    store = pin_store(url, ttl_s=60)
    try:
        assert store.hash is MURMUR3, "another key hash would move every key"
        pages = ((split, page) for split in store.splits() for page in read_pinned(split, prefix=b"static"))
        return {row.key: (split.partition, row.value) for split, page in pages for row in page.rows()}
    finally:
        unpin(url, store.id)


def placed(ring: Ring, statics: dict[bytes, bytes]) -> dict[bytes, tuple[str, bytes]]:
    """Return the partition that murmur3 gives each static in this ring, and its value."""
    return {key: (str(ring.owner_of(MURMUR3.token_of(key))), value) for key, value in statics.items()}


def check_redis_clients(cluster: Cluster) -> None:
    """Check that clients of Redis Cluster, which compute slots, reach every key. No table of slots can be true: the one
    that they get divides the slots among the nodes, and each node executes every command."""
    table = sorted(cluster.redis("n1").cluster("SLOTS"))
    assert [first for first, *_ in table] == [0, *(last + 1 for _, last, *_ in table[:-1])]
    assert table[-1][1] == SLOTS - 1
    assert {primary[1] for _, _, primary, *_ in table} == {cluster.address(node, "resp")[1] for node in cluster.ids}
    for node in cluster.ids:
        plain = cluster.redis(node)
        assert plain.info("cluster")["cluster_enabled"] == 0
        with pytest.raises(ResponseError, match="expected the key hash slots, got murmur3"):
            plain.cluster("COUNTKEYSINSLOT", 1)
    keys = {f"redis{number}": b"%d" % number for number in range(60)}
    with RedisCluster(startup_nodes=[ClusterNode(*cluster.address("n1", "resp"))]) as client:
        for key, value in keys.items():
            assert client.set(key, value)
    with RedisCluster(startup_nodes=[ClusterNode(*cluster.address("n2", "resp"))]) as client:
        assert {key: client.get(key) for key in keys} == keys
    assert cluster.redis("n3").mget(list(keys)) == list(keys.values()), "no plain client is redirected"


async def write_together(cluster: Cluster) -> None:
    """Write keys of all partitions in one transaction. Raises NotYetRaised, and then nothing is written."""
    async with AsyncClient(cluster.url) as client:
        try:
            async with client.transaction() as txn:
                for key in TOGETHER:
                    txn.put(key, b"1")
        except NotYetRaised:
            assert await client.get_many(TOGETHER) == {}
            raise
        found = await client.get_many(TOGETHER)
        assert {key: each.value for key, each in found.items()} == dict.fromkeys(TOGETHER, b"1")


async def snapshot(stage: RingStage, directory: Path) -> dict[bytes, bytes]:
    """Return the statics of a snapshot that the operators' command takes. The snapshot needs no Spark: its reads of
    nodes of two releases are the same with and without Spark."""
    code, _ = await stage.command("snapshot", "create", "--to", str(directory), "--nice", "0", "--master", "none")
    assert code == 0
    store = DirectoryStore(directory)
    manifest = store.newest()
    assert list(verify.problems_of(store, [manifest])) == []
    return {row["key"]: row["value"] for row in rows_of(store, manifest) if row["key"].startswith(b"static")}


# docs/protocol.md V1, V3, V4
async def test_last_release_is_upgraded_and_downgraded_under_load(tmp_path: Path) -> None:
    releases = Releases(tmp_path)
    cluster = releases.cluster
    try:
        await asyncio.to_thread(cluster.start)
        assert {releases.status(node)["version"] for node in cluster.ids} == {base.RELEASE}
        stage = RingStage(cluster, Report(), keys=KEYS, value_bytes=VALUE_BYTES, seed=1)
        await stage.fill()
        planned = await stage.plan("add", "--count", "1")
        async with under_load(stage, planned, least=1_000) as load:
            await releases.restart("n1")
            await stage.change("add", "--count", "1")
            await stage.moved(load)
            founded = await stage._ring()
            await releases.restart("n2")
            async with asyncio.TaskGroup() as meanwhile:
                taken = meanwhile.create_task(snapshot(stage, tmp_path / "snapshots"))
                await releases.restart("n2", old=True)
                await releases.restart("n2")
            assert taken.result() == stage.statics
            assert releases.log_versions() == {None, versions.FIRST}, "n3 could not read what a later version writes"
            with pytest.raises(NotYetRaised, match="upgrade all servers to"):
                await write_together(cluster)
            await version(stage, "--hold")
            await waits_for(stage, "n3 cannot do it yet")
            await releases.restart("n3")
            held = await waits_for(stage, "it is held")
            assert (held["version"], held["held"]) == (versions.FIRST, True), "so long any node can go back"
            await version(stage, "--rise")

            async def risen() -> bool:
                return releases.log_versions() == {versions.LATEST}

            await wait_until(risen, timeout_s=60, what="the cluster's version rises, and each log follows it")
            upgraded = await stage._ring()
            assert (upgraded.hash, upgraded.tokens) == (MURMUR3, founded.tokens)
            await write_together(cluster)
            assert await asyncio.to_thread(read_all, cluster.url) == placed(founded, stage.statics)
            await asyncio.to_thread(check_redis_clients, cluster)
        async with under_load(stage, await stage.plan("add", "--count", "1"), least=100) as load:
            await stage.change("add", "--count", "1")
            await stage.moved(load)
        grown = await stage._ring()
        assert (grown.hash, len(grown.owners)) == (MURMUR3, 3)
        assert await asyncio.to_thread(read_all, cluster.url) == placed(grown, stage.statics)
    finally:
        await asyncio.to_thread(cluster.end)


def test_missing_release_commit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of the tree, or a clone without its history, must not pass: the upgrade was not made."""
    subprocess.run(["git", "init", "-q", str(tmp_path / "clone")], check=True)
    for root in (tmp_path, tmp_path / "clone"):
        monkeypatch.setattr(base, "ROOT", root)
        with pytest.raises(
            base.NoHistory, match=rf"expected revision {base.REVISION} \(release {base.RELEASE}\).* --unshallow"
        ):
            base.check_out(tmp_path / "release")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(base.NoHistory, match=r"expected revision .*: 'git'; clone"):
        base.check_out(tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_release_refuses_a_ring_of_slots_by_its_format(tmp_path: Path) -> None:
    tree = base.check_out(tmp_path)
    script = "import sys; from kvstore.ring import decode; print(decode(sys.stdin.buffer.read()).version)"

    def decoded(hash: KeyHash) -> tuple[str, str]:
        document = encode(new_ring([PartitionId("p1")], {ServerId("n1"): ""}, 1, hash))
        command = ["/usr/bin/env", f"PYTHONPATH={tree}", sys.executable, "-P", "-c", script]
        done = subprocess.run(command, input=document, capture_output=True, check=False)
        return done.stdout.decode().strip(), done.stderr.decode().strip().rpartition("\n")[2]

    assert decoded(MURMUR3) == ("1", "")
    read, error = decoded(SLOTS_HASH)
    assert (read, error.endswith("got 3")) == ("", True), error


def test_release_tree_differs_from_this_tree(tmp_path: Path) -> None:
    tree = base.check_out(tmp_path)
    assert not (tree / "kvstore" / "versions.py").exists()
    assert sys.version_info >= (3, 11), "for python -P"
