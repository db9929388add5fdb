"""What a stream of operations tells its client beside the answers: how far the partitions are that gave them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.proto import kv_pb2
from kvstore.server.session import Session, Unsent
from tests.server.backends import one_server
from tests.waiting import PATIENCE_S


async def test_a_client_of_an_older_ring_hears_of_the_progress_of_who_answered(tmp_path: Path) -> None:
    """Else it could read at a replica that has not seen what it wrote."""
    async with one_server(tmp_path) as (env, backend):
        session = Session(backend, env.clock)
        owner = backend.topology.ring.partition_of(b"key")
        former = next(each for each in sorted(backend.partitions) if each != owner)
        lane = kv_pb2.Lane(first=1, partition=former, keys=[b"key"], values=[b"value"], codes=[kv_pb2.PUT])
        session.accept(kv_pb2.Frame(lanes=[lane], ring_version=backend.topology.ring.routed - 1))
        await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
        (answers,) = session.take()
        progress = {each.partition: each.sequence for each in answers.progress}
        assert progress[owner] == backend.partitions[owner].state.seq > 0
        assert former in progress, "its numbering goes on from there"


async def test_streams_that_are_not_read_leave_room_for_others(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        value = b"x" * 1000
        writer = Session(backend, env.clock)
        writer.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"key"], values=[value], codes=[kv_pb2.PUT])]))
        await asyncio.wait_for(writer.wait_all_done(), PATIENCE_S)
        unsent = Unsent(40_000)
        frame = kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"key"] * 50, codes=[kv_pb2.GET] * 50)])
        sessions = [Session(backend, env.clock, unsent=unsent) for _ in range(30)]
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
