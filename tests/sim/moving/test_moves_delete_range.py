"""A range delete while some of its keys move is either done, or refused and not done. No part of it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import OutcomeUnknown, Refused, Retryable, StoreError
from kvstore.partition.state import commands
from kvstore.types import PartitionId
from tests.sim.moving.moves import Users, World, first_range, hash_for, keys_in, play
from tests.sim.moving.moves_accidents import Accident, asker
from tests.sim.moving.test_moves import TWO
from tests.sim.moving.test_moves_close import staying_keys

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
P1 = PartitionId("p1")
STEPS = ("after begin", "after copy", "after freeze", "after ask", "after flip")


async def deleted(world: World, moving: tuple[bytes, ...], staying: tuple[bytes, ...], step: str) -> Any:
    """Return the outcome of a delete of everything that p1 has, sent at that step of a move."""
    accident, found = Accident(step), list[Any]()
    ask = asker(world.cluster.nodes[0])
    for key in (*moving, *staying):
        await ask(commands.Put(key, b"v"), None)
    ring = world.ring

    async def delete() -> None:
        try:
            found.append(await asker(world.cluster.nodes[0], ring.routed)(commands.DeleteRange(b"", b""), P1))
        except StoreError as error:
            found.append(error)

    accident.strike = lambda: world.cluster.spawn(delete(), name="delete")
    for _, mover in world.movers():
        tell(mover, accident)
    await world.shift(SPAN, "p2")
    await world.moved()
    assert accident.has_struck
    (result,) = found
    return result


def tell(mover: Any, accident: Accident) -> None:
    """Report the step of a mover that has started before."""
    before = mover.means.reached

    def reached(step: str, move: int) -> None:
        before(step, move)
        accident.reached(mover.means, step, move)

    mover.means.reached = reached


@pytest.mark.parametrize("step", STEPS)
def test_range_delete_is_done_or_refused_when_some_of_its_keys_move(step: str) -> None:
    seen: list[Any] = []

    async def story(world: World, users: Users) -> None:
        moving, staying = keys_in(SPAN, 30, b"d"), staying_keys(world.ring, 30)
        result = await deleted(world, moving, staying, step)
        seen.append(result)
        ask = asker(world.cluster.nodes[0])
        left = [key for key in (*moving, *staying) if await ask(commands.Get(key), None) is not None]
        if isinstance(result, OutcomeUnknown):
            return
        if isinstance(result, Refused):
            assert isinstance(result, Retryable)
            assert left == [*moving, *staying], "the delete was refused, but keys are gone"
        else:
            assert not left, f"{result} keys were deleted, but {left} are still there"
            assert result >= len(moving) + len(staying)

    play(3, story, TWO, users=0, keys=(), counters=(), hash=hash_for(len(step)))
    assert isinstance(seen[0], int) == (step in ("after begin", "after copy")), seen
