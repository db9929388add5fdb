"""No file of any node can grow, although bytes and inodes are free: no process ends, no acknowledged write is lost, and
writes continue by themselves once files can grow again. Real processes, on a real file system."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import redis

from kvstore.client import Client, Level
from tests import forked
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.unfit.quota import Quota, compiler_or_none, file_sizes_limited
from tests.commands import kvstore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SMALL = ("storage.segment_bytes=4194304", "partition.write_buffer_bytes=1048576", "partition.flush_s=2")
VALUE = "v" * 20_000
FILE_BYTES = 4096
REASONS = {"EDQUOT": "the disk quota is exceeded", "EFBIG": "a file would exceed the largest size allowed"}


class Writes:
    """Writes keys of its own through each node, and records the acknowledged writes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.acknowledged: dict[str, str] = {}
        self.failed = 0

    def run(self, over: threading.Event, node: str) -> None:
        client, number = self._cluster.redis(node), 0
        while not over.wait(0.005):
            key, value = f"{node}-{number}", f"{number}{VALUE}"
            try:
                client.set(key, value)
            except redis.RedisError:
                self.failed += 1
            else:
                self.acknowledged[key] = value
            number += 1


@pytest.fixture(scope="module", params=["EDQUOT", "EFBIG"])
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, str, Quota | None]]:
    home, quota = tmp_path_factory.mktemp("quota"), None
    if request.param == "EDQUOT":
        if compiler_or_none() is None:
            pytest.skip("no C compiler")
        quota = Quota(home, f"{home}/data/n")
    with pytest.MonkeyPatch.context() as patch:
        if quota is not None:
            patch.setattr(forked, "fits", lambda _command: False)
            for name, value in quota.environ.items():
                patch.setenv(name, value)
        with running_cluster(home, settings=SMALL) as cluster:
            for name in quota.environ if quota is not None else ():
                patch.delenv(name)
            yield cluster, request.param, quota


# docs/protocol.md B9, B39 and P46
def test_nodes_continue_once_their_files_can_grow_again(setting: tuple[Cluster, str, Quota | None]) -> None:
    cluster, kind, quota = setting
    pids = [cluster.pid(node) for node in cluster.ids]
    writes = Writes(cluster)
    with beside(*(partial(writes.run, node=node) for node in cluster.ids)):
        cluster.wait_until(lambda: len(writes.acknowledged) > 200, "writes")
        limited: AbstractContextManager[None] = (
            file_sizes_limited(pids, FILE_BYTES) if quota is None else quota.exceeded()
        )
        with limited:
            before = dict(writes.acknowledged)
            cluster.wait_until(lambda: _findings_with(cluster, REASONS[kind]), "status names the reason")
            cluster.wait_until(lambda: writes.failed > 3, "writes fail")
            written = len(writes.acknowledged)
            cluster.wait_until(lambda: writes.failed > 12, "writes fail for a while")
            _read_stale(cluster, list(before)[:20])
            assert [cluster.pid(node) for node in cluster.ids if cluster.is_running(node)] == pids, (
                "no process has ended"
            )
        cluster.wait_until(lambda: len(writes.acknowledged) > written + 200, "writes go on")
        cluster.wait_ready()
        cluster.wait_until(lambda: not _findings_with(cluster, REASONS[kind]), "status names it no more")
    client = cluster.redis("n1")
    lost = [key for key, value in writes.acknowledged.items() if client.get(key) != value.encode()]
    assert lost == []
    assert [cluster.pid(node) for node in cluster.ids if cluster.is_running(node)] == pids, "no process has ended"


def _findings_with(cluster: Cluster, reason: str) -> list[str]:
    said = json.loads(kvstore("status", "--json", "--server", cluster.file.node("n2").grpc).stdout)
    return [each["code"] for each in said.get("findings", ()) if reason in each["reason"]]


def _read_stale(cluster: Cluster, keys: list[str]) -> None:
    """Read from any replica."""
    with Client(cluster.url) as client:
        for key in keys:
            assert client.get(key.encode(), level=Level.STALE) is not None
