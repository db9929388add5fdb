"""Bugs that simulated runs have found, each as the shortest story that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvstore.errors import NotEnoughBookies, StoreError, Unavailable
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.layout import LayoutStore
from kvstore.partition.election.replica import Replica
from kvstore.types import BookieId, PartitionId, Position, Seq
from tests.partition import one_partition
from tests.sim.ledgers_and_logs.ledgers import LedgerCluster, Writer, make_root
from tests.sim.world.env import SimWorld
from tests.sim.world.metadata import MetadataConfig, SimMetadata

pytestmark = pytest.mark.sim

P = PartitionId("p1")
LAGGING = MetadataConfig(lag_s=(5.0, 5.0), slow_p=0.0, followers=8)


def test_node_started_right_after_cluster_creation_sees_its_cluster() -> None:
    """It read from a lagging follower and refused to start because there was no cluster."""
    with SimWorld(1) as world:
        metadata = SimMetadata(world.loop, world.fork("metadata"), LAGGING)

        async def story() -> None:
            await LayoutStore(await metadata.connect()).ensure("cluster")
            for _ in range(8):
                assert await LayoutStore(await metadata.connect()).instance_id() == "cluster"

        world.run(story())


def test_bookie_restarted_at_once_reads_its_newest_cookie() -> None:
    """From a stale version of the cookie it concluded that its directory was an old copy, and distrusted every
    ledger."""
    cookie = Cookie(
        bookie=BookieId("n1-a"), journal_dirs=("j",), ledger_dirs=("j",), index_dirs=("i",), instance_id="cluster"
    )
    with SimWorld(1) as world:
        metadata = SimMetadata(world.loop, world.fork("metadata"), LAGGING)

        async def story() -> None:
            first = CookieStore(await metadata.connect())
            version = await first.write(cookie, await first.write(cookie, None))
            for _ in range(8):
                assert await CookieStore(await metadata.connect()).read(cookie.bookie) == (
                    cookie,
                    version,
                )

        world.run(story())


def test_owner_is_woken_however_little_time_is_left() -> None:
    """The remaining time was below the resolution of the loop's clock. The timer fired at once and the owner set
    another one, forever."""
    with SimWorld(1) as world:
        ticks: list[float] = []

        async def story() -> None:
            env = world.env("n1")
            await asyncio.sleep(100.0)
            waker = SimpleNamespace(_env=env, _feed=lambda _tick: ticks.append(env.clock.now()))
            asked = env.clock.now() + 1e-15
            Replica._wake_at(waker, asked)  # type: ignore[arg-type]
            await asyncio.sleep(1.0)
            assert len(ticks) == 1
            assert ticks[0] > asked

        world.run(story())


@pytest.fixture
def partition() -> Iterator[one_partition.Partition]:
    made = one_partition.Partition()
    yield made
    one_partition.MADE.clear()
    made.loop.close()


def test_leader_asked_to_stop_before_it_serves_never_serves(partition: one_partition.Partition) -> None:
    """The leader logged its release record, then its epoch start was acknowledged and it served. Writes that it
    acknowledged while the ledger was being closed were lost."""
    started = partition.loop.create_task(partition.leader.start())
    partition.settle()
    released = partition.loop.create_task(partition.leader.release())
    partition.settle()
    partition.acknowledge(len(partition.log.in_flight))
    assert isinstance(released.exception(), Unavailable)
    assert started.exception() is not None
    assert not partition.leader.serving
    assert partition.sent_kinds() == []


def test_closing_log_takes_no_more_appends() -> None:
    """Entries appended between the last acknowledgement and the close were acknowledged, but the close cut them off."""
    with LedgerCluster(1) as cluster:
        make_root(cluster.tree)

        async def story(writer: Writer) -> None:
            log = await writer.logs.open_as_leader(P, 0, lambda: Seq(1))
            results: list[tuple[Position | None, StoreError | None]] = []

            def done(position: Position | None, sent_at: float, error: StoreError | None) -> None:
                results.append((position, error))

            log.append(b"first", Seq(1), done)
            sealing = writer.env.nursery.spawn(log.seal(), name="seal")
            while not sealing.done():
                await asyncio.sleep(0.0001)
                if results:
                    log.append(b"late", Seq(2), done)
            await sealing
            (first, none), *late = results
            assert first == Position(log.handle.ledger, 0)
            assert none is None
            assert late
            assert all(isinstance(error, NotEnoughBookies) for _, error in late)

        async def run() -> None:
            cluster.start_all()
            await cluster.wait_up()
            await story(cluster.writers["n1"])

        cluster.run(run())
