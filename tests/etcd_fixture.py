"""A real etcd for tests, as zookeeper_fixture.py has a real ZooKeeper. Mark the tests that use it with needs_etcd."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.devcluster.etcd import EtcdProcess, find_running, start_standalone

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of a server that is started once."""
    process = start_standalone(tmp_path_factory.mktemp("etcd"))
    yield process.address
    process.kill()


@pytest.fixture
def etcd_prefix(etcd: str) -> str:
    """`host:port/prefix` with a prefix that no other test has."""
    return f"{etcd}/test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """A server of this test's own, to be killed, paused and restarted."""
    process = start_standalone(tmp_path / "etcd")
    yield process
    running = find_running(process.directory)
    if running is not None:
        running.kill()
