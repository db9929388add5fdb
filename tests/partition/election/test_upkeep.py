"""What replicas do on the side, and when."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.env import Env
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.retention import LogRetention
from kvstore.partition.election.upkeep import LOOKS_SKIPPED_MAX, ReplicaUpkeep
from kvstore.types import PartitionId, Seq, ServerId

ROUNDS = 3


def flushes_of(partition: str, server: str, flush_s: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a replica that was started at 0 syncs its state, if all of it took no time."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if len(slept) == ROUNDS:
            raise asyncio.CancelledError
        slept.append(seconds)

    nothing: Any = None
    env = Env(nothing, nothing, nothing, nothing, nothing, nothing)
    state = SimpleNamespace(durable_seq=0, seq=1, submit_flush=lambda done: done(None))
    replica: Any = SimpleNamespace(state=state)
    config = PartitionConfig(flush_s=flush_s)
    one = ReplicaUpkeep(
        env, config, PartitionId(partition), ServerId(server), replica, nothing, nothing, nothing, nothing
    )
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(one._flush_now_and_then())
    assert one.flushes == ROUNDS
    return [sum(slept[: number + 1]) for number in range(ROUNDS)]


def test_replicas_started_together_flush_at_different_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All compacted at one moment, and no quorum was left that answered."""
    found = [flushes_of(each, at, 10.0, monkeypatch) for each in ("p1", "p2", "p3") for at in ("n1", "n2", "n3")]
    for number in range(ROUNDS):
        moments = sorted(times[number] for times in found)
        assert all(later - sooner > 0.01 for sooner, later in pairwise(moments))
        assert moments[-1] - moments[0] > 5
        assert 5 * (number + 1) <= moments[0] <= moments[-1] <= 15 * (number + 1)


class Idle:
    """What a leader's upkeep asks, while nothing is written. The clock and the looks are the test's."""

    def __init__(self) -> None:
        self.time, self.looks, self.trimmed = 0.0, 0, 0
        self.durable = {ServerId(each): Seq(7) for each in ("n1", "n2", "n3")}
        self.state = SimpleNamespace(seq=Seq(7))
        self.leading_log = self

    def now(self) -> float:
        return self.time

    async def published(self) -> dict[ServerId, Any]:
        self.looks += 1
        return {server: SimpleNamespace(durable_seq=seq, is_stopped=False) for server, seq in self.durable.items()}

    async def load(self) -> LogRetention:
        return LogRetention({})

    async def save(self, away: object) -> None:
        """Nobody reads it."""

    async def trim(self, floor: Seq, older_than_ms: int) -> int:
        return self.trimmed

    async def looks_in(self, rounds: int, monkeypatch: pytest.MonkeyPatch) -> int:
        left, self.looks = rounds, 0

        async def sleep(seconds: float) -> None:
            nonlocal left
            if not left:
                raise asyncio.CancelledError
            left, self.time = left - 1, self.time + seconds

        servers, this, nothing = tuple(self.durable), cast(Any, self), cast(Any, None)
        env = Env(this, nothing, nothing, nothing, nothing, nothing)
        one = ReplicaUpkeep(
            env, PartitionConfig(), PartitionId("p1"), servers[0], this, this, lambda: servers, nothing, this
        )
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            with pytest.raises(asyncio.CancelledError):
                await one._trim_now_and_then()
        return self.looks


async def test_idle_leader_rarely_checks_replicas_that_have_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await Idle().looks_in(1 + 3 * (LOOKS_SKIPPED_MAX + 1), monkeypatch) == 1 + 3


@pytest.mark.parametrize("busy", ["behind", "trimming", "away"])
async def test_leader_that_waits_or_trims_skips_no_check(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle()
    match busy:
        case "behind":
            idle.durable[ServerId("n3")] = Seq(6)
        case "trimming":
            idle.trimmed = 1
        case "away":
            gone = ServerId("n3")
            monkeypatch.setattr(LogRetention, "floor", lambda *_: Seq(7))
            monkeypatch.setattr(idle, "published", _without(idle, gone))
    assert await idle.looks_in(20, monkeypatch) == 20


def _without(idle: Idle, gone: ServerId) -> Any:
    async def published() -> dict[ServerId, Any]:
        return {server: each for server, each in (await Idle.published(idle)).items() if server != gone}

    return published
