"""Changes of the leader's znode: one at a time, and no faster than useful."""

from __future__ import annotations

import asyncio

from kvstore.env.events import end_task
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.claiming import Claiming
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.partition.election.role_events import RemoveStale
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId, ServerId
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

P, ME = PartitionId("p1"), ServerId("n1")
TWINS = LeaderRecord(ME, 1, "twin's")


async def claims_of(tree: MemoryTree) -> Claims:
    claims = Claims(MemoryStore(tree), P, ME)
    await claims.prepare()
    return claims


# docs/protocol.md H12
async def test_claiming_waits_between_removals_of_a_live_twins_znode() -> None:
    tree = MemoryTree()
    mine, twins = await claims_of(tree), await claims_of(tree)
    reread, is_gone = asyncio.Event(), asyncio.Event()
    state = ReplicaState(P, MemoryEngine(), PartitionConfig(), rings.key_hash)
    made = Claiming(mine, state, ME, "mine", feed=lambda _: None, reread=reread, is_stopped=lambda: False)

    async def remove_what_is_there() -> None:
        with_watch = mine.watch_leader(reread.set)
        try:
            while True:
                await reread.wait()
                reread.clear()
                if (found := await mine.leader()) is not None:
                    made.enqueue(RemoveStale(found))
        finally:
            with_watch.close()

    async def claim_again() -> None:
        with_watch = twins.watch_leader(is_gone.set)
        try:
            while True:
                await is_gone.wait()
                is_gone.clear()
                if await twins.leader() is None:
                    await twins.claim(TWINS)
        finally:
            with_watch.close()

    tasks = [asyncio.create_task(work) for work in (made.run(), remove_what_is_there(), claim_again())]
    assert await twins.claim(TWINS)
    for _ in range(3_000):
        await asyncio.sleep(0)
    claimed = await twins.term()
    for task in tasks:
        await end_task(task)
    assert 2 <= claimed <= 6, f"claimed {claimed} times within a moment"
