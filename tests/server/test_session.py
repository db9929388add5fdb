"""What a stream of operations tells its client beside the answers: how far the partitions are that gave them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.proto import kv_pb2
from kvstore.server.session import Session
from tests.server.backends import one_server


async def test_a_client_of_an_older_ring_hears_of_the_progress_of_who_answered(tmp_path: Path) -> None:
    """Else it could read at a replica that has not seen what it wrote."""
    async with one_server(tmp_path) as (env, backend):
        session = Session(backend, env.clock)
        owner = backend.topology.ring.partition_of(b"key")
        former = next(each for each in sorted(backend.partitions) if each != owner)
        lane = kv_pb2.Lane(first=1, partition=former, keys=[b"key"], values=[b"value"], codes=[kv_pb2.PUT])
        session.accept(kv_pb2.Frame(lanes=[lane], ring_version=backend.topology.ring.routed - 1))
        await asyncio.wait_for(session.wait_all_done(), 5)
        (answers,) = session.take()
        progress = {each.partition: each.sequence for each in answers.progress}
        assert progress[owner] == backend.partitions[owner].state.seq > 0
        assert former in progress, "its numbering goes on from there"
