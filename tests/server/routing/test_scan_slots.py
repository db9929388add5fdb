"""Slots for scans, with slow readers and others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvstore.errors import Overloaded
from kvstore.server.routing import scan_slots
from kvstore.server.routing.scan_slots import PATIENCE_S, WAIT_S, ScanOwner, ScanSlots
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
            async with places.place("", "n") as place:
                await place.wait_read(asyncio.Event().wait())  # type: ignore[arg-type]
        except Overloaded as error:
            return str(error)
        return "read"

    reading = asyncio.ensure_future(slow())
    await asyncio.sleep(0)
    time.now = PATIENCE_S
    async with places.place("", "n"), asyncio.timeout(ENOUGH_S):
        assert "too slowly" in await reading


async def test_scan_read_after_losing_its_slot_fails(time: Time) -> None:
    places, read_on = ScanSlots(time), asyncio.Event()

    async def slow() -> None:
        async with places.place("", "n") as place:
            await place.wait_read(read_on.wait())  # type: ignore[arg-type]

    reading = asyncio.ensure_future(slow())
    await asyncio.sleep(0)
    time.now = PATIENCE_S
    read_on.set()
    async with places.place("", "n"), asyncio.timeout(ENOUGH_S):
        with pytest.raises(Overloaded, match="too slowly"):
            await reading


async def test_scan_being_read_keeps_its_slot(time: Time) -> None:
    places = ScanSlots(time)
    async with places.place("", "n") as place:
        await place.wait_read(asyncio.sleep(0))
        time.now = 10 * PATIENCE_S

        async def one_more() -> None:
            async with places.place("", "n"):
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
        async with places.place(user, "n"):
            got.append(user)

    async with asyncio.timeout(ENOUGH_S), places.place("anna", "n"):
        waiting = asyncio.ensure_future(scan("anna"))
        await scan("ben")
        await asyncio.gather(*(scan("") for _ in range(3)))
        assert not waiting.done()
    async with asyncio.timeout(ENOUGH_S):
        await waiting
    assert got == ["ben", "", "", "", "anna"]


async def test_scans_of_one_network_leave_slots_for_another() -> None:
    """Without access control, one client used to keep all others from scanning."""
    time = Time()
    places = ScanSlots(time)
    async with AsyncExitStack() as all_places, asyncio.timeout(ENOUGH_S):
        for _ in range(scan_slots.SCANS_MAX // 2):
            await all_places.enter_async_context(places.place("", "many"))
        waiting = asyncio.ensure_future(places.place("", "many").__aenter__())
        await asyncio.sleep(0)
        for _ in range(scan_slots.SCANS_MAX // 4):
            await all_places.enter_async_context(places.place("", "few"))
        await all_places.enter_async_context(places.place("", "one"))
        time.now = WAIT_S
        with pytest.raises(Overloaded, match="16 scans of network many are running"):
            await waiting
    async with asyncio.timeout(ENOUGH_S), places.place("", "many"):
        pass


async def test_scans_of_one_user_wait_beside_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 0)
    monkeypatch.setattr(scan_slots, "WAITING_MAX", 4)
    time = Time()
    places = ScanSlots(time)
    waiting = [asyncio.ensure_future(places.place("eve", "n").__aenter__()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="at most as many of one user or network as are free"):
        async with asyncio.timeout(ENOUGH_S):
            await places.place("eve", "n").__aenter__()
    waiting.append(asyncio.ensure_future(places.place("ben", "n").__aenter__()))
    await asyncio.sleep(0)
    time.now = WAIT_S
    async with asyncio.timeout(ENOUGH_S):
        failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(each) for each in failures] == ["0 scans are running; retry later"] * 3


async def test_slot_of_cancelled_scan_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 1)
    places = ScanSlots(Time())
    async with places.place("anna", "n"):
        waiting = asyncio.ensure_future(places.place("ben", "n").__aenter__())
        await asyncio.sleep(0)
    waiting.cancel()  # it was granted the slot in this very turn
    await asyncio.wait((waiting,))
    async with asyncio.timeout(ENOUGH_S), places.place("carl", "n"):
        assert [each.user for each in places._places.values()] == ["carl"]


async def test_waiting_scans_of_one_user_cost_linear_time() -> None:
    """Each waiting scan used to check all others ten times a second: 1,000 of one user blocked the event loop."""
    looks = 0

    class Counted(ScanSlots):
        def _has_free(self, owner: ScanOwner) -> bool:
            nonlocal looks
            looks += 1
            return super()._has_free(owner)

    time = Time()
    places, count = Counted(time), 200

    async def scan() -> None:
        async with places.place("eve", "n"):
            await asyncio.Event().wait()

    scans = [asyncio.ensure_future(scan()) for _ in range(scan_slots.SCANS_OF_USER_MAX + count)]
    await asyncio.sleep(0)
    assert looks <= 2 * len(scans)
    for each in scans:
        each.cancel()
    await asyncio.wait(scans)
    assert not places._places
    assert not places._waiting
    assert not places._of_owner


async def test_oldest_eligible_scan_starts_first() -> None:
    places, got = ScanSlots(Time()), list[str]()

    async def scan(user: str) -> None:
        async with places.place(user, "n"):
            got.append(user)

    async with AsyncExitStack() as all_places:
        for number in range(scan_slots.SCANS_MAX - 1):
            await all_places.enter_async_context(places.place("", str(number)))
        async with places.place("", "last"):
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
    with pytest.raises(Overloaded, match="at most 0 scans that wait"):
        async with ScanSlots(Time()).place("", "n"):
            pass
