"""What a leader has come to own is served once its former owner is silent, or must be (docs/protocol.md M9)."""

from __future__ import annotations

import asyncio

from kvstore.env import Nursery
from kvstore.partition.custody import GUARD_S
from kvstore.partition.leader import Leader
from kvstore.partition.target import span_of
from kvstore.ring.moves import Move, MoveId


def guard(nursery: Nursery, leader: Leader, move: Move) -> None:
    """Serve nothing of what this move brings before `leader.settle`, or GUARD_S from now: whatever becomes of those who
    look after moves, a guard ends."""
    leader.custody.guard(move.id, span_of(move))
    nursery.spawn(_lift(leader, move.id), name=f"guard of move {move.id}")


async def _lift(leader: Leader, move: MoveId) -> None:
    await asyncio.sleep(GUARD_S)
    leader.settle(move)
