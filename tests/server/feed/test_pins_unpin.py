"""The operator's unpin also releases logs that are kept for readers of the feed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from kvstore.server.feed.pins import PinKeeper
from kvstore.types import PartitionId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.server.feed.world import World

P1, P2 = PartitionId("p1"), PartitionId("p2")


async def test_hold_is_released_by_its_listed_name(tmp_path: Path) -> None:
    """An operator who runs out of disk space cannot ask the reader."""
    async with World.open(tmp_path, "p1", "p2") as world:
        pins = Pins(world.store, LedgerLists(world.store))
        held = ((P1, "stream@1"), (P2, "stream@1"), (P2, "stream@2"), (P2, "streams@1"))
        for partition, name in held:
            await pins.hold_on(partition, f"feed-{name}", 1)
        await pins.hold_on(P2, "mine", 1)
        source = SimpleNamespace(store=world.store, topology=SimpleNamespace(ring=world.ring), links=None)
        keeper = PinKeeper(world.env, source)
        assert list((await keeper.unpin("feed-stream@1")).partitions) == ["p1", "p2"]
        assert [name for name, _ in await pins.all(P2)] == ["feed-streams@1", "mine"]
        assert await pins.all(P1) == []
        await keeper.close()
