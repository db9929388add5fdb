"""One replica over a log and a metadata store in memory: everything it starts ends, whenever the end comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.real import real_env
from kvstore.errors import NoSuchLedger, Unavailable
from kvstore.meta.memory import MemoryStore
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election import role_events
from kvstore.partition.election.handover import PREPARE, HandoverTurns, Prepare
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.partition.election.replica import Replica
from kvstore.partition.election.role_machine import ReplicaRole
from kvstore.partition.election.tail import Tail
from kvstore.partition.election.trials import Investigations
from kvstore.partition.leading.leader import Leader
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId, Position, Seq, ServerId
from kvstore.wal.ledger_list import BEGINNING
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.waiting import PATIENCE_S

P1, ME, OTHER = PartitionId("p1"), ServerId("me"), ServerId("other")


class Log:
    """An empty log for any reader or leader."""

    recovered_end, epoch = BEGINNING, 1

    def __init__(self) -> None:
        self.unopened: Exception | None = None
        """Why it cannot be opened; None if it can."""
        self.readers = 0
        self.reader_closes = asyncio.Event()

    def reader(self, partition: PartitionId, position: Position | None) -> Log:
        self.readers += 1
        return self

    async def read(self, wait_ms: int, taker: object = None) -> list[Any]:
        return await asyncio.get_running_loop().create_future()

    def give_now(self) -> None:
        pass

    async def close(self) -> None:
        """Never return on the first call."""
        if not self.reader_closes.is_set():
            self.reader_closes.set()
            await asyncio.get_running_loop().create_future()

    async def open_as_leader(self, *_: Any) -> Log:
        if self.unopened is not None:
            raise self.unopened
        return self

    def close_for_good(self) -> None:
        pass


class World:
    def __init__(self, root: Path) -> None:
        self.env, self.store, self.log = real_env(root), MemoryStore(), Log()
        self.begun: list[Leader] = []
        self.has_begun = asyncio.Event()
        state, nobody, logs = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash), None, self.log
        self.replica = Replica(
            self.env,
            PartitionConfig(),
            P1,
            ME,
            Claims(self.store, P1, ME),
            logs,  # type: ignore[arg-type]
            nobody,  # type: ignore[arg-type]
            state,
            Tail(P1, state, logs, self._nothing),  # type: ignore[arg-type]
            lambda: (ME,),
            lambda leader: None,
            HandoverTurns(),
            self._begin,
            Investigations(self.env, P1, ME, nobody, state, lambda: (ME,), Claims(self.store, P1, ME).trusted),  # type: ignore[arg-type]
        )

    async def _nothing(self) -> None:
        raise AssertionError("nothing is trimmed here")

    async def _begin(self, leader: Leader) -> None:
        self.begun.append(leader)
        self.has_begun.set()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.env.nursery.close()


async def test_candidate_keeps_tailing_when_another_leader_is_known(world: World) -> None:
    """Regression: it became the leader later, and never tailed again."""
    world.replica.start()
    async with asyncio.timeout(PATIENCE_S):
        await world.log.reader_closes.wait()
    assert world.replica.role is ReplicaRole.OPENING
    opening = world.replica._opening
    assert opening is not None
    world.replica._feed(role_events.LeaderRead(LeaderRecord(OTHER, 1, "nonce"), False))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(asyncio.CancelledError):
            await opening  # type: ignore[misc]
    assert (world.replica.leader, world.begun) == (None, [])
    assert world.replica.following.is_running


async def test_lead_failure_is_reported_until_there_is_a_leader(world: World) -> None:
    world.log.reader_closes.set()
    world.log.unopened = NoSuchLedger("ledger 7: no metadata is stored")
    world.replica.start()
    while not world.replica.lead_failure:
        await world.replica.role_change(PATIENCE_S)
    assert "ledger 7" in world.replica.lead_failure
    world.replica._feed(role_events.LeaderRead(LeaderRecord(OTHER, 1, "nonce"), False))
    assert world.replica.leader_server == OTHER
    assert world.replica.lead_failure == ""


# docs/protocol.md P26
async def test_prepare_is_accepted_only_by_the_intended_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of the same server has only just started, and its state is unknown."""
    prepared: list[PartitionId] = []

    async def prepare(partition: PartitionId) -> None:
        prepared.append(partition)

    monkeypatch.setattr(world.log, "prepare", prepare, raising=False)
    for nonce, is_ready in (("another's", False), (world.replica._nonce, True)):
        asked = Prepare(OTHER, nonce, Seq(0), False).encode()
        if is_ready:
            assert await world.replica.answer(OTHER, PREPARE, asked) == b"1"
        else:
            with pytest.raises(Unavailable, match="not ready to lead"):
                await world.replica.answer(OTHER, PREPARE, asked)
        assert prepared == [P1] * is_ready


# docs/protocol.md P26, P41
@pytest.mark.parametrize("is_planned", [True, False])
async def test_replica_that_cannot_write_refuses_the_lead(
    world: World, monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    async def no_inodes() -> str:
        return "no inodes are free"

    sick = replace(world.env, writable=no_inodes)
    monkeypatch.setattr(world.replica._candidate_fitness, "_env", sick)
    asked = Prepare(OTHER, world.replica._nonce, Seq(0), is_planned).encode()
    with pytest.raises(Unavailable, match="me is not fit to lead: no inodes are free"):
        await world.replica.answer(OTHER, PREPARE, asked)


async def test_stopped_replica_watches_nothing(world: World) -> None:
    world.replica.start()
    async with asyncio.timeout(PATIENCE_S):
        await world.log.reader_closes.wait()
    assert world.store._watches
    await world.replica.stop(hand_over=False)
    await world.env.nursery.close()
    assert not world.store._watches


# docs/protocol.md P35
@pytest.mark.parametrize("said", [(True, False), (False, True)])
async def test_last_finding_within_a_turn_bars_or_frees(world: World, said: tuple[bool, bool]) -> None:
    """Regression: a replica whose investigation had ended stayed barred, or one in doubt was freed."""
    world.replica._machine.is_barred = said[1]
    for each in said:
        world.replica.following.bar_soon(each)
    await asyncio.sleep(0)
    assert world.replica._machine.is_barred is said[1]


class Proving:
    """A leader that records its requests."""

    serving = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def submit(self, *_: Any) -> None:
        self.asked.append("read")

    async def prove(self) -> None:
        self.asked.append("append")
        raise Unavailable("no room")


# docs/protocol.md P23
async def test_leader_proves_itself_when_znode_names_another(world: World) -> None:
    """A read of a key of another partition would go there and prove nothing."""
    leader = world.replica.leader = Proving()  # type: ignore[assignment]
    world.replica._prove()
    await asyncio.sleep(0)
    assert leader.asked == ["append"]  # type: ignore[attr-defined]
    leader.serving = False  # type: ignore[misc]  # nothing may follow its release
    world.replica._prove()
    await asyncio.sleep(0)
    assert leader.asked == ["append"]  # type: ignore[attr-defined]
    world.replica.leader = None


async def test_stopping_replica_ends_an_idle_leader(world: World) -> None:
    """Regression: its timers fired after the engine was closed."""
    world.log.reader_closes.set()
    world.replica.start()
    async with asyncio.timeout(PATIENCE_S):
        await world.has_begun.wait()
    (leader,) = world.begun
    await world.replica.stop(hand_over=False)
    assert leader._stopped is not None
