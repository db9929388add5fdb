"""What replicas do on the side, and when."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.env import Env
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.upkeep import Upkeep
from kvstore.types import PartitionId, ServerId

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
    one = Upkeep(env, config, PartitionId(partition), ServerId(server), replica, nothing, nothing, nothing, nothing)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(one._flush_now_and_then())
    assert one.flushes == ROUNDS
    return [sum(slept[: number + 1]) for number in range(ROUNDS)]


def test_replicas_that_were_started_together_do_not_write_their_files_at_one_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All compacted at one moment, and no quorum was left that answered."""
    found = [flushes_of(each, at, 10.0, monkeypatch) for each in ("p1", "p2", "p3") for at in ("n1", "n2", "n3")]
    for number in range(ROUNDS):
        moments = sorted(times[number] for times in found)
        assert all(later - sooner > 0.01 for sooner, later in pairwise(moments))
        assert moments[-1] - moments[0] > 5
        assert 5 * (number + 1) <= moments[0] <= moments[-1] <= 15 * (number + 1)
