"""Reads of a range that changes hands. Its source answers them until it sends RELEASE, its target from OWN on. No
pause of a machine, seen by its clock or not, makes a read stale (docs/protocol.md M7, M9)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

import pytest

from kvstore.errors import StoreError
from kvstore.partition.leading import queries
from kvstore.partition.moves.import_driver import ImportDriver, Means
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Op
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.redirects import WAIT_S
from kvstore.types import PartitionId
from tests.sim.moving.moves import Users, World, at_each_step, first_range, hash_for, keys_in, play
from tests.sim.moving.moves_accidents import asker, crash
from tests.sim.moving.test_moves import TWO
from tests.sim.nodes import Node

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEY, OTHER = keys_in(SPAN, 2, b"k")
P1, P2 = PartitionId("p1"), PartitionId("p2")
SEEDS = range(4)
BROKEN_SEEDS = range(4, 20)
LATE_S = 3.0
"""Seconds in which the source's endpoint uses the former ring: longer than it takes until another node leads the
target."""
HIDDEN_S = 2.0
"""Seconds of a pause that the source's clock does not see. Any length works, because nothing is measured."""
APART_S = 0.002
ANSWERED_S = 30.0


class Watched:
    """A key that one endpoint reads repeatedly while another endpoint writes it."""

    def __init__(self, world: World, reader: Node, writer: Node) -> None:
        self._reader, self._read_by, self._write_by = reader, asker(reader), asker(writer)
        self.waits: list[float] = []
        self._acknowledged = 0
        self._is_over = False
        self._tasks = [world.cluster.spawn(each, name="watched") for each in (self._read(), self._write())]

    async def stop(self) -> None:
        self._is_over = True
        for task in self._tasks:
            await task

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_over:
            least, began = self._acknowledged, loop.time()
            with suppress(StoreError, TimeoutError):
                if self._reader.endpoint is not None:
                    async with asyncio.timeout(ANSWERED_S):  # a killed process never answers
                        shown = int((await self._read_by(commands.Get(KEY), None))[0])
                    assert shown >= least, f"{shown} was shown after {least} was acknowledged"
            self.waits.append(loop.time() - began)
            await asyncio.sleep(APART_S)

    async def _write(self) -> None:
        for number in itertools.count(1):
            if self._is_over:
                return
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ANSWERED_S):
                    await self._write_by(commands.Put(KEY, b"%d" % number), None)
                self._acknowledged = number
            await asyncio.sleep(APART_S)


def strike_the_target(world: World) -> None:
    """Kill the target's leader before the flip."""
    crash(world, ["p2"])


def hide_a_pause_of_the_source(world: World) -> None:
    """Pause the machine of the source's leader, with its clocks, when RELEASE is acknowledged. It does not reach the
    target's leader for a while."""
    source, target = map(world.leader_of, (P1, P2))
    if source is None or target is None or source is target:
        return
    loop, network = world.cluster.world.loop, world.cluster.world.network
    network.cut(source.name, target.name)
    source.pause(hidden=True)
    loop.call_later(HIDDEN_S, source.resume, context=Context())
    loop.call_later(HIDDEN_S + LATE_S, network.heal, source.name, target.name, context=Context())


def moved_while_read(seed: int, at: str = "", strike: Callable[[World], None] | None = None) -> list[float]:
    """Move the key away while the source's endpoint reads it and another endpoint writes it. Returns the durations
    of reads. Calls `strike` at this step."""
    waits: list[float] = []
    worlds: list[World] = []

    def reached(means: Means, step: str, move: int) -> None:
        if strike is not None and step == at and not struck:
            struck.append(move)
            asyncio.get_running_loop().call_soon(strike, worlds[0], context=Context())

    async def story(world: World, _users: Users) -> None:
        worlds.append(world)
        source, target = map(world.leader_of, (P1, P2))
        assert source is not None
        writer = next(node for node in world.cluster.nodes if node not in (source, target))
        await asker(writer)(commands.Put(KEY, b"0"), None)
        watched = Watched(world, source, writer)
        await world.shift(SPAN, "p2")
        await world.moved()
        await asyncio.sleep(LATE_S + HIDDEN_S)
        await watched.stop()
        waits.extend(watched.waits)

    struck: list[int] = []
    with at_each_step(reached):
        play(seed, story, TWO, users=0, keys=(OTHER,), counters=(), hash=hash_for(seed))
    return waits


def let_the_source_learn_late(patch: pytest.MonkeyPatch) -> None:
    """Let the source's endpoint use the former ring for a while, and keep the source's rows."""
    learn, drop = Dispatcher._on_topology, ImportDriver._drop

    def learned(self: Any) -> None:
        former = self._local.get(P1)
        if former is not None and former.serving:
            asyncio.get_running_loop().call_later(LATE_S, learn, self)
        else:
            learn(self)

    async def dropped(self: Any, leader: Any, move: Any) -> bool:
        await asyncio.sleep(LATE_S)
        return await drop(self, leader, move)

    patch.setattr(Dispatcher, "_on_topology", learned)
    patch.setattr(ImportDriver, "_drop", dropped)


@pytest.mark.parametrize("seed", SEEDS)
def test_read_during_move_waits_at_its_endpoint_no_longer_than_allowed(seed: int) -> None:
    assert max(moved_while_read(seed)) < WAIT_S


@pytest.mark.parametrize("seed", SEEDS)
def test_read_is_never_older_than_write_when_source_endpoint_learns_late(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_source_learn_late(monkeypatch)
    moved_while_read(seed, "before flip", strike_the_target if seed % 2 else None)


@pytest.mark.parametrize("seed", range(3))
def test_read_is_never_older_than_write_when_source_clock_stands_still(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_source_learn_late(monkeypatch)
    moved_while_read(seed, "after release", hide_a_pause_of_the_source)


def read_on(patch: pytest.MonkeyPatch) -> None:
    """Let a partition that has released a range answer reads of it."""

    def found(state: ReplicaState, ops: list[Op], now_ms: int, readable: Tokens) -> list[Any]:
        for each in state.ownership.released:
            readable = readable if readable.meets(each.span) else readable.with_(each.span)
        return find(state, ops, now_ms, readable)

    find = queries.find
    patch.setattr(queries, "find", found)


def test_source_that_keeps_answering_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_source_learn_late(monkeypatch)
    read_on(monkeypatch)
    for seed in BROKEN_SEEDS:
        try:
            moved_while_read(seed, "after release", hide_a_pause_of_the_source)
        except AssertionError as error:
            if "was shown after" in str(error):
                return
            raise
    pytest.fail("nobody has noticed")
