"""Runs each test with a `driver` or a `store` on each driver of the metadata store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.meta.login import MetadataLogin
from kvstore.meta.store import MetadataStore
from tests.etcd_fixture import etcd, etcd_prefix, own_etcd
from tests.meta.drivers import Driver, MemoryDriver, SimDriver, TestNursery
from tests.zookeeper_fixture import own_zookeeper, zookeeper, zookeeper_chroot

__all__ = ["etcd", "etcd_prefix", "own_etcd", "own_zookeeper", "zookeeper", "zookeeper_chroot"]

DRIVERS = [
    *("memory", "simulated"),
    pytest.param("zookeeper", marks=pytest.mark.needs_zookeeper),
    pytest.param("zookeeper-acl", marks=pytest.mark.needs_zookeeper),
    pytest.param("etcd", marks=pytest.mark.needs_etcd),
]


@pytest.fixture(params=DRIVERS)
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    if request.param == "memory":
        driver: Driver = MemoryDriver()
    elif request.param == "simulated":
        driver = SimDriver()
    elif request.param == "etcd":
        from tests.meta.etcd.driver import EtcdDriver

        driver = EtcdDriver(request.getfixturevalue("etcd_prefix"))
    else:
        from tests.meta.zookeeper.driver import ZooKeeperDriver

        login = MetadataLogin("kvstore", b"s3cret") if request.param == "zookeeper-acl" else None
        driver = ZooKeeperDriver(request.getfixturevalue("zookeeper_chroot"), login)
    yield driver
    await driver.close()


@pytest.fixture
async def store(driver: Driver) -> MetadataStore:
    return await driver.connect()


@pytest.fixture
async def other(driver: Driver) -> MetadataStore:
    """A second session with the same store."""
    return await driver.connect()


@pytest.fixture
async def nursery() -> AsyncIterator[TestNursery]:
    nursery = TestNursery()
    yield nursery
    await nursery.close()
