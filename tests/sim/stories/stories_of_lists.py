"""Stories of a leader whose last writes arrive late at its disk or at its log's list."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.wal.lists import LedgerLists
from tests.sim.stories.scenarios import Stage
from tests.sim.world.loop import current_node


async def list_written_late(stage: Stage) -> None:
    """The leader is cut off from the others while the list of its next ledger is on its way to the metadata store.
    Another leader takes over, lists its own ledger and acknowledges writes. Then the list of the first leader
    arrives."""
    old = stage.leader
    begun, on_its_way = asyncio.Event(), asyncio.Event()
    original = LedgerLists.write

    async def write(self: Any, *args: Any, **options: Any) -> int:
        process = current_node.get()
        if process is not None and process.name == old.name:
            begun.set()
            await on_its_way.wait()
        return await original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerLists, "write", write)
        held: list[Any] = []
        while not begun.is_set():
            held.append(stage.spawn(stage.put(old)))
            await asyncio.sleep(0.02)
        for other in stage.others(old):
            stage.world.network.cut(old.name, other.name)
        stage.cluster.metadata.cut(old.name)
        stage.unseat(old)
        new = await stage.until_led_by_another(old)
        for _ in range(3):
            await stage.put_until_done(new)
        stage.cluster.metadata.mend(old.name)
        await asyncio.sleep(1.0)
        on_its_way.set()
        await asyncio.sleep(1.0)
        stage.world.network.heal()
        for each in held:
            await each


async def power_fails_before_the_sync(stage: Stage) -> None:
    """Disks are slow, and the power fails everywhere while a write is on its way to them."""
    old = stage.leader
    await stage.put_until_done(old)
    for node in stage.cluster.nodes:
        node.disk.slow_syncs((0.3, 0.3))
    in_flight = [stage.spawn(stage.put(old)) for _ in range(3)]
    await asyncio.sleep(0.1)
    for node in stage.cluster.nodes:
        node.crash(power=True)
    for node in stage.cluster.nodes:
        node.disk.slow_syncs((0.0, 0.0))
        node.start()
    for each in in_flight:
        await each
