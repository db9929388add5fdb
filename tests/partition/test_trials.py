"""How a replica asks the others what they have, and what it makes of what happens meanwhile (docs/protocol.md, P35)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
import pytest

from kvstore.env.real import real_env
from kvstore.partition.checksum import Doubt
from kvstore.partition.config import PartitionConfig
from kvstore.partition.engine_memory import MemoryEngine
from kvstore.partition.state import State
from kvstore.partition.trials import Trials
from kvstore.types import PartitionId, Seq, ServerId
from tests.waiting import PATIENCE_S, wait_until

P1 = PartitionId("p1")
ME, *OTHERS = (ServerId(f"n{number}") for number in range(1, 6))
FIRST, LATER = Seq(10), Seq(20)


class World:
    """The trials of one of five replicas; `silent` do not answer, all others have `has`."""

    def __init__(self, root: Path) -> None:
        self.env = real_env(root)
        self.silent: set[ServerId] = set()
        self.has = {FIRST: 7}
        self.asked: list[ServerId] = []
        self.on_asked: Callable[[], None] = lambda: None
        self.state = State(P1, MemoryEngine(), PartitionConfig())
        self.trials = Trials(self.env, P1, ME, self, self.state, lambda: (ME, *OTHERS), self._nothing)  # type: ignore[arg-type]

    async def _nothing(self) -> None:
        return None

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        self.asked.append(server)
        if server in self.silent:
            await asyncio.Event().wait()
        self.on_asked()
        return orjson.dumps({"checks": list(self.has.items()), "origins": []})

    def meet(self, seq: Seq, mine: int, logged: int) -> None:
        """Apply a check of the log."""
        self.state.checks[seq] = mine
        self.state.doubt = Doubt(seq, mine, logged) if mine != logged else None
        self.state.on_doubt()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.env.nursery.close()


async def test_those_that_are_silent_delay_nobody(world: World) -> None:
    """The leader is told that it is doubted by whoever doubts it, who may have asked the others first."""
    world.silent = set(OTHERS[:2])
    world.meet(FIRST, 7, 8)
    asking = asyncio.create_task(world.trials.run())

    async def are_all_asked() -> bool:
        return world.asked == OTHERS

    await wait_until(are_all_asked, what="all are asked")
    asking.cancel()


async def test_a_verdict_says_nothing_about_a_check_that_comes_while_the_others_are_asked(world: World) -> None:
    """It let one in doubt go free, until the log's next check."""
    world.meet(FIRST, 7, 8)
    once = [lambda: world.meet(LATER, 1, 2)]
    world.on_asked = lambda: once.pop()() if once else None
    asking = asyncio.create_task(world.trials.run())
    world.has |= {LATER: 2}
    async with asyncio.timeout(PATIENCE_S):
        await asking  # outvoted
    assert world.trials.trial.is_barred
    assert world.state.is_suspect
