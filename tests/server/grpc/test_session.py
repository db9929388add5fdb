"""Sessions: the progress of partitions that a stream reports with its answers, and the limits of a stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.core import operations
from kvstore.client.core.batching import cut, frame_of
from kvstore.client.core.operation import ClientOperation
from kvstore.env.slow_log import SlowLog, hash_of
from kvstore.errors import InvalidRequest
from kvstore.limits import CLIENT_BYTES, VALUE_BYTES_MAX
from kvstore.proto import compact, kv_pb2
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.server.grpc.batch_budget import BatchBudget
from kvstore.server.grpc.session import FrameSession, Unsent
from kvstore.types import PartitionId
from tests.server.backends import one_server
from tests.waiting import PATIENCE_S, wait_until


async def test_client_with_an_older_ring_gets_the_answering_partitions_progress(tmp_path: Path) -> None:
    """Otherwise the client could read at a replica that has not applied its write."""
    async with one_server(tmp_path) as (env, backend):
        session = FrameSession(backend, env.clock)
        owner = backend.topology.ring.partition_of(b"key")
        former = next(each for each in sorted(backend.partitions) if each != owner)
        lane = kv_pb2.Lane(first=1, partition=former, keys=[b"key"], values=[b"value"], codes=[kv_pb2.PUT])
        session.accept(kv_pb2.Frame(lanes=[lane], ring_version=backend.topology.ring.routed - 1))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        progress = {each.partition: each.sequence for each in answers.progress}
        assert progress[owner] == backend.partitions[owner].state.seq > 0
        assert former in progress, "its numbering goes on from there"


async def test_unread_streams_leave_capacity_for_others(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        value = b"x" * 1000
        writer = FrameSession(backend, env.clock)
        writer.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"key"], values=[value], codes=[kv_pb2.PUT])]))
        await asyncio.wait_for(writer.wait_all_done(), PATIENCE_S)
        unsent = Unsent(40_000)
        frame = kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"key"] * 50, codes=[kv_pb2.GET] * 50)])
        sessions = [FrameSession(backend, env.clock, unsent=unsent) for _ in range(30)]
        for session in sessions:
            session.accept(frame)
            await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        assert unsent.bytes <= 40_000 + 30 * len(value)
        found = [sum(len(answers.found) for answers in session.take()) for session in sessions]
        assert found[0] == 5, "an eighth"
        assert min(found) == 1, "each gets one value however many others do not read"
        assert unsent.bytes == 0
        sessions[0].accept(frame)
        sessions[0].close()
        assert unsent.bytes == 0


@pytest.mark.parametrize("lanes", [[1] * 2_049, [8_192, 8_192, 1]], ids=["lanes", "operations"])
async def test_frame_with_too_many_operations_is_refused(tmp_path: Path, lanes: list[int]) -> None:
    """One message of 4 MiB held a million operations: tens of seconds in which no lease was renewed."""
    async with one_server(tmp_path, 1) as (env, backend):
        session = FrameSession(backend, env.clock)
        deletes = [
            kv_pb2.Lane(first=1 + number * 8_192, keys=[b"k"] * count, codes=[kv_pb2.DELETE] * count)
            for number, count in enumerate(lanes)
        ]
        with pytest.raises(InvalidRequest, match=r"expected at most (2048 lanes|16384 operations) in a frame"):
            session.accept(kv_pb2.Frame(lanes=deletes))
        assert session.has_capacity
        assert backend.partitions[PartitionId("p1")].state.seq == 0


def batch_of(count: int) -> ClientOperation:
    """Return a batch of the smallest operations, also of more than clients send."""
    batch = operations.batch([operations.delete(b"k")])
    batch.options = kv_pb2.Options(operations=[kv_pb2.Operation(code=kv_pb2.DELETE, key=b"k")] * count)
    batch.size *= count
    return batch


def cut_frame(*batches: ClientOperation) -> kv_pb2.Frame:
    """Return the part of these batches that clients send in one frame."""
    cut_off = cut(deque(batches))
    assert len(cut_off) == len(batches)
    frame, _ = frame_of(cut_off, 1, ring_version=0, timeout_ms=60_000, tokens={})
    assert frame.ByteSize() < MESSAGE_BYTES_MAX
    return frame


async def test_frame_with_too_many_batched_operations_is_refused(tmp_path: Path) -> None:
    """59 batches in one message of 4 MiB held 590,000 operations: nearly a second in which no lease was renewed."""
    async with one_server(tmp_path, 1) as (env, backend):
        session = FrameSession(backend, env.clock)
        frame = cut_frame(batch_of(10_000), batch_of(5_000), batch_of(10_000))
        frame.lanes[0].options[1].operations.extend(frame.lanes[0].options[0].operations[:1_385])
        with pytest.raises(
            InvalidRequest, match="expected at most 26384 operations in the batches of a frame, got 26385"
        ):
            session.accept(frame)
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        assert list(session.take()) == []


@pytest.mark.parametrize("last", [10_000, 50_000], ids=["largest", "too large"])
async def test_frame_accepts_as_many_batched_operations_as_old_clients_send(tmp_path: Path, last: int) -> None:
    """Old clients close a frame at 512 KiB. Its last batch may exceed that, by more than a batch may have now,
    because they allowed larger batches."""
    frame = cut_frame(*[batch_of(10)] * 1_588, batch_of(last))
    async with one_server(tmp_path, 1) as (env, backend):
        session = FrameSession(backend, env.clock)
        session.accept(frame)
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        answers = list(session.take())
        done = {each.number for part in answers for each in part.results}
        refused = {number for part in answers for each in part.failures for number in each.numbers}
        assert done == set(range(1, 1_589 + (last == 10_000)))
        assert refused == (set() if last == 10_000 else {1_589})


def reading_batch(first: int, key: bytes = b"key") -> kv_pb2.Frame:
    operations = [kv_pb2.Operation(code=kv_pb2.GET, key=key), kv_pb2.Operation(code=kv_pb2.PUT, key=b"{key}2")]
    options = [kv_pb2.Options(operations=operations)]
    return kv_pb2.Frame(lanes=[kv_pb2.Lane(first=first, keys=[key], codes=[kv_pb2.BATCH], options=options)])


async def test_reads_of_batches_in_flight_are_bounded_over_all_callers(tmp_path: Path) -> None:
    async with one_server(tmp_path, 1) as (env, backend):
        room = BatchBudget(2 * VALUE_BYTES_MAX)
        sessions = [FrameSession(backend, env.clock, batches=room) for _ in range(3)]
        backend.hold()
        for session in sessions:
            session.accept(reading_batch(1))
        assert room.bytes == 2 * VALUE_BYTES_MAX
        sessions[0].close()
        assert room.bytes == 2 * VALUE_BYTES_MAX, "whoever goes away takes nothing back"
        (answers,) = sessions[2].take()
        assert [each.reason for each in answers.failures] == ["OVERLOADED"]
        writes = kv_pb2.Frame(lanes=[kv_pb2.Lane(first=2, keys=[b"key"], values=[b"v"], codes=[kv_pb2.PUT])])
        sessions[2].accept(writes)
        backend.let_go()
        for session in sessions:
            await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        assert room.bytes == 0
        sessions[2].accept(reading_batch(3))
        await asyncio.wait_for(sessions[2].wait_all_done(), PATIENCE_S)
        (answers,) = sessions[2].take()
        assert not answers.failures


async def test_transaction_in_a_frame_returns_its_positions(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        session = FrameSession(backend, env.clock)
        parts = [kv_pb2.Operation(code=kv_pb2.GET, key=b"b"), kv_pb2.Operation(code=kv_pb2.PUT, key=b"b", value=b"1")]
        lane = kv_pb2.Lane(first=7, keys=[b"b"], codes=[kv_pb2.TRANSACT])
        lane.options.add(index=0, operations=parts)
        session.accept(kv_pb2.Frame(lanes=[lane]))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        (result,) = answers.results
        owner = backend.topology.ring.partition_of(b"b")
        assert (result.number, [each.version for each in result.results]) == (7, [0, 1])
        assert [(each.partition, each.sequence) for each in result.positions] == [(owner, 1)]


async def test_reads_of_several_partitions_in_a_frame_are_one_transaction(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        session = FrameSession(backend, env.clock)
        keys = [b"k%d" % number for number in range(9)]
        assert len(set(map(backend.topology.ring.partition_of, keys))) == 3
        lane = kv_pb2.Lane(first=1, keys=[*keys[1:], keys[0]], codes=[*[kv_pb2.PUT] * 8, kv_pb2.TRANSACT])
        lane.values.extend([*[b"1"] * 8, b""])
        lane.options.add(index=8, operations=[kv_pb2.Operation(code=kv_pb2.GET, key=key) for key in keys])
        session.accept(kv_pb2.Frame(lanes=[lane]))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        (result,) = answers.results
        assert [each.record.value for each in result.results] == [b"", *[b"1"] * 8]
        assert sorted(each.partition for each in result.positions) == ["p1", "p2", "p3"]


async def test_unread_stream_begins_no_batches_that_read(tmp_path: Path) -> None:
    async with one_server(tmp_path, 1) as (env, backend):
        session = FrameSession(backend, env.clock, 1000)
        write = kv_pb2.Lane(first=1, keys=[b"key"], values=[b"x" * 2000], codes=[kv_pb2.PUT])
        session.accept(kv_pb2.Frame(lanes=[write]))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        for first in (2, 3):
            session.accept(reading_batch(first))
            await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        assert [each.number for each in answers.results] == [2]
        assert [(list(each.numbers), each.reason) for each in answers.failures] == [([3], "OVERLOADED")]


async def test_frame_with_oversized_numbers_is_refused_whole(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        session = FrameSession(backend, env.clock)
        good = kv_pb2.Lane(first=1, keys=[b"key"], values=[b"value"], codes=[kv_pb2.PUT])
        far = kv_pb2.Lane(first=2**64 - 1, keys=[b"a", b"b"], codes=[kv_pb2.GET] * 2)
        with pytest.raises(InvalidRequest):
            session.accept(kv_pb2.Frame(lanes=[good, far]))
        session.finish()
        assert session.is_finished, "nothing is under way"
        session.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"key"], codes=[kv_pb2.GET])]))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        assert list(answers.absent) == [1]


async def test_slow_lane_is_in_the_slow_log_with_first_key_and_count(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        slow = SlowLog(100)
        slow.limit_s = -1.0  # however long it takes
        session = FrameSession(backend, env.clock, slow=slow)
        lane = kv_pb2.Lane(first=1, partition="p1", keys=[b"a", b"b"], values=[b"1", b"2"], codes=[kv_pb2.PUT] * 2)
        session.accept(kv_pb2.Frame(lanes=[lane]))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (found,) = slow.latest()
        assert (found.at, found.operation, found.key) == ("endpoint", "PUT", hash_of(b"a"))
        assert (found.partition, found.operations) == ("p1", 2)


def puts(count: int, ring_version: int = 0, timeout_ms: int = 0, value_bytes: int = 10) -> compact.CompactFrame:
    keys, client = [b"key-%d" % (number % 7) for number in range(count)], bytes(CLIENT_BYTES)
    lane = compact.CompactLane("p1", 1, [kv_pb2.PUT] * count, keys, sequences=list(range(1, count + 1)))
    lane.values = [bytes(value_bytes)] * count
    lane.client, lane.first_unacknowledged, lane.seen_ms = client, 1, time.time_ns() // 1_000_000
    return compact.CompactFrame(ring_version, timeout_ms, [lane])


async def answers_to(session: FrameSession, frame: compact.CompactFrame) -> list[tuple[int, int]]:
    session.accept(frame)
    await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
    answers = session.take_compact()
    assert isinstance(answers, compact.CompactAnswers)
    return list(zip(answers.numbers, answers.versions, strict=True))


@pytest.mark.parametrize("value_bytes", [10, 20_000], ids=["one entry", "several"])
async def test_puts_of_a_lane_are_submitted_in_one_call(
    value_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls = [], []
    for is_atomic in (True, False):
        async with one_server(tmp_path, 1) as (env, backend):
            (partition,) = backend.partitions.values()
            submit, some = backend.submit, list[int]()

            def counting(ops: Any, *rest: Any, on: Any = submit, counts: list[int] = some) -> None:
                counts.append(len(ops))
                on(ops, *rest)

            monkeypatch.setattr(backend, "submit", counting)
            if not is_atomic:
                monkeypatch.setattr("kvstore.server.grpc.session._are_puts", lambda ops: False)
            found.append(await answers_to(FrameSession(backend, env.clock), puts(30, value_bytes=value_bytes)))
            assert len(partition.log.payloads) > 2 or value_bytes < 20_000
            calls.append(some)
    assert calls == [[30], [1] * 30]
    assert found[0] == found[1]
    assert [number for number, _ in found[0]] == list(range(1, 31))


async def test_puts_by_an_unknown_ring_carry_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that submits them in one call does not name its ring."""
    async with one_server(tmp_path, 1) as (env, backend):
        rings, submit, later = [], backend.submit, backend.topology.ring.routed + 1
        monkeypatch.setattr(backend, "submit", lambda *each: rings.append(each[3]) or submit(*each))
        await answers_to(FrameSession(backend, env.clock), puts(3, later))
        assert rings == [later] * 3


async def test_timed_out_puts_are_answered_once(tmp_path: Path) -> None:
    async with one_server(tmp_path, 1) as (env, backend):
        session = FrameSession(backend, env.clock)
        backend.hold()
        session.accept(puts(5, timeout_ms=1))
        await asyncio.wait_for(session.wait_answers(), PATIENCE_S)
        (answers,) = session.take()
        assert [list(each.numbers) for each in answers.failures] == [[1], [2], [3], [4], [5]]
        backend.let_go()
        state = backend.partitions[PartitionId("p1")].state

        async def are_applied() -> bool:
            return state.seq == 5

        await wait_until(are_applied)
        assert not list(session.take())


async def test_reads_of_an_ended_or_late_stream_are_skipped(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        backend.held_reads = []
        ended, late = FrameSession(backend, env.clock), FrameSession(backend, env.clock)
        lane = kv_pb2.Lane(first=1, keys=[b"a", b"b"], codes=[kv_pb2.GET] * 2)
        ended.accept(kv_pb2.Frame(lanes=[lane]))
        late.accept(kv_pb2.Frame(lanes=[lane], timeout_ms=1))
        first, second = backend.held_reads[0][1], backend.held_reads[-1][1]
        assert (first.is_gone, second.is_gone) == (False, False)
        assert (first.line, second.line) == (ended, late), "a stream is one caller, however many lanes it has"
        ended.close()
        await asyncio.wait_for(late.wait_all_done(), PATIENCE_S)
        assert (first.is_gone, second.is_gone) == (True, True)
        backend.do_held_reads()
        await asyncio.wait_for(ended.wait_all_done(), PATIENCE_S)
        late.close()


def replacing(first: int, code: int, count: int) -> kv_pb2.Frame:
    """Return writes of keys, each of which returns the previous record."""
    options = [kv_pb2.Options(index=index, flags=kv_pb2.RETURN_OLD) for index in range(count)]
    keys = [b"{key}%d" % number for number in range(count)]
    lane = kv_pb2.Lane(first=first, keys=keys, values=[b"v"] * count, codes=[code] * count, options=options)
    return kv_pb2.Frame(lanes=[lane])


@pytest.mark.parametrize("code", [kv_pb2.PUT, kv_pb2.DELETE])
async def test_single_writes_that_return_the_old_record_share_the_budget(tmp_path: Path, code: int) -> None:
    async with one_server(tmp_path, 1) as (env, backend):
        room = BatchBudget(2 * VALUE_BYTES_MAX)
        session = FrameSession(backend, env.clock, batches=room)
        backend.hold()
        session.accept(replacing(1, code, 5))
        assert room.bytes == 2 * VALUE_BYTES_MAX
        (answers,) = session.take()
        refused = [(number, each.reason) for each in answers.failures for number in each.numbers]
        assert refused == [(3, "OVERLOADED"), (4, "OVERLOADED"), (5, "OVERLOADED")]
        backend.let_go()
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        assert room.bytes == 0
        (answers,) = session.take()
        assert [each.number for each in answers.results] == [1, 2]


async def test_unread_stream_begins_no_writes_that_return_records(tmp_path: Path) -> None:
    async with one_server(tmp_path, 1) as (env, backend):
        session = FrameSession(backend, env.clock, 1000)
        write = kv_pb2.Lane(first=1, keys=[b"{key}0"], values=[b"x" * 2000], codes=[kv_pb2.PUT])
        session.accept(kv_pb2.Frame(lanes=[write]))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        for first in (2, 3):
            session.accept(replacing(first, kv_pb2.DELETE, 1))
            await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        assert [each.number for each in answers.results] == [2]
        assert [(list(each.numbers), each.reason) for each in answers.failures] == [([3], "OVERLOADED")]
