"""Every test here that asks for a `driver` or a `store` runs on each driver of the metadata store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.meta.store import MetadataStore
from tests.meta.drivers import Driver, MemoryDriver


@pytest.fixture(params=["memory"])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    driver = MemoryDriver()
    yield driver
    await driver.close()


@pytest.fixture
async def store(driver: Driver) -> MetadataStore:
    return await driver.connect()


@pytest.fixture
async def other(driver: Driver) -> MetadataStore:
    """A second session with the same store."""
    return await driver.connect()
