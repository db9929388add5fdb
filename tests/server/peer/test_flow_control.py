"""Flow control for operations of another server that may return large values."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.errors import StoreError
from kvstore.partition.state.commands import Batch, Code, Delete, Flag, Get, Meta, Op, Put, Scan
from kvstore.server.peer import abandoned, flow_control, server
from kvstore.server.peer import frames as peer_frames
from kvstore.server.peer.flow_control import (
    READS_FIRST,
    VALUES_LARGE_MAX,
    VALUES_MAX,
    FlowControl,
    values_of,
)
from kvstore.server.peer.frames import Frames, Lane, Operations, Results
from kvstore.server.routing.large_reads import LARGE_BYTES
from kvstore.types import PartitionId
from tests.server.peer.test_link_calls import connect
from tests.server.servers import servers
from tests.waiting import wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
GET: Op = Get(b"k", 0, 0)
PUT: Op = Put(b"k", b"v", 0, 0, 0, None)


def arrive(flow: FlowControl, partition: PartitionId, ops: list[Op], first: int = 1) -> None:
    flow.arrive(partition, [(partition, op, number, 0, 0) for number, op in enumerate(ops, first)])


def taken(flow: FlowControl) -> list[int]:
    return [number for _, _, number, _, _ in flow.take()]


def get(key: bytes) -> Op:
    return Get(key, 0, 0)


def test_values_per_partition_are_limited_and_wait_in_order() -> None:
    flow = FlowControl()
    arrive(flow, P1, [GET] * (READS_FIRST + 2))
    assert taken(flow) == [*range(1, READS_FIRST + 1)]
    flow.end(1, 10)
    assert taken(flow) == [READS_FIRST + 1]
    flow.end(2, 10)
    assert taken(flow) == [READS_FIRST + 2]
    assert flow.waiting == 0


def test_reads_start_few_and_grow_while_values_are_small() -> None:
    """The size of a value is unknown before it is read, and all reads that start together are executed in one turn."""
    flow, rounds = FlowControl(), list[int]()
    for first in (1, 10_000):
        arrive(flow, P1, [GET] * 500, first=first)
        while begun := taken(flow):
            rounds.append(len(begun))
            for number in begun:
                flow.end(number, 10)
    assert rounds == 2 * [16, 32, 64, 128, 128, 128, 4], "and the same again when nothing had been under way"


META: Op = Meta(b"k", 0, 0)
SWAP: Op = Put(b"k", b"v", 0, int(Flag.RETURN_OLD), 0, None)
DELETE: Op = Delete(b"k", 0, 0, None)
SCAN: Op = Scan(b"", b"", 10, 0, 0, 0)


def test_writes_do_not_wait_behind_reads() -> None:
    """One client asks for a thousand values and reads none: writes of others are executed meanwhile."""
    flow = FlowControl()
    arrive(flow, P1, [*[GET] * 1_000, PUT, DELETE])
    assert taken(flow)[:2] == [1_001, 1_002]


def test_existence_check_waits_for_earlier_read_of_the_key() -> None:
    """A client that sends GET and EXISTS without waiting must not see a value, and then that it does not exist."""
    flow = FlowControl()
    arrive(flow, P1, [*[get(b"other")] * READS_FIRST, GET, META])
    assert taken(flow) == [*range(1, READS_FIRST + 1)]
    flow.end(1, LARGE_BYTES + 1)
    flow.end(2, 1)
    for number in range(3, READS_FIRST + 1):
        flow.end(number, 1)
    assert taken(flow) == [READS_FIRST + 1, READS_FIRST + 2]
    flow.end(READS_FIRST + 1, LARGE_BYTES + 1)
    arrive(flow, P1, [*[GET] * (READS_FIRST + 1), META, PUT], first=1_000)
    begun = taken(flow)
    assert begun[0] == 1_000 + READS_FIRST + 2
    assert 1_000 + READS_FIRST + 1 not in begun


# docs/protocol.md M15
def test_writes_keep_order_including_those_returning_old_values() -> None:
    flow = FlowControl()
    arrive(flow, P1, [*[SWAP] * (VALUES_MAX + 1), PUT, DELETE])
    assert taken(flow) == [*range(1, VALUES_MAX + 1)]
    flow.end(1, 10)
    assert taken(flow) == [VALUES_MAX + 1, VALUES_MAX + 2, VALUES_MAX + 3]


def test_reads_of_large_keys_wait_apart_from_others() -> None:
    flow = FlowControl()
    large, small = get(b"large"), get(b"small")
    arrive(flow, P1, [large])
    assert taken(flow) == [1]
    flow.end(1, LARGE_BYTES + 1)
    arrive(flow, P1, [large] * 1_000, first=2)
    begun = taken(flow)
    assert begun == [*range(2, VALUES_LARGE_MAX + 2)]
    arrive(flow, P1, [small, PUT], first=5_000)
    assert taken(flow) == [5_001, 5_000]
    flow.end(begun[0], LARGE_BYTES + 1)
    assert taken(flow) == [begun[-1] + 1], "and they go on as there is room"


def test_single_read_does_not_wait_behind_scans() -> None:
    flow = FlowControl()
    arrive(flow, P1, [*[SCAN] * (VALUES_MAX + 10), GET])
    assert taken(flow)[0] == VALUES_MAX + 11


def test_key_that_became_small_is_read_normally() -> None:
    flow = FlowControl()
    for number, size in ((1, LARGE_BYTES + 1), (2, 10)):
        arrive(flow, P1, [GET], first=number)
        assert taken(flow) == [number]
        flow.end(number, size)
    (queues,) = flow._by_partition.values()
    assert (queues.large_keys, queues.apart, queues.large.values, queues.reads.values) == ({}, {}, 0, 0)


def test_most_recent_large_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "LARGE_KEYS_MAX", 2)
    flow = FlowControl()
    for number, key in enumerate((b"a", b"b", b"a", b"c"), 1):
        arrive(flow, P1, [get(key)], first=number)
        taken(flow)
        flow.end(number, LARGE_BYTES + 1)
    (queues,) = flow._by_partition.values()
    assert list(queues.large_keys) == [b"a", b"c"]


def test_reads_of_a_key_keep_order_while_it_becomes_large() -> None:
    """A client's later read of a key never starts before its earlier one."""
    flow = FlowControl()
    large, other = get(b"large"), get(b"other")
    arrive(flow, P1, [large, *[other] * READS_FIRST, large])
    assert taken(flow) == [*range(1, READS_FIRST + 1)]
    flow.end(1, LARGE_BYTES + 1)  # from now on reads of it wait separately, including the one that already waits
    arrive(flow, P1, [large], first=1_000)
    for number in range(2, READS_FIRST + 1):
        flow.end(number, 10)
    assert taken(flow) == [READS_FIRST + 1, READS_FIRST + 2, 1_000]


def test_reads_of_a_key_keep_order_while_it_becomes_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "LARGE_KEYS_MAX", 1)
    flow = FlowControl()
    large, other = get(b"large"), get(b"other")
    arrive(flow, P1, [large, other])
    assert taken(flow) == [1, 2]
    flow.end(1, LARGE_BYTES + 1)
    arrive(flow, P1, [large] * (VALUES_LARGE_MAX + 1), first=100)
    assert len(taken(flow)) == VALUES_LARGE_MAX
    flow.end(100, 10)
    flow.end(2, LARGE_BYTES + 1)  # only the latest large keys are remembered, but this read still waits
    arrive(flow, P1, [large], first=1_000)
    assert taken(flow) == [100 + VALUES_LARGE_MAX]
    flow.end(101, 10)
    assert taken(flow) == [1_000]
    flow.end(100 + VALUES_LARGE_MAX, 10)
    (queues,) = flow._by_partition.values()
    assert queues.large_keys.keys() <= {b"other"}


def test_oldest_and_newest_are_found_across_kinds() -> None:
    flow = FlowControl()
    flow.is_held = True
    flow.arrive(P1, [(P1, SCAN, 3, 0, 7), (P1, PUT, 4, 0, 8), (P1, GET, 5, 0, 9)])
    assert (flow.newest(), flow.oldest(100), flow.waiting) == (5, 7, 3)
    flow.is_held = False
    assert taken(flow) == [4, 5, 3]
    assert (flow.newest(), flow.oldest(100), flow.waiting) == (0, 100, 0)


def test_oldest_and_newest_are_found_after_reads_move_to_large() -> None:
    flow = FlowControl()
    large, found = get(b"large"), get(b"found")
    arrive(flow, P1, [large, found])
    taken(flow)
    flow.end(1, LARGE_BYTES + 1)
    flow.is_held = True
    flow.arrive(P1, [(P1, found, 3, 0, 3), (P1, large, 4, 0, 4), (P1, found, 5, 0, 5), (P1, large, 6, 0, 6)])
    flow.end(2, LARGE_BYTES + 1)
    assert (flow.newest(), flow.oldest(100)) == (6, 3)
    flow.is_held = False
    assert taken(flow) == [3, 4, 5, 6]


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_cost_of_a_large_value_is_independent_of_the_queue(times: int) -> None:
    """Thousands of different large keys are requested at once: a look through all of them each time takes minutes."""
    looked = 0

    class Waits(Get):
        """An operation that counts accesses to it."""

        def __getattribute__(self, name: str) -> Any:
            nonlocal looked
            looked += 1
            return Get if name == "__class__" else super().__getattribute__(name)

    flow, count = FlowControl(), 3_000
    ops = [Waits(b"%d" % number) for number in range(count)] * times
    flow.arrive(P1, [(P1, op, number, 0, 0) for number, op in enumerate(ops, 1)])
    begun, order = taken(flow), list[int]()
    while begun:
        order += begun
        for number in begun:
            flow.end(number, LARGE_BYTES + 1)
        begun = taken(flow)
    assert flow.waiting == 0
    assert sorted(order) == [*range(1, len(ops) + 1)]
    assert looked < 20 * len(ops)


@pytest.mark.parametrize("seed", range(30))
def test_mixed_operations_start_once_in_order_of_kind_and_key(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("VALUES_MAX", 6), ("READS_FIRST", 4), ("VALUES_LARGE_MAX", 2), ("LARGE_KEYS_MAX", 3)):
        monkeypatch.setattr(flow_control, name, value)
    random, flow, waiting, in_flight = Random(seed), FlowControl(), dict[int, Op](), list[int]()
    taken_of: dict[object, list[int]] = {}
    number = 0
    while number < 400 or waiting:
        some = []
        for _ in range(random.randrange(12) if number < 400 else 0):
            number += 1
            key = b"%d" % random.randrange(5)
            op: Op = random.choice(
                [get(key), get(key), Meta(key, 0, 0), Put(key, b"v", flags=int(Flag.RETURN_OLD)), PUT, SCAN]
            )
            waiting[number] = op
            some.append((P1, op, number, 0, number // 7))
        flow.arrive(P1, some)
        assert flow.waiting == len(waiting)
        assert flow.newest() == max(waiting, default=0)
        assert flow.oldest(1_000) == min((each // 7 for each in waiting), default=1_000)
        for begun in taken(flow):
            op = waiting.pop(begun)
            if op.code != Code.SCAN:
                kind: object = op.key if op.code in (Code.GET, Code.META) else "writes"
                taken_of.setdefault(kind, []).append(begun)
            in_flight.append(begun)
        (queues,) = flow._by_partition.values()
        assert queues.apart == Counter(each[1].key for each in queues.large.waiting)
        for _ in range(random.randrange(8)):
            if in_flight:
                ended = in_flight.pop(random.randrange(len(in_flight)))
                flow.end(ended, random.choice([0, 10, LARGE_BYTES + 1]))
    assert all(each == sorted(each) for each in taken_of.values())
    assert sum(map(len, taken_of.values())) > 200


def test_partitions_do_not_wait_for_each_other() -> None:
    flow = FlowControl()
    arrive(flow, P1, [GET] * (READS_FIRST + 1))
    arrive(flow, P2, [GET], first=1_000)
    assert taken(flow)[-1] == 1_000


def test_fewer_operations_start_while_values_are_large() -> None:
    flow = FlowControl()
    arrive(flow, P1, [GET] * 300)
    for number in taken(flow):
        flow.end(number, LARGE_BYTES + 1)
    begun = taken(flow)
    assert len(begun) == VALUES_LARGE_MAX
    for number in begun:
        flow.end(number, 1)
    assert len(taken(flow)) == 2 * VALUES_LARGE_MAX


def test_nothing_starts_while_peer_does_not_read() -> None:
    flow = FlowControl()
    flow.is_held = True
    arrive(flow, P1, [PUT, GET])
    assert taken(flow) == []
    flow.is_held = False
    assert taken(flow) == [1, 2]


@pytest.mark.parametrize(
    ("op", "values"),
    [
        (GET, 1),
        (PUT, 0),
        (Put(b"k", b"v", 0, int(Flag.RETURN_OLD), 0, None), 1),
        (Delete(b"k", int(Flag.RETURN_OLD), 0, None), 1),
        (Delete(b"k", 0, 0, None), 0),
        (Batch(b"k", (GET, PUT, GET), 0, None), 2),
        (Batch(b"k", (GET,) * 100, 0, None), 16),
        (Meta(b"k", 0, 0), 0),
    ],
)
def test_values_of_an_operation_are_bounded(op: Op, values: int) -> None:
    assert values_of(op) == values
    flow = FlowControl()
    arrive(flow, P1, [op] * 3)
    begun = taken(flow)
    assert begun == [1, 2, 3]
    assert sum(each[1] for each in flow.in_flight.values()) == 3 * values


async def test_slow_reader_gets_all_answers_and_keeps_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "READS_FIRST", 8)
    count = 60
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        await cluster.lead("p1", "n2")
        key, value = cluster.key_of("p1"), b"x" * (1 << 20)
        async with cluster["n2"].redis() as client:
            await client.set(key, value)
        raw = await connect(cluster)
        await cluster["n1"].introduce(raw, "n2")
        raw.reader._transport.pause_reading()  # type: ignore[attr-defined]
        gets: list[Any] = [(number, Get(key, 0, 0)) for number in range(count)]
        version = cluster["n2"].dispatcher.topology.ring.routed
        raw.writer.write(peer_frames.encode(Operations(version, [Lane("p1", gets=gets)])))
        (connection,) = cluster["n2"].peers._connections.values()

        async def is_held() -> bool:
            return connection._flow.is_held

        await wait_until(is_held, what="its answers are not taken")
        async with cluster["n2"].redis() as client:
            for _ in range(10):
                assert await client.get(key) == value
                assert connection._stream.get_write_buffer_size() <= server.OUTPUT_HIGH_BYTES + (8 << 20) + 1_000
        raw.reader._transport.resume_reading()  # type: ignore[attr-defined]
        frames, seen = Frames(), list[int]()
        while len(seen) < count:
            for message in frames.feed(await raw.reader.read(1 << 20)):
                assert isinstance(message, Results)
                assert all(record[0] == value for _, record in message.records)
                seen += [number for number, _ in message.records]
        assert seen == list(range(count))
        raw.close()


async def test_overdue_operations_are_removed_and_later_ones_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abandoned, "CHECK_S", 0)
    flow, now, begun = FlowControl(), [0.0], list[int]()
    watcher = abandoned.Abandoned(flow, lambda: now[0], lambda: begun.extend(taken(flow)))
    arrive(flow, P1, [*[GET] * READS_FIRST, GET, GET])
    taken(flow)
    watcher.watch()
    arrive(flow, P1, [GET], first=1_000)
    assert begun == []
    now[0] = abandoned.OPERATION_TIMEOUT_S

    async def is_taken_out() -> bool:
        return bool(begun)

    await wait_until(is_taken_out, what="what nobody waits for goes")
    assert begun == [READS_FIRST + 1, READS_FIRST + 2], "the first values are under way still"
    assert (flow.waiting, flow.abandoned) == (1, READS_FIRST + 2)
    watcher.end()


async def test_abandoned_operations_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes writes: the client was already answered that the outcome is unknown, and has continued."""
    monkeypatch.setattr(flow_control, "VALUES_MAX", 8)
    monkeypatch.setattr(abandoned, "OPERATION_TIMEOUT_S", 0.0)
    monkeypatch.setattr(abandoned, "CHECK_S", 0.01)
    count = 60
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        await cluster.lead("p1", "n2")
        key, value = cluster.key_of("p1"), b"x" * (1 << 20)
        async with cluster["n2"].redis() as client:
            await client.set(key, value)
        raw = await connect(cluster)
        await cluster["n1"].introduce(raw, "n2")
        raw.reader._transport.pause_reading()  # type: ignore[attr-defined]
        batch: Op = Batch(
            key,
            (Get(key, 0, 0),),
            0,
            None,
        )  # it may write, so it waits with writes
        others: list[Any] = [(number, batch) for number in range(count)]
        others.append((count, Delete(key, 0, 0, None)))
        version = cluster["n2"].dispatcher.topology.ring.routed
        raw.writer.write(peer_frames.encode(Operations(version, [Lane("p1", others=others)])))
        (connection,) = cluster["n2"].peers._connections.values()

        async def is_abandoned() -> bool:
            return connection._flow.is_held and connection._flow.abandoned == count

        await wait_until(is_abandoned, what="its answers are not taken, and what waits is given up")
        raw.reader._transport.resume_reading()  # type: ignore[attr-defined]
        frames, seen, refused = Frames(), list[int](), dict[int, str]()
        while len(seen) + len(refused) <= count:
            for message in frames.feed(await raw.reader.read(1 << 20)):
                assert isinstance(message, Results)
                assert not message.numbers, "the delete was done"
                for number, result in message.others:
                    if isinstance(result, StoreError):
                        refused[number] = type(result).__name__
                    else:
                        seen.append(number)
        assert seen == list(range(len(seen)))
        assert sorted(refused) == list(range(len(seen), count + 1))
        assert set(refused.values()) == {"Overloaded"}
        async with cluster["n2"].redis() as client:
            assert await client.get(key) == value
        raw.close()


async def test_other_clients_are_answered_while_one_reads_large_values(tmp_path: Path) -> None:
    """One link carries the operations of all clients of a server, and a thousand large values take seconds."""
    count = 300
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        await cluster.lead("p1", "n2")
        large, small = (cluster.key_of("p1", begin) for begin in (0, 1_000))
        async with cluster["n2"].redis() as client:
            await client.set(large, b"x" * 2 * LARGE_BYTES)
            await client.set(small, b"small")
        raw = await connect(cluster)
        await cluster["n1"].introduce(raw, "n2")
        version, frames = cluster["n2"].dispatcher.topology.ring.routed, Frames()

        async def answered(lane: Lane, last: int) -> list[int]:
            """Return the numbers of the answers in order of arrival."""
            raw.writer.write(peer_frames.encode(Operations(version, [lane])))
            order = list[int]()
            while len(order) < last:
                for message in frames.feed(await raw.reader.read(1 << 20)):
                    assert isinstance(message, Results)
                    order += [number for number, _ in [*message.records, *message.numbers]]
            return order

        await answered(Lane("p1", gets=[(0, get(large))]), 1)
        gets = [*((number, get(large)) for number in range(1, count)), (count, get(small))]
        put: Op = Put(small, b"new", 0, 0, 0, None)
        order = await answered(Lane("p1", gets=gets, puts=[(count + 1, put)]), count + 1)
        assert max(order.index(count), order.index(count + 1)) < count // 2
        raw.close()
