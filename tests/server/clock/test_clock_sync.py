"""Which servers are asked for the cluster time, and which answers count (docs/protocol.md, P28)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.env.clock import Unjudged
from kvstore.env.real import real_env
from kvstore.errors import Unavailable
from kvstore.server.clock import clock_sync as module
from kvstore.server.clock.clock_judge import PeerClock
from kvstore.server.clock.clock_sync import (
    CALL_S,
    REPORTS_MORE,
    ClockReport,
    ClockSync,
    JudgedClock,
    _clock_of,
    decode,
    encode,
)
from kvstore.types import PartitionId, ServerId
from tests.waiting import wait_until

A, B, C = map(ServerId, "abc")
DATE_MS = 1_790_000_000_000
RING: Any = SimpleNamespace(version=1, partitions={"p1": SimpleNamespace(replicas=(A, B, C))})


class Clock(Unjudged):
    at = 100.0

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return DATE_MS + round((self.at - 100.0) * 1000)


class Others:
    """Two servers that are sure of the current time, and answer slowly."""

    def __init__(self, clock: Clock) -> None:
        self.takes_s, self.asked, self.answer = 0.0, 0, b""
        self._clock = clock

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        self.asked += 1
        if self.answer == b"refuses":
            raise Unavailable(server)
        told = self.answer or encode(ClockReport(self._clock.wall_ms(), True))
        self._clock.at += self.takes_s
        return told


class World:
    def __init__(self, clock_sync: ClockSync, others: Others) -> None:
        self.clock_sync, self.others = clock_sync, others

    async def rounds(self, count: int) -> None:
        until = self.others.asked + 2 * count

        async def asked() -> bool:
            return self.others.asked >= until

        await wait_until(asked, what="the others are asked")


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "ASK_UNKNOWN_S", 0.01)
    monkeypatch.setattr(module, "ASK_S", 0.01)
    raw = Clock()
    clock = JudgedClock(raw, A)  # type: ignore[arg-type]
    env = replace(real_env(tmp_path), clock=clock)
    others = Others(raw)
    yield World(ClockSync(env, A, clock, others, lambda: RING), others)
    await env.nursery.close()


async def test_timely_answer_counts(world: World) -> None:
    world.clock_sync.start()
    await world.rounds(2)
    assert world.clock_sync.clock.has_date()
    await world.clock_sync.close()


async def test_late_answer_says_nothing_about_the_date(world: World) -> None:
    """An event loop paused between question and answer, here or there: half of the pause is the possible error."""
    world.others.takes_s = CALL_S + 0.1
    world.clock_sync.start()
    await world.rounds(5)
    assert not world.clock_sync.clock.has_date()
    await world.clock_sync.close()


async def test_answer_from_before_clock_jump_confirms_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, others = world.clock_sync.clock, world.others

    async def call(*_: object) -> bytes:
        told = encode(ClockReport(raw.wall_ms(), True))
        raw.at += 0.1
        monkeypatch.setattr(clock, "wall_ms", lambda: raw.wall_ms() + 60_000)
        clock.poll()  # as the sampling timer does while the answer is under way
        raw.at += 0.1
        return told

    raw: Any = others._clock
    raw.at += 1.0
    for server in (B, C):
        await world.clock_sync._ask(server)
    assert clock.judge.is_sure
    monkeypatch.setattr(others, "call", call)
    await world.clock_sync._ask(B)
    assert not clock.judge.is_confirmed


async def test_servers_of_earlier_releases_are_understood(world: World) -> None:
    """Their answers have four elements and do not state whether there is a time: a server that is sure has one."""
    world.others.answer = b""
    world.clock_sync.start()
    await world.rounds(2)
    assert len(msgspec.msgpack.decode(world.clock_sync.answer(B, "date", b""))) == 4
    assert len(msgspec.msgpack.decode(world.clock_sync.answer(B, "date", REPORTS_MORE))) == 6
    assert _clock_of(decode(encode((1_000, True, "", 300.0))), 1.0, 2.0) == PeerClock(0, 300.0, True, 2.0)
    assert _clock_of(decode(encode((1_000, False, "why", 300.0))), 1.0, 2.0) == PeerClock(None, 0.0, False, 2.0)
    assert _clock_of(decode(encode((1_000, False, "why", 300.0, True))), 1.0, 2.0) == PeerClock(-300.0, 0.0, False, 2.0)
    await world.clock_sync.close()


@pytest.mark.parametrize("answer", [b"refuses", b"?", encode("sure"), encode([1, "sure"]), encode([1.5, True])])
async def test_silent_server_is_asked_again(world: World, answer: bytes) -> None:
    world.others.answer = answer
    world.clock_sync.start()
    await world.rounds(2)
    assert not world.clock_sync.clock.has_date()
    world.others.answer = b""
    await world.rounds(2)
    assert world.clock_sync.clock.has_date()
    await world.clock_sync.close()
