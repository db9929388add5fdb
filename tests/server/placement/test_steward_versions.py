"""How the steward handles the versions of servers and of the cluster (docs/protocol.md, Versions)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.meta import paths
from kvstore.meta.store import ensure_path
from kvstore.partition.election.ranking import Published
from kvstore.ring.replicas import begin_replacing, drain
from kvstore.server.cluster.cluster_version import ClusterVersion, ClusterVersionStore
from kvstore.server.placement.steward import LATELY_S
from kvstore.types import Seq, ServerId
from tests.meta.drivers import LaggingStore
from tests.ring.rings import new_ring
from tests.server.placement.stewards import N1, N2, N3, N4, P1, P2, World, looks
from tests.waiting import wait_until


# docs/protocol.md V1
async def test_version_rises_by_current_registrations(world: World) -> None:
    """The steward's knowledge of the servers may be old: one has returned to the previous release meanwhile."""
    versions = ClusterVersionStore(world.store)
    await world.store_ring()
    await ensure_path(world.store, paths.SERVERS)
    world.up = {each: replace(member, can=2) for each, member in world.up.items()}
    for each, member in world.up.items():
        said = replace(member, can=1 if each == N3 else 2)
        await world.store.create(paths.server(each), said.encode())
    steward = world.steward()
    await looks(steward)
    await looks(steward)
    assert (await versions.read()).version == 1
    await world.store.set(paths.server(N3), world.up[N3].encode(), -1)

    async def has_risen() -> bool:
        return (await versions.read()).version == 2

    await wait_until(has_risen, what="the version rises")


# docs/protocol.md V1
async def test_version_does_not_rise_by_lagging_metadata_server(world: World) -> None:
    """One server has returned to the previous release, which the lagging metadata server does not know yet."""
    world.store = store = LaggingStore()
    await world.store_ring()
    await ensure_path(store, paths.SERVERS)
    world.up = {each: replace(member, can=2) for each, member in world.up.items()}
    for each, member in world.up.items():
        await store.create(paths.server(each), member.encode())
    store.lag()
    await store.set(paths.server(N3), replace(world.up[N3], can=1).encode(), -1)
    await looks(world.steward())
    assert (await ClusterVersionStore(store).read()).version == 1


# docs/protocol.md V1
async def test_version_waits_for_replica_in_newer_ring(
    world: World,
) -> None:
    known = world.ring
    world.ring = new_ring([P1, P2], {ServerId("n9"): "", N1: "", N2: ""}, 3)
    await world.store_ring()
    world.ring = known
    await ensure_path(world.store, paths.SERVERS)
    world.up = {each: replace(member, can=2) for each, member in world.up.items()}
    for each, member in world.up.items():
        await world.store.create(paths.server(each), member.encode())
    await looks(world.steward())
    assert (await ClusterVersionStore(world.store).read()).version == 1


# docs/protocol.md V1
@pytest.mark.parametrize("who", ["a server", "a log"])
async def test_version_missing_in_older_metadata_is_restored(world: World, who: str) -> None:
    """Any server does this, not only the first by name: it may be the only one that knows."""
    store = ClusterVersionStore(world.store)
    await store.hold(True)
    steward = world.steward(N3, logs_at=2 if who == "a log" else 1)
    if who == "a server":
        world.known.found = ClusterVersion(2, "0.2.0")

    async def is_back() -> bool:
        return await store.read() == ClusterVersion(2, "0.2.0", True)

    await wait_until(is_back, what="the version is written back")
    await steward.close()
    assert steward.changes == 1


async def test_log_that_shows_a_rise_early_is_no_older_copy(world: World) -> None:
    await ClusterVersionStore(world.store).rise(2, "0.2.0")
    steward = world.steward(N3, logs_at=2)
    await looks(steward)
    await looks(steward)
    assert steward.changes == 0


# docs/protocol.md V1
async def test_rise_blocked_by_undecodable_znode_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.store_ring()
    await ensure_path(world.store, paths.SERVERS)
    world.up = {each: replace(member, can=2) for each, member in world.up.items()}
    for each, member in world.up.items():
        await world.store.create(paths.server(each), b"?" if each == N4 else member.encode())
    del world.up[N4]
    world.undecodable_servers = [N4]
    with caplog.at_level("INFO"):
        steward = world.steward()
        await looks(steward)
        await looks(steward)
    assert (await ClusterVersionStore(world.store).read()).version == 1
    said = [each.getMessage() for each in caplog.records if "the versions of n4 are unknown" in each.getMessage()]
    assert len(said) == 1, "once"
    assert steward._reader.undecodable_servers == [N4]
    await world.store.delete(paths.server(N4), -1)
    world.undecodable_servers = []

    async def has_risen() -> bool:
        return (await ClusterVersionStore(world.store).read()).version == 2

    await wait_until(has_risen, what="the version rises")
    assert steward._reader.undecodable_servers == []


# docs/protocol.md V1
async def test_restarting_server_counts_with_its_last_version(
    world: World,
) -> None:
    """It would not be admitted again, and its bookie would stay away with it."""
    await world.store_ring()
    await ensure_path(world.store, paths.SERVERS)
    world.up = {each: replace(member, can=1 if each == N4 else 2) for each, member in world.up.items()}
    for each in (N1, N2, N3):
        await world.store.create(paths.server(each), world.up[each].encode())
    steward = world.steward()
    await looks(steward)
    del world.up[N4]
    await looks(steward)
    await looks(steward)
    assert (await ClusterVersionStore(world.store).read()).version == 1
    world.clock.at += LATELY_S + 1

    async def has_risen() -> bool:
        return (await ClusterVersionStore(world.store).read()).version == 2

    await wait_until(has_risen, what="it has left")


# docs/protocol.md V2
async def test_server_below_cluster_version_gets_no_replica(world: World) -> None:
    world.up[N4] = replace(world.up[N4], can=1)
    world.up |= {each: replace(world.up[each], can=2) for each in (N1, N2, N3)}
    world.ring = drain(world.ring, N3)
    await ClusterVersionStore(world.store).rise(2, "0.2.0")
    steward = world.steward()
    world.known.found, world.known.stored = ClusterVersion(2, "0.2.0"), 2
    await looks(steward)
    await looks(steward)
    assert world.ring.version == drain(new_ring([P1, P2], dict.fromkeys((N1, N2, N3), ""), 3), N3).version
    world.ring = begin_replacing(world.ring, P1, N4, N3)
    await world.publish(P1, N4, 10)
    await world.publish(P1, N1, 10)

    async def is_given_up() -> bool:
        return not world.ring.partitions[P1].replacing and N4 not in world.ring.partitions[P1].replicas

    await wait_until(is_given_up, what="who came before the rise is let go")


# docs/protocol.md V4
async def test_stopped_newcomer_has_not_caught_up(world: World) -> None:
    world.ring = begin_replacing(drain(world.ring, N3), P1, N4, N3)
    await world.publish(P1, N1, 10)
    await ensure_path(world.store, paths.partition_replicas(P2))
    path = paths.partition_replica(P1, N4)
    stopped = Published(Seq(10), Seq(10), 1, "x", is_stopped=True)
    await world.store.create(path, stopped.encode(), ephemeral=True)
    steward = world.steward()
    await looks(steward)
    await looks(steward)
    assert world.ring.partitions[P1].replacing
    await world.store.set(path, replace(stopped, is_stopped=False).encode(), -1)

    async def has_replaced() -> bool:
        return N4 in world.ring.partitions[P1].replicas and not world.ring.partitions[P1].replacing

    await wait_until(has_replaced, what="it takes the other's place")
