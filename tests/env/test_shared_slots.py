"""A request takes the slot of the owner with the most, and the displaced request raises an error."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.env.shared_slots import SharedSlots
from kvstore.errors import Overloaded
from tests.waiting import PATIENCE_S


async def held(slots: SharedSlots, owner: str) -> None:
    async with slots.place(owner):
        await asyncio.Event().wait()


async def test_owner_with_fewer_slots_displaces_the_oldest_of_the_fullest() -> None:
    slots = SharedSlots(3, "things")
    many = [asyncio.ensure_future(held(slots, "many")) for _ in range(3)]
    await asyncio.sleep(0)
    assert (slots.is_full_for("many"), slots.is_full_for("few")) == (True, False)
    few = asyncio.ensure_future(held(slots, "few"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Overloaded, match="a user or network with fewer of them needed this slot"):
            await many[0]
        with pytest.raises(Overloaded, match="at most 3 things at this server, got one more"):
            await held(slots, "few")
    assert (len(slots), slots.refused) == (3, 2)
    for each in (*many[1:], few):
        each.cancel()
    await asyncio.wait((*many[1:], few))
    assert len(slots) == 0


async def test_timeout_of_the_request_itself_is_no_displacement() -> None:
    slots = SharedSlots(1, "things")
    with pytest.raises(TimeoutError):
        async with slots.place("n"):
            raise TimeoutError
    assert (len(slots), slots.refused) == (0, 0)
