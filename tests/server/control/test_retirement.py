"""What a retired partition leaves, against readers of its feed who come just then."""

from __future__ import annotations

from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.server.control.retirement import partitions_kept, remove_log
from kvstore.types import LedgerId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.server.control.stewards import P1, World
from tests.server.control.test_steward import log_of, retire


# docs/protocol.md H5, G14
async def test_a_pin_that_was_granted_while_a_log_was_set_apart_holds_it(world: World) -> None:
    await log_of(world, P1, 1)
    await retire(world)
    pins = Pins(world.store, LedgerLists(world.store))
    get = world.store.get

    async def and_a_reader_pins(path: str) -> object:
        try:
            return await get(path)
        except NoSuchNode:
            if path == paths.kept_log(P1):  # the pins were read already, and the list is about to be emptied
                world.store.get = get  # type: ignore[method-assign]
                await pins.hold(P1, "feed-reader", LedgerId(1), deadline_ms=1_000)
            raise

    world.store.get = and_a_reader_pins  # type: ignore[assignment, method-assign]
    assert not await remove_log(world.store, P1, now_ms=0)
    assert await partitions_kept(world.store) == [P1]
    assert await pins.names(P1) == {"feed-reader"}
    assert not await remove_log(world.store, P1, now_ms=999)
    assert await remove_log(world.store, P1, now_ms=1_001)
    assert await pins.names(P1) == set()
