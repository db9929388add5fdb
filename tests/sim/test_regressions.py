"""What simulated runs have found, each as the shortest story that shows it."""

from __future__ import annotations

import pytest

from kvstore.meta.cookies import Cookie
from kvstore.meta.layout import LayoutManager
from kvstore.meta.registration import RegistrationManager
from kvstore.types import BookieId
from tests.sim.env import SimWorld
from tests.sim.metadata import MetadataConfig, SimMetadata

pytestmark = pytest.mark.sim

LAGGING = MetadataConfig(lag_s=(5.0, 5.0), slow_p=0.0, followers=8)


def test_a_node_that_starts_right_after_the_founding_sees_its_cluster() -> None:
    """It read from a follower that lagged, and refused to start because there was no cluster."""
    with SimWorld(1) as world:
        metadata = SimMetadata(world.loop, world.fork("metadata"), LAGGING)

        async def story() -> None:
            await LayoutManager(await metadata.connect()).ensure("cluster")
            for _ in range(8):
                assert await LayoutManager(await metadata.connect()).instance_id() == "cluster"

        world.run(story())


def test_a_bookie_that_restarts_at_once_reads_its_newest_cookie() -> None:
    """From the version as of a moment ago it concluded that its directory was an old copy, and doubted every ledger."""
    cookie = Cookie(
        bookie=BookieId("n1-a"), journal_dirs=("j",), ledger_dirs=("j",), index_dirs=("i",), instance_id="cluster"
    )
    with SimWorld(1) as world:
        metadata = SimMetadata(world.loop, world.fork("metadata"), LAGGING)

        async def story() -> None:
            first = RegistrationManager(await metadata.connect())
            version = await first.write_cookie(cookie, await first.write_cookie(cookie, None))
            for _ in range(8):
                assert await RegistrationManager(await metadata.connect()).read_cookie(cookie.bookie) == (
                    cookie,
                    version,
                )

        world.run(story())
