"""Scans of slow readers and of others."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import Overloaded
from kvstore.server.grpc import scan_slots
from kvstore.server.grpc.scan_slots import PATIENCE_S, WAIT_S, ScanSlots
from tests.waiting import PATIENCE_S as ENOUGH_S


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 1)
    monkeypatch.setattr(scan_slots, "LOOK_S", 0)
    return Time()


async def test_a_scan_that_nobody_reads_gives_its_place_to_one_that_waits(time: Time) -> None:
    places = ScanSlots(time)

    async def slow() -> str:
        try:
            async with places.place() as place:
                await place.wait_read(asyncio.Event().wait())  # type: ignore[arg-type]
        except Overloaded as error:
            return str(error)
        return "read"

    reading = asyncio.ensure_future(slow())
    await asyncio.sleep(0)
    time.now = PATIENCE_S
    async with places.place(), asyncio.timeout(ENOUGH_S):
        assert "too slowly" in await reading


async def test_a_scan_that_is_read_on_when_its_place_is_gone_has_none(time: Time) -> None:
    places, read_on = ScanSlots(time), asyncio.Event()

    async def slow() -> None:
        async with places.place() as place:
            await place.wait_read(read_on.wait())  # type: ignore[arg-type]

    reading = asyncio.ensure_future(slow())
    await asyncio.sleep(0)
    time.now = PATIENCE_S
    read_on.set()
    async with places.place(), asyncio.timeout(ENOUGH_S):
        with pytest.raises(Overloaded, match="too slowly"):
            await reading


async def test_a_scan_that_is_read_keeps_its_place_and_one_more_is_refused_in_the_end(time: Time) -> None:
    places = ScanSlots(time)
    async with places.place() as place:
        await place.wait_read(asyncio.sleep(0))
        time.now = 10 * PATIENCE_S

        async def one_more() -> None:
            async with places.place():
                pass

        waiting = asyncio.ensure_future(one_more())
        await asyncio.sleep(0)
        time.now += WAIT_S
        with pytest.raises(Overloaded, match="1 scans are under way"):
            await waiting
    await one_more()
