"""The cluster's version in the metadata store, and which servers may run with it (docs/protocol.md, Versions)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvstore import versions
from kvstore.env import Env
from kvstore.env.real import real_env
from kvstore.errors import ClusterTooNew, MetadataUnavailable, UndecodableNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import ensure_path
from kvstore.server.cluster import version_follower
from kvstore.server.cluster.announcement import Announcement
from kvstore.server.cluster.cluster_version import ClusterVersion, ClusterVersionStore, decoded
from kvstore.server.cluster.topology import Member
from kvstore.server.cluster.version_follower import VersionFollower
from kvstore.types import ServerId
from tests.waiting import wait_until

N1 = ServerId("n1")


# docs/protocol.md V1
async def test_version_rises_and_never_falls() -> None:
    store = ClusterVersionStore(MemoryStore())
    assert await store.read() == ClusterVersion(1)
    assert await store.rise(3, "0.3.0") == ClusterVersion(3, "0.3.0")
    assert await store.rise(2, "0.2.0") == ClusterVersion(3, "0.3.0")
    assert await store.read() == ClusterVersion(3, "0.3.0")


async def test_held_version_does_not_rise() -> None:
    store = ClusterVersionStore(MemoryStore())
    await store.hold(True)
    assert (await store.rise(2, "0.2.0")).version == 1
    await store.hold(False)
    assert await store.rise(2, "0.2.0") == ClusterVersion(2, "0.2.0")


async def test_bytes_in_the_metadata_store() -> None:
    tree = MemoryStore()
    await ClusterVersionStore(tree).rise(2, "0.2.0")
    data, _ = await tree.get(paths.VERSION)
    assert data == b'{"format":1,"version":2,"release":"0.2.0","is_held":false}'
    assert decoded(data) == ClusterVersion(2, "0.2.0")
    with pytest.raises(UndecodableNode, match="format 2"):
        decoded(data.replace(b'"format":1', b'"format":2'))


# docs/protocol.md V2
async def test_server_does_not_start_when_cluster_version_is_too_high(env: Env) -> None:
    store = MemoryStore()
    too_high = versions.LATEST + 7
    await ClusterVersionStore(store).rise(too_high, "9.9.9")
    with pytest.raises(ClusterTooNew, match=rf"the cluster is at version {too_high}; install kvstore 9\.9\.9 or later"):
        await VersionFollower(env, store, N1).open()


async def test_metadata_outage_is_logged_once(
    env: Env, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(version_follower, "RETRY_S", 0)
    follower, asked = VersionFollower(env, MemoryStore(), N1), list[None]()
    await follower.open()

    async def away() -> ClusterVersion:
        asked.append(None)
        raise MetadataUnavailable("the metadata session is SUSPENDED")

    async def is_asked_often() -> bool:
        return len(asked) > 5

    monkeypatch.setattr(follower._store, "read", away)
    with caplog.at_level(logging.INFO):
        follower.poll()
        await wait_until(is_asked_often, what="it is asked again and again")
    assert len([each for each in caplog.records if "cannot read the cluster version now" in each.message]) == 1
    await follower.close()


async def test_server_learns_of_a_rise(env: Env) -> None:
    store = MemoryStore()
    follower, told = VersionFollower(env, store, N1), list[int]()
    follower.on_rise(lambda: told.append(follower.cluster))
    await follower.open()
    assert follower.cluster == versions.FIRST
    await ClusterVersionStore(store).rise(versions.LATEST, versions.release_for(versions.LATEST))

    async def has_risen() -> bool:
        return follower.cluster == versions.LATEST

    await wait_until(has_risen, what="it is heard of")
    assert told == [versions.LATEST]
    await follower.close()


async def test_server_ends_when_cluster_rises_beyond_it(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    env = real_env(tmp_path, on_error=lambda _, error: errors.append(error))
    store = MemoryStore()
    follower = VersionFollower(env, store, N1, can=1)
    await follower.open()
    await ClusterVersionStore(store).rise(2, "0.2.0")

    async def has_ended() -> bool:
        return bool(errors)

    await wait_until(has_ended, what="the error ends the process")
    assert isinstance(errors[0], ClusterTooNew)
    await follower.close()
    await env.nursery.close()


def test_server_of_first_release_states_no_version() -> None:
    said = b'{"format":1,"id":"n1","resp":"a:1","grpc":"","http":"","bookie":"","zone":"","roles":[],"version":"0.1.0"}'
    assert Member.decode(said).can == versions.FIRST
    assert Member.decode(Member(id="n1", resp="a:1", can=2).encode()).can == 2


# docs/protocol.md V2
async def test_server_rereads_version_once_it_is_registered(env: Env) -> None:
    """Until then no rise waits for it, however long that takes."""
    tree, placed = MemoryTree(), list[str]()
    other, own = MemoryStore(tree), MemoryStore(tree)
    await ensure_path(other, paths.SERVERS)
    another = Member(id="n1", resp="elsewhere:1")
    await other.create(paths.server(N1), another.encode(), ephemeral=True)
    announcement = Announcement(own, Member(id="n1", resp="here:1", can=2, starting=True))
    announcement.on_placed = lambda: placed.append(announcement.member.resp)
    publishing = env.nursery.spawn(announcement.publish(env.nursery), name="publish")
    for _ in range(20):
        await asyncio.sleep(0)
    assert placed == []
    assert not publishing.done(), "the other process has its place (H12)"
    await other.close()

    async def is_placed() -> bool:
        return placed == ["here:1"]

    await wait_until(is_placed, what="it is announced")
    await announcement.announce_up()
    assert not Member.decode((await own.get(paths.server(N1)))[0]).starting
    assert placed == ["here:1"] * 2
