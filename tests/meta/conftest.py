"""Every test here that asks for a `driver` or a `store` runs on each driver of the metadata store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.meta.store import MetadataStore
from tests.meta.drivers import Driver, MemoryDriver, SimDriver, TestNursery
from tests.zookeeper_fixture import own_zookeeper, zookeeper, zookeeper_chroot

__all__ = ["own_zookeeper", "zookeeper", "zookeeper_chroot"]


@pytest.fixture(params=["memory", "simulated", pytest.param("zookeeper", marks=pytest.mark.needs_zookeeper)])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    if request.param == "memory":
        driver: Driver = MemoryDriver()
    elif request.param == "simulated":
        driver = SimDriver()
    else:
        from tests.meta.zookeeper_driver import ZooKeeperDriver

        driver = ZooKeeperDriver(request.getfixturevalue("zookeeper_chroot"))
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
