"""Watches over logs in memory: which changes are shown, their order and start, and the cost of slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client import ClientConfig
from kvstore.errors import InvalidRequest, NoSuchLedger, Overloaded, PositionTrimmed, Unavailable
from kvstore.partition.state.changes import FeedEntry, Interest
from kvstore.partition.state.intents import IntentEffect
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.move_records import Own, Release
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.hashing import MURMUR3
from kvstore.server.feed import feeds, watch
from kvstore.server.feed import tail as feed_tail
from kvstore.server.feed.tail import FeedCursor
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.tailing.tail import TailReader
from tests.server.feed.logs import cannot_be_read
from tests.server.feed.world import World, owned_by
from tests.waiting import wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
AT = Position(LedgerId(1), EntryId(0))
OPEN_S = feeds.OPEN_S
"""The default, except in tests."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World.open(tmp_path, "p1", "p2") as made:
        yield made


async def test_changes_are_shown_as_logged(world: World) -> None:
    following = await world.watch()
    log = world.logs["p1"]
    log.put((b"a", b"1"), (b"b", b"2"))
    log.time_ms = 2_000
    log.put((b"a", b"3"), expires_ms=2_500)
    log.note()
    log.delete(b"b")
    log.time_ms = 2_600
    log.delete(b"a")
    shown = await following.take(5)
    assert [(each.key, each.version, each.time_ms, each.expired) for each in shown] == [
        (b"a", 1, 1_000, False),
        (b"b", 2, 1_000, False),
        (b"a", 3, 2_000, False),
        (b"b", 5, 2_000, False),
        (b"a", 6, 2_600, True),
    ]
    items = [each.item for each in shown]
    assert [item and (item.value, item.version, item.created, item.written_ms, item.expires_ms) for item in items] == [
        (b"1", 1, 1, 1_000, 0),
        (b"2", 2, 2, 1_000, 0),
        (b"3", 3, 1, 2_000, 2_500),
        None,
        None,
    ]
    assert following.position == {"p1": 6, "p2": 0}


# docs/protocol.md F9
async def test_changes_of_a_transaction_name_it_and_its_number_of_keys(world: World) -> None:
    following = await world.watch()
    log, attempt = world.logs["p1"], Attempt(P2, 3, 7)
    log.commit(b"a", attempt, IntentEffect.PUT, 5)
    log.put((b"plain", b"1"))
    await following.take(2)
    shown = [(each.key, each.transaction, each.transaction_keys) for each in following.received]
    assert shown == [(b"a", str(attempt), 5), (b"plain", "", 0)]


# docs/protocol.md F5
async def test_watch_begins_now(world: World) -> None:
    world.logs["p1"].put((b"a", b"old"))
    following = await world.watch()
    world.logs["p1"].put((b"a", b"new"))
    assert [each.version for each in await following.take(1)] == [2]


async def test_seen_changes_are_not_repeated(world: World) -> None:
    log = world.logs["p1"]
    log.shown = 0  # this server does not know of it yet
    log.put((b"a", b"1"))
    following = await world.watch(seen={"p1": 1})
    log.shown = None
    log.put((b"a", b"2"))
    assert [each.version for each in await following.take(1)] == [2]


@pytest.mark.parametrize("after", range(6))
async def test_watch_continues_within_an_entry(world: World, after: int) -> None:
    log = world.logs["p1"]
    log.put((b"a", b"1"), (b"b", b"2"), (b"c", b"3"))
    log.put((b"d", b"4"), (b"e", b"5"), (b"f", b"6"))
    following = await world.watch(after={"p1": after, "p2": 0})
    assert [each.version for each in await following.take(6 - after)] == list(range(after + 1, 7))


async def test_only_keys_of_interest_are_shown(world: World) -> None:
    one = await world.watch(Interest(b"k1", b"k1\0"), of=b"k1")
    some = await world.watch(Interest(b"k", b"l"))
    log = world.logs[world.owner(b"k1")]
    log.put((b"a", b""), (b"k0", b""), (b"k1", b"x"), (b"k2", b""), (b"l", b""))
    assert [each.key for each in await some.take(3)] == [b"k0", b"k1", b"k2"]
    assert [each.key for each in await one.take(1)] == [b"k1"]


async def test_idle_partitions_have_positions(world: World) -> None:
    following = await world.watch(Interest(b"k1", b"k2"), heartbeat_s=0.06)
    for _ in range(5):
        world.logs["p2"].put((b"other", b""))
    await following.wait_position({"p1": 0, "p2": 5})
    assert not following.changes


async def test_trimmed_position_is_named(world: World) -> None:
    log = world.logs["p1"]
    for _ in range(3):
        log.put((b"a", b"1"), (b"b", b"2"))
        log.roll()
    log.trim(2)
    for asked in (3, 4):
        with pytest.raises(PositionTrimmed) as error:
            await world.watch(after={"p1": asked, "p2": 0})
        assert (error.value.partition, error.value.asked, error.value.oldest) == ("p1", asked, 5)
    following = await world.watch(after={"p1": 5, "p2": 0})
    assert [each.version for each in await following.take(1)] == [6]


async def test_reader_overtaken_by_trimming_is_notified(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_tail, "WINDOW_ENTRIES", 2)
    following = await world.watch(is_reading=False)
    log = world.logs["p1"]
    for _ in range(3):
        for _ in range(4):
            log.put((b"a", b"x" * 300_000))
        log.roll()
    await world.settle()
    log.trim(3)
    following.read_on()
    assert isinstance(await following.failure(), PositionTrimmed)


# docs/protocol.md A14
async def test_watch_before_a_lost_entry_fails_for_good_and_others_continue(world: World) -> None:
    log = world.logs["p1"]
    before = await world.watch()
    log.put((b"a", b"1"))
    await before.take(1)
    log.lost.add(Position(LedgerId(1), EntryId(1)))
    log.put((b"b", b"2"))
    log.put((b"c", b"3"))
    failure = await before.failure()
    assert isinstance(failure, PositionTrimmed)
    assert (failure.partition, failure.asked, failure.oldest) == ("p1", 1, 3)
    following = await world.watch(after={"p1": failure.oldest, "p2": 0})
    log.put((b"d", b"4"))
    assert [each.version for each in await following.take(1)] == [4]


# docs/protocol.md F7
async def test_slow_reader_holds_one_batch_and_reads_from_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_tail, "WINDOW_BYTES", 64 << 10)
    slow, fast = await world.watch(is_reading=False), await world.watch()
    log = world.logs["p1"]
    for number in range(200):
        log.put((b"k%d" % number, b"x" * 10_000))
    assert len(await fast.take(200)) == 200
    tail = world.feeds.known_tail(P1)
    assert tail is not None
    held = sum(entry.size for entry in tail.window)
    assert held <= 64 << 10, "the window is bounded, whoever reads"
    assert slow.held_bytes() <= feed_tail.BATCH_BYTES + 20_000
    slow.read_on()
    assert [each.version for each in await slow.take(200)] == list(range(1, 201))
    assert max(world.logs.batches[-8:]) <= feed_tail.BATCH_BYTES + 20_000
    assert world.feeds.log_reads == 0, "counted when a watch ends"
    await slow.close()
    assert world.feeds.log_reads >= 5


async def test_reader_that_reads_nothing_is_disconnected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SLOW_S", 0.02)
    following = await world.watch(is_reading=False)
    world.logs["p1"].put((b"a", b"1"))
    assert isinstance(await following.failure(), Overloaded)
    assert (world.feeds.watches, world.feeds.slow_total) == (0, 1)


async def test_watches_per_server_are_limited(world: World) -> None:
    world.feeds.slots.most = 2
    await world.watch()
    second = await world.watch()
    with pytest.raises(Overloaded):
        await world.watch()
    await second.close()
    await world.watch()


async def test_many_watches_of_one_user_keep_out_nobody_else(world: World) -> None:
    world.feeds.slots.most = 4
    oldest, *others = [await world.watch(owner="many") for _ in range(4)]
    few = [await world.watch(owner="few")]
    assert isinstance(await oldest.failure(), Overloaded)
    with pytest.raises(Overloaded):
        await world.watch(owner="many")
    few.append(await world.watch(owner="few"))
    assert isinstance(await others[0].failure(), Overloaded)
    with pytest.raises(Overloaded):
        await world.watch(owner="few")
    assert (world.feeds.watches, world.feeds.slow_total) == (4, 0)
    world.logs["p1"].put((b"a", b"1"))
    for each in (*few, *others[1:]):
        await each.take(1)


async def test_watches_share_one_log_reader(world: World) -> None:
    everybody = [await world.watch() for _ in range(20)]
    world.logs["p1"].put((b"a", b"1"))
    for each in everybody:
        await each.take(1)
    assert world.logs.readers == 2, "one for each partition"


async def test_tail_ends_without_watches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "LINGER_S", 0.01)
    following = await world.watch()
    await world.settle()
    assert world.feeds.statistics()["feed_tails"] == 2
    await following.close()

    async def has_ended() -> bool:
        return world.feeds.statistics()["feed_tails"] == 0

    await wait_until(has_ended, what="the tails end")


async def test_tail_that_ended_with_its_last_reader_is_not_ended_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second end used to raise an error in a callback of the event loop, which ends the process."""
    monkeypatch.setattr(feeds, "LINGER_S", 0.01)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    cursor = await world.feeds.cursor(P1, None, Interest(), lambda: None)
    may_close = asyncio.Event()
    cursor._reader = cast("TailReader", SimpleNamespace(close=may_close.wait))
    leaving = asyncio.create_task(world.feeds.drop(cursor))

    async def has_ended() -> bool:
        return world.feeds.statistics()["feed_tails"] == 0

    async def has_looked_again() -> bool:
        return not world.feeds._idle

    await wait_until(has_ended, what="the tail ends")
    may_close.set()
    await leaving
    await wait_until(has_looked_again, what="whoever looks whether the tail is idle has looked")
    assert failures == []


async def test_changes_are_searched_only_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch of a range follows all partitions. A look through all of them for each change used to take 1 ms."""
    async with World.open(tmp_path, *(f"p{number}" for number in range(50))) as world:
        following = await world.watch()
        await world.settle()
        advance, looked_through = watch.Watch._advance, list[PartitionId]()

        def counted(self: watch.Watch, cursor: FeedCursor) -> AsyncIterator[Any]:
            looked_through.append(cursor.partition)
            return advance(self, cursor)

        monkeypatch.setattr(watch.Watch, "_advance", counted)
        world.logs["p7"].put((b"a", b"1"))
        await following.take(1)
        await world.settle()
        assert looked_through == ["p7"]


async def test_unreadable_log_wakes_watches_only_after_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_tail, "RETRY_S", 0.0)
    following = await world.watch()
    await world.settle()
    tail, woken = world.feeds.known_tail(P1), 0
    assert tail is not None
    wake_all = tail._wake_all

    def counted(*given: Any) -> None:
        nonlocal woken
        woken += 1
        wake_all(*given)

    monkeypatch.setattr(tail, "_wake_all", counted)
    before = world.logs.readers
    world.logs["p1"].failure = cannot_be_read()
    world.logs["p1"].tell()
    await wait_until(lambda: asyncio.sleep(0, world.logs.readers > before + 50))
    assert woken == 0
    monkeypatch.setattr(feed_tail, "PATIENCE_S", 0.0)
    assert isinstance(await following.failure(), Unavailable)
    assert woken == 1


async def test_positions_in_many_logs_are_found_in_parallel(tmp_path: Path) -> None:
    """Each takes several reads: one after another they used to take longer than a client waits."""
    async with World.open(tmp_path, *(f"p{number}" for number in range(3 * feeds.FOLLOWS_MAX))) as world:
        find, looking, most = world.feeds.cursor, 0, 0

        async def found(*given: Any, **options: Any) -> FeedCursor:
            nonlocal looking, most
            looking += 1
            most = max(most, looking)
            for _ in range(20):
                await asyncio.sleep(0)
            looking -= 1
            return await find(*given, **options)

        world.feeds.cursor = found  # type: ignore[method-assign]
        following = await world.watch()
        assert most == feeds.FOLLOWS_MAX
        assert len(following.position) == 3 * feeds.FOLLOWS_MAX


async def test_unreadable_log_is_named_before_clients_leave(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientConfig(endpoints=("n1:1",)).timeout_s / 2 > OPEN_S
    monkeypatch.setattr(feeds, "OPEN_S", 0.5)
    world.logs["p2"].failure = cannot_be_read()
    with pytest.raises(Unavailable, match="partition p2: its log cannot be read now"):
        await world.watch()
    tail = world.feeds.known_tail(P1)
    assert tail is None or not tail.is_watched, "the places that were found are let go"


async def test_unreadable_log_redirects_watchers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_tail, "PATIENCE_S", 0.05)
    monkeypatch.setattr(feed_tail, "RETRY_S", 0.01)
    following = await world.watch(heartbeat_s=0.05)
    world.logs["p1"].failure = cannot_be_read()
    world.logs["p1"].tell()
    assert isinstance(await following.failure(), Unavailable)


@pytest.mark.parametrize("failure", [cannot_be_read(), NoSuchLedger("trimmed")], ids=lambda each: type(each).__name__)
async def test_watch_wakes_when_log_becomes_readable(
    world: World, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(feed_tail, "RETRY_S", 0.01)
    log, following = world.logs["p1"], await world.watch()
    log.put((b"a", b"1"))
    await following.take(1)
    tail = world.feeds.known_tail(P1)
    assert tail is not None

    async def has_failed() -> bool:
        return tail.failure is failure

    async def is_read_again() -> bool:
        return world.logs.readers > readers

    log.failure = failure
    log.tell()
    await wait_until(has_failed, what="the tail has failed")
    readers = world.logs.readers
    log.failure = None
    await wait_until(is_read_again, what="there is another reader")
    await world.settle()
    last = log.put((b"a", b"2"))
    assert [change.version for change in await following.take(1)] == [last]


# ── ranges that move ──────────────────────────────────────────────────────────────────────────────────────────────────


def handed(world: World, key: bytes, *, seq: int) -> tuple[Release, Own]:
    """Move the range of a key from p1 to p2."""
    token = MURMUR3.token_of(key)
    span = TokenSpan(token, token)
    return Release(1, AT, 1, P2, span), Own(1, AT, AT, seq, world.logs["p1"].time_ms, P1, span)


async def test_entries_of_new_owner_wait_for_former_owner(world: World) -> None:
    following = await world.watch()
    old, new = world.logs["p1"], world.logs["p2"]
    old.shown = 0  # slow: this server knows only of the new owner's log
    old.put((b"k", b"1"))
    release, own = handed(world, b"k", seq=1)
    old.record(release)
    new.put((b"other", b"before"))
    new.record(own)
    new.put((b"k", b"2"))
    assert [each.key for each in await following.take(1)] == [b"other"]
    await world.settle()
    assert len(following.changes) == 1, "the rest waits"
    old.shown = None
    old.tell()
    assert [(each.partition, each.version) for each in await following.take(2)] == [("p1", 1), ("p2", 2)]


# docs/protocol.md F4
async def test_single_key_is_followed_to_its_new_owner(world: World) -> None:
    key = owned_by(world.ring, P1)
    following = await world.watch(Interest(key, key + b"\0"), of=key)
    assert set(following.position) == {"p1"}
    old, new = world.logs["p1"], world.logs["p2"]
    new.time_ms = 500
    new.put((key, b"of an earlier time: not this key's history any more"))
    old.put((key, b"1"))
    old.put((key, b"2"))
    shown = await following.take(2)
    release, own = handed(world, key, seq=2)
    old.record(release)
    new.time_ms = old.time_ms
    new.record(own)
    new.put((key, b"3"))
    shown += await following.take(1)
    assert [(each.partition, each.version) for each in shown] == [("p1", 1), ("p1", 2), ("p2", 3)]
    assert set(following.position) == {"p2"}, "p1 has nothing more to say about it"


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_single_key_is_found_after_a_missed_move(world: World, after: int) -> None:
    key = owned_by(world.ring, P1)
    old, new = world.logs["p1"], world.logs["p2"]
    old.put((key, b"1"))
    old.put((key, b"2"))
    release, own = handed(world, key, seq=2)
    old.record(release)
    old.put((b"another", b""))
    old.record(Release(2, AT, 0, P2, TokenSpan(0, 0)))
    new.record(own)
    new.put((key, b"3"))
    following = await world.watch(Interest(key, key + b"\0"), of=key, after={"p1": after})
    assert [each.version for each in await following.take(3 - after)] == list(range(after + 1, 4))


# docs/protocol.md F2
async def test_release_at_the_position_is_seen_again(world: World) -> None:
    """It has the sequence of the write before it: a reader that has seen the write may not have seen the release."""
    key = owned_by(world.ring, P1)
    old, new = world.logs["p1"], world.logs["p2"]
    old.put((key, b"1"))
    release, own = handed(world, key, seq=1)
    old.record(release)
    warm = await world.watch()  # the tail starts after the release
    new.record(own)
    following = await world.watch(Interest(key, key + b"\0"), of=key, after={"p1": 1})
    new.put((key, b"2"))
    assert [each.version for each in await following.take(1)] == [2]
    await warm.close()


async def test_all_positions_may_be_named_for_a_single_key(world: World) -> None:
    key = owned_by(world.ring, P1)
    world.logs["p1"].put((key, b"1"))
    world.logs["p2"].put((b"x", b""))
    following = await world.watch(Interest(key, key + b"\0"), of=key, after={"p1": 0, "p2": 0}, heartbeat_s=0.05)
    assert [each.version for each in await following.take(1)] == [1]
    await following.wait_position({"p1": 1})


async def test_new_partition_is_followed_from_its_beginning(world: World) -> None:
    following = await world.watch(heartbeat_s=0.05)
    world.join("p3")
    world.logs["p3"].put((b"new", b"1"))
    assert [(each.partition, each.version) for each in await following.take(1)] == [("p3", 1)]


async def test_partition_that_left_is_no_longer_followed(world: World) -> None:
    following = await world.watch()
    world.logs["p2"].put((b"last", b"1"))
    world.leave("p2")
    world.feeds.read_ring()
    assert [each.key for each in await following.take(1)] == [b"last"]
    await following.wait_position({"p1": 0})


async def test_position_of_unknown_partition_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="p9"):
        await world.watch(after={"p9": 1})


async def test_position_beyond_the_end_of_a_log_is_refused(world: World) -> None:
    """It belongs to another cluster: a reader that waited for it would miss all changes before it."""
    last = world.logs["p1"].put((b"a", b"1"))
    with pytest.raises(InvalidRequest, match=f"expected a position up to {last}, where its log ends, got {last + 1}"):
        await world.watch(after={"p1": last + 1, "p2": 0})
    world.leave("p2")
    with pytest.raises(InvalidRequest, match="p2: expected a position up to 0, where its log ends, got 1"):
        await world.watch(after={"p1": last, "p2": 1})


async def test_position_known_only_to_another_server_is_accepted(world: World) -> None:
    log = world.logs["p1"]
    log.put((b"a", b"1"))
    log.shown = len(log.entries)
    last = log.put((b"a", b"2"))
    reader = await world.watch(after={"p1": last, "p2": 0})
    log.shown = None
    log.put((b"a", b"3"))
    assert [change.version for change in await reader.take(1)] == [last + 1]


async def test_position_in_partition_unknown_here_is_accepted(world: World) -> None:
    await world.join_unheard("p3")
    log = world.logs["p3"]
    log.put((b"a", b"1"))
    log.shown = len(log.entries)
    last = log.put((b"a", b"2"))
    reader = await world.watch(after={"p1": 0, "p2": 0, "p3": last})
    log.shown = None
    log.put((b"a", b"3"))
    assert [change.version for change in await reader.take(1)] == [last + 1]


async def test_position_in_removed_log_is_reported_as_trimmed(world: World) -> None:
    log = world.logs["p2"]
    last = log.put((b"a", b"1"))
    world.leave("p2")
    log.entries.clear()
    log.ledgers.clear()
    with pytest.raises(PositionTrimmed, match="its log is gone"):
        await world.watch(after={"p1": 0, "p2": last})


class CountedKey(bytes):
    """A key that counts the comparisons with it."""

    compared = 0

    def __lt__(self, other: bytes) -> bool:
        CountedKey.compared += 1
        return bytes(self) < bytes(other)

    def __ge__(self, other: bytes) -> bool:
        CountedKey.compared += 1
        return bytes(self) >= bytes(other)


async def test_entry_costs_little_for_many_watches_of_ranges() -> None:
    """1,000 watches of ranges took 76 ms of the event loop for each entry of 1,000 keys."""
    tail, woken = feed_tail.LiveTail(P1, cast("Any", None)), list[int]()
    interests = [Interest(b"z%03d" % number, b"z%03d~" % number) for number in range(200)]
    cursors = [
        FeedCursor(
            *(tail, cast("Any", None), asyncio.Semaphore(), each, partial(woken.append, number), tail.end, Seq(0)),
            with_handovers=False,
        )
        for number, each in enumerate(interests)
    ]
    entry = FeedEntry(AT, Seq(0), Seq(1_000), 1)
    entry.keys = [CountedKey(b"k%d" % number) for number in range(999)] + [CountedKey(b"z007x")]
    tail._append(entry)
    assert woken == [7]
    assert [each.is_untouched for each in cursors].index(False) == 7
    assert CountedKey.compared < len(entry.keys) * len(cursors) / 4


@pytest.mark.parametrize("seed", range(20))
def test_interest_meets_the_keys_of_its_range(seed: int) -> None:
    random = Random(seed)
    letters = [b"", b"a", b"b", b"b\0", b"c", b"cc"]
    for _ in range(50):
        keys = sorted(random.choices(letters[1:], k=random.randrange(4)))
        start, end = random.choice(letters), random.choice(letters)
        assert Interest(start, end).meets(keys) == any(start <= key and (not end or key < end) for key in keys)
