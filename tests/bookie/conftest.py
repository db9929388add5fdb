"""Fixtures shared by the bookie's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bookie.support import FAST
from tests.sim.world.env import SimWorld


@pytest.fixture
def world(seed: int) -> Iterator[SimWorld]:
    with SimWorld(seed, disk=FAST) as world:
        yield world
