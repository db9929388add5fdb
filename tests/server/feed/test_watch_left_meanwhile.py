"""Watches that continue after a partition joined and left in their reader's absence, and watches that had read it."""

# docs/protocol.md F3
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.errors import PositionTrimmed
from kvstore.partition.state.changes import Interest
from kvstore.partition.state.move_records import Own, Release
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import kv_pb2
from kvstore.ring.hashing import MURMUR3
from kvstore.server.feed import tail as feed_tail
from kvstore.server.feed.watch import send_watch
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.server.feed.world import World
from tests.waiting import PATIENCE_S

KEY = b"k"
AT = Position(LedgerId(1), EntryId(0))
SPAN = TokenSpan(MURMUR3.token_of(KEY), MURMUR3.token_of(KEY))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World.open(tmp_path, "p1", "p2") as made:
        yield made


def hand(world: World, source: str, target: str) -> None:
    """Move the key's range to another partition."""
    seq, time_ms = world.logs[source].seq, world.logs[source].time_ms
    world.logs[source].record(Release(1, AT, 1, PartitionId(target), SPAN))
    world.logs[target].time_ms = max(world.logs[target].time_ms, time_ms)
    world.logs[target].record(Own(1, AT, AT, seq, time_ms, PartitionId(source), SPAN))


def put(world: World, partition: str, *, own_keys: int = 0) -> None:
    """Write the key's next value, after some other writes to the partition."""
    log = world.logs[partition]
    log.time_ms += 1
    for _ in range(own_keys):
        log.put((b"of " + partition.encode(), b"x" * 1_000))
    log.put((KEY, b"v"))


def there_and_back(world: World, source: str, target: str, *, own_keys: int = 0) -> None:
    """Let p3 join, receive the range of `source`, pass it to `target` and leave. Each of them writes the key."""
    put(world, source, own_keys=own_keys)
    world.join("p3")
    hand(world, source, "p3")
    put(world, "p3")
    hand(world, "p3", target)
    put(world, target)
    world.leave("p3")


def lose_log(world: World, partition: str) -> None:
    log = world.logs[partition]
    log.entries.clear()
    log.ledgers.clear()


@pytest.mark.parametrize(("source", "target"), [("p1", "p2"), ("p2", "p1")])
@pytest.mark.parametrize("own_keys", [0, 1_000])
async def test_changes_of_partition_that_came_and_went_come_first(
    world: World, source: str, target: str, own_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_tail, "WINDOW_ENTRIES", 4)
    there_and_back(world, source, target, own_keys=own_keys)
    following = await world.watch(Interest(KEY, b"l"), after={"p1": 0, "p2": 0})
    shown = await following.take(3)
    assert [each.partition for each in shown] == [source, "p3", target]
    versions = [each.version for each in shown]
    assert versions == sorted(versions)


@pytest.mark.parametrize(("source", "target"), [("p1", "p2"), ("p2", "p1")])
async def test_changes_of_idle_source_are_not_lost(world: World, source: str, target: str) -> None:
    """The RELEASE is directly at the position: nothing states whether the reader has seen it."""
    put(world, source)
    idle_at = world.logs[source].seq
    world.join("p3")
    hand(world, source, "p3")
    put(world, "p3")
    hand(world, "p3", target)
    put(world, target)
    world.leave("p3")
    following = await world.watch(after={source: idle_at, target: 0})
    assert [each.partition for each in await following.take(2)] == ["p3", target]


async def test_two_intermediate_partitions_are_not_lost(world: World) -> None:
    put(world, "p1")
    world.join("p3")
    world.join("p4")
    hand(world, "p1", "p3")
    put(world, "p3")
    hand(world, "p3", "p4")
    put(world, "p4")
    hand(world, "p4", "p2")
    put(world, "p2")
    world.leave("p3")
    world.leave("p4")
    following = await world.watch(after={"p1": 1, "p2": 0})
    assert [each.partition for each in await following.take(3)] == ["p3", "p4", "p2"]


@pytest.mark.parametrize(("source", "target"), [("p1", "p2"), ("p2", "p1")])
async def test_single_key_waits_for_partition_that_came_and_went(world: World, source: str, target: str) -> None:
    there_and_back(world, source, target, own_keys=500)
    world.logs["p1"].put((b"other", b""))
    of_one_key = Interest(KEY, KEY + b"\0")
    following = await world.watch(of_one_key, of=KEY, after={"p1": 0, "p2": 0})
    shown = await following.take(3)
    assert [each.partition for each in shown] == [source, "p3", target]


# docs/protocol.md F2
@pytest.mark.parametrize(("source", "target"), [("p1", "p2"), ("p2", "p1")])
@pytest.mark.parametrize("is_log_gone", [False, True])
async def test_finished_partition_is_not_delivered_again(
    world: World, source: str, target: str, is_log_gone: bool
) -> None:
    """Its source was idle since it released the range: its RELEASE is read again at the position."""
    following = await world.watch(heartbeat_s=0.05)
    there_and_back(world, source, target)
    world.feeds.read_ring()
    assert [each.partition for each in await following.take(3)] == [source, "p3", target]
    had = {source: world.logs[source].seq, target: world.logs[target].seq}
    await following.wait_position(had)
    await following.close()
    if is_log_gone:
        lose_log(world, "p3")
    again = await world.watch(after=had)
    put(world, target)
    (change,) = await again.take(1)
    assert (change.partition, change.version) == (target, world.logs[target].seq)


@pytest.mark.parametrize(("source", "target"), [("p1", "p2"), ("p2", "p1")])
async def test_finished_partition_is_not_repeated_when_target_was_idle(world: World, source: str, target: str) -> None:
    """OWN, which did not raise the target's sequence, is read again at the position."""
    for _ in range(9):
        put(world, target)
    following = await world.watch(heartbeat_s=0.05)
    put(world, source)
    world.join("p3")
    hand(world, source, "p3")
    put(world, "p3")
    hand(world, "p3", target)
    world.leave("p3")
    world.feeds.read_ring()
    put(world, source)
    assert len(await following.take(3)) == 3
    had = {source: world.logs[source].seq, target: 9}
    await following.wait_position(had)
    again = await world.watch(after=had)
    put(world, target)
    (change,) = await again.take(1)
    assert (change.partition, change.version) == (target, 10)


async def test_position_names_partition_before_passing_release_to_it(world: World) -> None:
    """Otherwise a reader that loses its connection, and returns after the partition left, would miss it unnoticed."""
    messages: list[kv_pb2.WatchResponse] = []
    has_all = asyncio.Event()

    class Stream:
        async def write(self, message: kv_pb2.WatchResponse) -> None:
            messages.append(message)
            if message.partition == "p1" and message.sequence == world.logs["p1"].seq:
                has_all.set()

    put(world, "p1")
    known = world.ring
    world.join("p3")
    hand(world, "p1", "p3")
    put(world, "p1")
    world.ring = known
    request = kv_pb2.WatchRequest(after={"p1": 0, "p2": 0})
    watching = asyncio.create_task(send_watch(world.feeds, request, Stream()))
    async with asyncio.timeout(PATIENCE_S):
        await has_all.wait()
    watching.cancel()
    named = next(place for place, message in enumerate(messages) if "p3" in message.positions)
    behind = next(place for place, message in enumerate(messages) if message.partition == "p1" and message.sequence > 1)
    assert messages[named].positions == {"p1": 1, "p2": 0, "p3": 0}
    assert named < behind


async def test_missed_partition_without_log_is_reported(world: World) -> None:
    put(world, "p1")
    world.join("p3")
    hand(world, "p1", "p3")
    put(world, "p3")
    hand(world, "p3", "p2")
    put(world, "p2")
    world.leave("p3")
    lose_log(world, "p3")
    following = await world.watch(after={"p1": 1, "p2": 0})
    failure = await following.failure()
    assert isinstance(failure, PositionTrimmed)
    assert failure.partition == "p3"


# docs/protocol.md F6
@pytest.mark.parametrize("end", [b"k\0", b"l"])
async def test_release_that_was_trimmed_right_behind_the_position_is_reported(world: World, end: bytes) -> None:
    """Nothing showed that the range had gone to p3: a watch of a range skipped p3's changes, and a watch of one key
    waited forever. No sequence after the position was trimmed."""
    source = world.owner(KEY)
    (target,) = {"p1", "p2"} - {source}
    there_and_back(world, source, target)
    log = world.logs[source]
    for _ in range(2):
        log.roll()
        log.put((b"another", b""))
    log.trim(1)
    of = KEY if end == KEY + b"\0" else None
    with pytest.raises(PositionTrimmed) as error:
        await world.watch(Interest(KEY, end), of=of, after={source: 1, target: 0})
    assert (error.value.partition, error.value.asked, error.value.oldest) == (source, 1, 2)


async def test_all_positions_except_removed_ones_may_be_named(world: World) -> None:
    """Feed.Positions lists a partition that has left for good, finally at 0: nothing can be read after that."""
    there_and_back(world, "p1", "p2")
    lose_log(world, "p3")
    here = {each: world.logs[each].seq for each in ("p1", "p2")}
    with pytest.raises(PositionTrimmed, match="its log is gone"):
        await world.watch(after={**here, "p3": 0})
    following = await world.watch(after=here)
    put(world, "p1")
    (change,) = await following.take(1)
    assert (change.partition, change.version) == ("p1", world.logs["p1"].seq)


async def test_partition_that_left_before_the_watch_is_not_shown(world: World) -> None:
    there_and_back(world, "p1", "p2")
    following = await world.watch()
    for log in ("p1", "p2"):
        put(world, log)
    assert {(each.partition, each.version) for each in await following.take(2)} == {
        ("p1", world.logs["p1"].seq),
        ("p2", world.logs["p2"].seq),
    }


async def test_range_waits_for_source_when_target_is_known_before_ring(world: World) -> None:
    """p3 has joined and left, and this server knows that only from logs."""
    following = await world.watch()
    known = world.ring
    world.logs["p1"].shown = len(world.logs["p1"].entries)
    there_and_back(world, "p1", "p2")
    world.ring = known
    await world.settle()
    world.logs["p1"].shown = None
    world.logs["p1"].tell()
    assert [each.partition for each in await following.take(3)] == ["p1", "p3", "p2"]
