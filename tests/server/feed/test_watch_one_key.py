"""Watches of one key whose positions also name partitions that do not own the key."""

# docs/protocol.md F4
from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.partition.state.changes import Interest
from kvstore.partition.state.move_records import Own, Release
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.hashing import MURMUR3
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.server.feed.world import World, owned_by

AT = Position(LedgerId(1), EntryId(0))
BOTH_WAYS = pytest.mark.parametrize(("owner", "other"), [("p1", "p2"), ("p2", "p1")])


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World.open(tmp_path, "p1", "p2") as made:
        yield made


def hand(world: World, key: bytes, source: str, target: str) -> None:
    """Move the key to another partition."""
    token = MURMUR3.token_of(key)
    span, old, new = TokenSpan(token, token), world.logs[source], world.logs[target]
    old.record(Release(1, AT, 1, PartitionId(target), span))
    new.record(Own(1, AT, AT, old.seq, old.time_ms, PartitionId(source), span))


@BOTH_WAYS
async def test_key_is_followed_to_a_named_partition(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: str, other: str
) -> None:
    """The feed of a busy partition is still followed when the key moves there. It ended at its next idle moment, and
    the watch reported nothing any more."""
    key, found = owned_by(world.ring, owner), world.feeds.end

    async def busy(partition: PartitionId) -> None:
        raise Unavailable(f"{partition}: entries follow faster than the end is found")

    monkeypatch.setattr(world.feeds, "end", busy)
    following = await world.watch(Interest(key, key + b"\0"), of=key, after={"p1": 0, "p2": 0})
    hand(world, key, owner, other)
    await world.settle()
    monkeypatch.setattr(world.feeds, "end", found)
    world.join("p3")
    world.feeds.read_ring()  # wakes the watch, which may end feeds now
    await world.settle()
    world.logs[other].put((key, b"1"))
    assert [each.partition for each in await following.take(1)] == [other]


@BOTH_WAYS
async def test_key_that_came_back_after_the_positions_is_followed(world: World, owner: str, other: str) -> None:
    """The owner was idle after it had released the key, so its RELEASE is read again at the position. If the other
    partition's feed had ended before that, the watch followed nothing any more."""
    key = owned_by(world.ring, owner)
    world.logs[owner].put((key, b"1"))
    hand(world, key, owner, other)
    world.logs[other].put((key, b"2"))
    after = {each: world.logs[each].seq for each in ("p1", "p2")}
    hand(world, key, other, owner)
    following = await world.watch(Interest(key, key + b"\0"), of=key, after=after)
    world.logs[owner].put((key, b"3"))
    assert [each.partition for each in await following.take(1)] == [owner]
