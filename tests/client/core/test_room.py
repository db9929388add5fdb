"""Callers of an AsyncClient who wait because as much is under way as may be."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.client import AsyncClient
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.core import operations
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.operation import IN_FLIGHT_MAX, Numbering, Operation
from kvstore.env.library_env import library_env
from kvstore.errors import Unavailable
from tests.client.model import ModelCluster
from tests.client.serving import serving
from tests.waiting import PATIENCE_S


async def test_callers_who_wait_are_not_woken_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many at once cost the square of their number, and are refused by the time that this takes."""
    count, tried = 5 * IN_FLIGHT_MAX, 0
    begin = Numbering.begin

    def counted(self: Numbering, operation: Operation) -> bool:
        nonlocal tried
        tried += 1
        return begin(self, operation)

    async with serving(ModelCluster(1, 1)) as servers, AsyncClient(servers.patient_url) as client:
        monkeypatch.setattr(Numbering, "begin", counted)
        versions = await asyncio.gather(*(client.put(b"%d" % number, b"v") for number in range(count)))
        assert versions == sorted(versions), "in the order of coming"
        assert tried <= 3 * count
        assert client._engine is not None
        assert client._engine._room == {}


async def test_who_stops_waiting_keeps_no_room() -> None:
    engine = AsyncEngine(library_env("test"), ClientConfig(endpoints=("127.0.0.1:1",)))
    numbering = engine._numberings["p1"]
    under_way = [operations.get(b"k") for _ in range(IN_FLIGHT_MAX)]
    assert all(map(numbering.begin, under_way))

    def waits(timeout_s: float) -> asyncio.Future[None]:
        operation = operations.get(b"k")
        operation.deadline = engine.env.clock.now() + timeout_s
        return asyncio.ensure_future(engine._wait_room(numbering, operation, timeout_s))

    late, first, second, third = (waits(timeout_s) for timeout_s in (0.0, *[PATIENCE_S] * 3))
    with pytest.raises(Unavailable, match="too many operations under way"):
        await late
    second.cancel()  # while it waits
    numbering.end(under_way.pop(0))
    engine._give_room(numbering)
    first.cancel()  # when it has just begun
    await asyncio.wait_for(third, PATIENCE_S)
    assert first.cancelled()
    assert second.cancelled()
    assert not numbering.has_room()
    assert engine._room == {}
    await engine.close()
