"""A real ZooKeeper for tests: `from tests.zookeeper_fixture import zookeeper, zookeeper_chroot` in a conftest or a test
module.

Mark the tests that use it with needs_zookeeper. One server serves the whole test run; tests keep apart by their
chroots. Tests that kill or pause a server start one of their own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.devcluster.zookeeper import ZooKeeperProcess, start_standalone
from tests.zookeeper_classes import use_archive

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of a server that is started once."""
    use_archive()
    process = start_standalone(tmp_path_factory.mktemp("zookeeper"))
    yield process.address
    process.kill()


@pytest.fixture
def zookeeper_chroot(zookeeper: str) -> str:
    """`host:port/chroot` with a chroot that no other test has."""
    return f"{zookeeper}/test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def own_zookeeper(tmp_path: Path) -> Iterator[ZooKeeperProcess]:
    """A server of this test's own, to be killed, paused and restarted."""
    use_archive()
    process = start_standalone(tmp_path / "zookeeper")
    yield process
    process.kill()
