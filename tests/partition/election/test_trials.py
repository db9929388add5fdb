"""How a replica asks the others for checksums, and how it handles changes meanwhile (docs/protocol.md, P35)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
import pytest

from kvstore.env.real import real_env
from kvstore.errors import WrittenByNewer
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.trials import Investigations
from kvstore.partition.state.checksum import Doubt
from kvstore.partition.state.rows import (
    NOTHING_REPORTED,
    REPORTED_KEY,
    ReportedDifference,
    encode_reported,
    reported_of,
)
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateImport
from kvstore.proto import entry_pb2
from kvstore.types import PartitionId, Seq, ServerId
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.waiting import PATIENCE_S, wait_until

P1 = PartitionId("p1")
ME, *OTHERS = (ServerId(f"n{number}") for number in range(1, 6))
FIRST, LATER = Seq(10), Seq(20)


class World:
    """The investigations of one of five replicas. `silent` replicas do not answer; all others have `has`."""

    def __init__(self, root: Path) -> None:
        self.env = real_env(root)
        self.silent: set[ServerId] = set()
        self.has = {FIRST: 7}
        self.asked: list[ServerId] = []
        self.on_asked: Callable[[], None] = lambda: None
        self.state = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash)
        self.try_again()

    def try_again(self) -> None:
        """Start again, as a new process does."""
        self.trials = Investigations(self.env, P1, ME, self, self.state, lambda: (ME, *OTHERS), self._nothing)  # type: ignore[arg-type]

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


async def test_silent_replicas_delay_no_investigation(world: World) -> None:
    """The leader is notified of the doubt by the replica in doubt, which may have asked the others first."""
    world.silent = set(OTHERS[:2])
    world.meet(FIRST, 7, 8)
    asking = asyncio.create_task(world.trials.run())

    async def are_all_asked() -> bool:
        return world.asked[: len(OTHERS)] == OTHERS  # and again, if this test is paused

    await wait_until(are_all_asked, what="all are asked")
    asking.cancel()


async def test_verdict_ignores_a_check_that_comes_meanwhile(world: World) -> None:
    """Regression: a replica in doubt was freed until the log's next check."""
    world.meet(FIRST, 7, 8)
    once = [lambda: world.meet(LATER, 1, 2)]
    world.on_asked = lambda: once.pop()() if once else None
    asking = asyncio.create_task(world.trials.run())
    world.has |= {LATER: 2}
    async with asyncio.timeout(PATIENCE_S):
        await asking  # outvoted
    assert world.trials.trial.is_barred
    assert world.state.is_suspect


async def test_bar_is_written_without_waiting_for_the_next_flush() -> None:
    engine = MemoryEngine()
    state = ReplicaState(P1, engine, PartitionConfig(), rings.key_hash)
    state.keep_reported(ReportedDifference(FIRST, True))

    async def is_durable() -> bool:
        return not engine._unflushed

    await wait_until(is_durable, what="it is flushed")
    engine.crash()
    assert reported_of(engine.get(REPORTED_KEY)) == (FIRST, True)


async def test_bar_survives_restart_before_other_replicas_answer(world: World) -> None:
    told: list[bool] = []
    world.silent = set(OTHERS)
    world.state.keep_reported(ReportedDifference(FIRST, True))
    world.trials.on_barred = told.append
    asking = asyncio.create_task(world.trials.run())
    await asyncio.sleep(0)
    assert (told, world.state.is_suspect) == ([True], True)
    asking.cancel()


@pytest.mark.parametrize("how", ["doubts itself", "has heard another"])
async def test_barred_replica_answers_nothing_from_its_start(world: World, how: str) -> None:
    """Other servers may ask before it has had a turn of the event loop."""
    if how == "doubts itself":
        world.state.doubt = Doubt(FIRST, 7, 8)
    else:
        world.state.keep_reported(ReportedDifference(FIRST, True))
    assert not world.state.is_suspect
    world.try_again()
    assert world.state.is_suspect


async def test_settled_difference_is_no_bar_after_restart(world: World) -> None:
    world.state.checks[FIRST] = 7
    world.state.keep_reported(ReportedDifference(FIRST, True))
    asking = asyncio.create_task(world.trials.run())

    async def is_settled() -> bool:
        return world.state.engine.get(REPORTED_KEY) is None

    await wait_until(is_settled, what="it is settled")
    assert not world.trials.trial.is_barred
    assert not world.state.is_suspect
    asking.cancel()


async def test_replica_outside_the_ring_has_no_vote(world: World) -> None:
    """It was replaced and does not know it. With the others down it would have barred a healthy replica."""
    body = orjson.dumps({"since": FIRST})
    world.trials.answer(ServerId("n9"), body)
    assert not world.trials.trial.since
    world.trials.answer(OTHERS[0], body)
    assert world.trials.trial.since == FIRST


async def test_bar_ends_when_the_state_is_replaced(world: World) -> None:
    """The next check, which would decide, may take long."""
    world.has = {}
    world.state.checks[FIRST] = 7
    world.state.keep_reported(ReportedDifference(FIRST, True))
    asking = asyncio.create_task(world.trials.run())

    async def is_tried() -> bool:
        return world.trials.rounds > 0

    await wait_until(is_tried, what="the trial is held")
    assert world.state.is_suspect
    StateImport(world.state, frozenset({OTHERS[0]})).add(entry_pb2.Chunk(format=1).SerializeToString())

    async def is_free() -> bool:
        return not world.state.is_suspect

    await wait_until(is_free, what="the bar ends")
    assert world.trials.trial.since == 0
    asking.cancel()


def install_copy(world: World, donor: ServerId) -> None:
    """Let the first chunk replace the state, and skip the others."""
    StateImport(world.state, frozenset({donor})).add(entry_pb2.Chunk(format=1).SerializeToString())
    world.state.origins = frozenset({donor})
    world.state.checks[FIRST] = 7


# docs/protocol.md P35
async def test_copy_is_confirmed_once_others_agree(world: World) -> None:
    install_copy(world, OTHERS[0])
    assert world.state.origins == {OTHERS[0]}
    await world.trials._confirm_copy()
    assert world.state.origins == frozenset()


# docs/protocol.md P35
async def test_copy_that_replaces_another_meanwhile_is_not_confirmed(world: World) -> None:
    """No other replica has agreed with the new copy yet, although it soon has the same check."""
    install_copy(world, OTHERS[0])
    once = [lambda: install_copy(world, OTHERS[1])]
    world.on_asked = lambda: once.pop()() if once else None
    await world.trials._confirm_copy()
    assert world.state.origins == {OTHERS[1]}


# docs/protocol.md P35
async def test_copy_is_not_confirmed_when_a_difference_is_reported_meanwhile(world: World) -> None:
    install_copy(world, OTHERS[0])
    world.on_asked = lambda: world.trials.trial.note_report(LATER, world.env.clock.now())
    await world.trials._confirm_copy()
    assert world.state.origins == {OTHERS[0]}


def test_reported_difference_has_golden_bytes() -> None:
    row = encode_reported(ReportedDifference(Seq(7), True))
    assert (REPORTED_KEY, row.hex()) == (b"h", "01" + "0000000000000007" + "01"), (
        "docs/reference/formats.md, State store"
    )
    assert reported_of(row) == (7, True)
    assert reported_of(None) == NOTHING_REPORTED
    with pytest.raises(WrittenByNewer, match="format 2"):
        reported_of(b"\x02" + row[1:])
