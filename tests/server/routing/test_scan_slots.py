"""Slots for scans, with slow readers and others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvstore.errors import Overloaded
from kvstore.server.routing import scan_slots
from kvstore.server.routing.scan_slots import PATIENCE_S, WAIT_S, ScanSlots
from tests.waiting import PATIENCE_S as ENOUGH_S


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 1)
    monkeypatch.setattr(scan_slots, "CHECK_S", 0)
    return Time()


async def test_unread_scan_gives_its_slot_to_a_waiting_one(time: Time) -> None:
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


async def test_scan_read_after_losing_its_slot_fails(time: Time) -> None:
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


async def test_scan_being_read_keeps_its_slot(time: Time) -> None:
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
        with pytest.raises(Overloaded, match="1 scans are running"):
            await waiting
    await one_more()


async def test_user_waits_only_for_own_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_OF_USER_MAX", 1)
    places = ScanSlots(Time())
    got: list[str] = []

    async def scan(user: str) -> None:
        async with places.place(user):
            got.append(user)

    async with asyncio.timeout(ENOUGH_S), places.place("anna"):
        waiting = asyncio.ensure_future(scan("anna"))
        await scan("ben")
        await asyncio.gather(*(scan("") for _ in range(3)))
        assert not waiting.done()
    async with asyncio.timeout(ENOUGH_S):
        await waiting
    assert got == ["ben", "", "", "", "anna"]


async def test_slot_of_cancelled_scan_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 1)
    places = ScanSlots(Time())
    async with places.place("anna"):
        waiting = asyncio.ensure_future(places.place("ben").__aenter__())
        await asyncio.sleep(0)
    waiting.cancel()  # it was granted the slot in this very turn
    await asyncio.wait((waiting,))
    async with asyncio.timeout(ENOUGH_S), places.place("carl"):
        assert list(places._places.values()) == ["carl"]


async def test_waiting_scans_of_one_user_cost_linear_time() -> None:
    """Each waiting scan used to check all others ten times a second: 1,000 of one user blocked the event loop."""
    looks = 0

    class Counted(ScanSlots):
        def _has_free(self, user: str) -> bool:
            nonlocal looks
            looks += 1
            return super()._has_free(user)

    time = Time()
    places, count = Counted(time), 200

    async def scan() -> None:
        async with places.place("eve"):
            await asyncio.Event().wait()

    scans = [asyncio.ensure_future(scan()) for _ in range(scan_slots.SCANS_OF_USER_MAX + count)]
    await asyncio.sleep(0)
    assert looks <= 2 * len(scans)
    for each in scans:
        each.cancel()
    await asyncio.wait(scans)
    assert not places._places
    assert not places._waiting
    assert not places._of_user


async def test_oldest_eligible_scan_starts_first() -> None:
    places, got = ScanSlots(Time()), list[str]()

    async def scan(user: str) -> None:
        async with places.place(user):
            got.append(user)

    async with AsyncExitStack() as all_places:
        for _ in range(scan_slots.SCANS_MAX - 1):
            await all_places.enter_async_context(places.place())
        async with places.place():
            scans = []
            for user in ("anna", "ben", "anna", "carl"):
                scans.append(asyncio.ensure_future(scan(user)))
                await asyncio.sleep(0)
        async with asyncio.timeout(ENOUGH_S):
            await asyncio.gather(*scans)
    assert got == ["anna", "ben", "anna", "carl"]


async def test_waiting_scans_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 0)
    monkeypatch.setattr(scan_slots, "WAITING_MAX", 0)
    with pytest.raises(Overloaded, match="0 scans already wait"):
        async with ScanSlots(Time()).place():
            pass
