"""A bookie whose disks were lost and that came back at the same address: the accident that no fence survives."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvstore.bookie import Bookie
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.types import BookieId, LedgerState
from tests.bookie.peer import Peer
from tests.bookie.support import KEY, metadata, packet, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7
ADDRESS = "b1:3181"


class Machine:
    """A node that runs a bookie, and can lose its disks."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.tree = MemoryTree()
        self.ledgers = LedgerStore(MemoryStore(self.tree))
        self.ids: list[BookieId] = []

    async def boot(self) -> BookieId:
        async def main(env: object) -> None:
            store = MemoryStore(self.tree)
            await LayoutStore(store).ensure("8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47")
            async with Bookie(self.world.env("b1"), tiny(listen=ADDRESS), store) as bookie:
                self.ids.append(bookie.id)
                await asyncio.get_running_loop().create_future()

        count = len(self.ids)
        self.world.node("b1").start(main)
        while len(self.ids) == count:
            await pause(0.1)
        return self.ids[-1]

    def lose_disks(self) -> None:
        self.world.node("b1").crash(power=True)
        disk = self.world.node("b1").disk
        for directory in ("bookie/journal", "bookie/index"):
            for name in disk.list(directory):
                disk.remove(f"{directory}/{name}")

    async def connect(self) -> Peer:
        peer = Peer()
        await self.world.env("c").transport.connect(ADDRESS, peer)
        return peer


def test_wiped_bookie_neither_denies_nor_accepts_for_the_lost_one(world: SimWorld) -> None:
    async def scenario() -> None:
        machine = Machine(world)
        old = await machine.boot()
        named = metadata(L, old, BookieId("b2-x"), BookieId("b3-x"))
        await machine.ledgers.create(replace(named, token=1))
        writer = await machine.connect()
        stored = await writer.ask(wire.encode_add(1, L, 0, KEY, packet(L, 0), context=wire.bookie_context(old)))
        assert stored.status == Status.OK
        machine.lose_disks()
        new = await machine.boot()
        assert new != old

        for context in (wire.bookie_context(old), b""):
            for frame in (
                wire.encode_read(2, L, 0, context=context),
                wire.encode_read(2, L, wire.LAST_ENTRY, fence_key=KEY, context=context),
                wire.encode_read(2, L, 1, fence_key=KEY, priority=100, context=context),
                wire.encode_read_lac(2, L, context=context),
                wire.encode_add(2, L, 1, KEY, packet(L, 1), context=context),
            ):
                answer = await (await machine.connect()).ask(frame)
                assert answer.status in (Status.UNKNOWN_LEDGER_STATE, Status.FENCED)
                assert (
                    answer.status == Status.UNKNOWN_LEDGER_STATE or answer.operation == wire.BookieOperation.ADD_ENTRY
                )

    world.run(scenario())


def test_wiped_bookie_stores_nothing_of_a_recovered_ledgers_writer(
    world: SimWorld,
) -> None:
    async def scenario() -> None:
        machine = Machine(world)
        old = await machine.boot()
        machine.lose_disks()
        new = await machine.boot()
        named = metadata(L, new, BookieId("b2-x"), BookieId("b3-x"), state=LedgerState.CLOSED, last_entry=0)
        await machine.ledgers.create(replace(named, token=1))
        assert old != new
        zombie = await machine.connect()
        assert (await zombie.ask(wire.encode_add(1, L, 1, KEY, packet(L, 1)))).status == Status.FENCED

    world.run(scenario())
