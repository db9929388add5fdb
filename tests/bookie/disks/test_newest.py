"""A bookie reports the newest of the cluster's own ledgers that it has seen (docs/protocol.md, G27)."""

from __future__ import annotations

from dataclasses import replace

from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import master_key
from kvstore.types import NO_LEDGER, LedgerId
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.support import Metadata, Shelf, crash, in_world, metadata, run, tiny
from tests.sim.world.env import SimWorld

OURS, FOREIGN = b"ours", b"theirs"


def is_ours(_ledger: LedgerId, key: bytes) -> bool:
    return key == master_key(OURS)


class Owned(Metadata):
    """Ledgers below 1,000 are the cluster's own."""

    def __init__(self) -> None:
        super().__init__()
        for ledger in (3, 7, 8, 1_000):
            self.known[ledger] = replace(metadata(ledger), password=OURS if ledger < 1_000 else FOREIGN)


async def opened(world: SimWorld, meta: Metadata) -> Shelf:
    return await Shelf(world.env("b1"), tiny(), meta, is_ours).start()


# docs/protocol.md G27
def test_newest_own_ledger_is_the_highest_with_a_key_of_the_cluster(world: SimWorld) -> None:
    meta = Owned()

    async def write() -> None:
        shelf = await opened(world, meta)
        assert shelf.storage.own_ledgers.newest == NO_LEDGER
        assert await shelf.add(7, 0, key=master_key(OURS)) is Status.OK
        assert await shelf.add(3, 0, key=master_key(OURS)) is Status.OK
        assert await shelf.add(1_000, 0, key=master_key(FOREIGN)) is Status.OK
        assert await shelf.add(8, 0, key=master_key(FOREIGN)) is Status.UNAUTHORIZED
        assert shelf.storage.own_ledgers.newest == 7

    async def again() -> None:
        assert (await opened(world, meta)).storage.own_ledgers.newest == 7

    run(world, write())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


@in_world
async def test_fence_and_greeting_count_as_seen(world: SimWorld) -> None:
    shelf = await opened(world, Owned())
    assert await shelf.status(7, fence=True, key=master_key(OURS)) is Status.NO_ENTRY
    assert shelf.storage.own_ledgers.newest == 7
    assert await shelf.write_lac(8, -1, key=master_key(OURS)) is Status.OK
    assert shelf.storage.own_ledgers.newest == 8


@in_world
async def test_dropped_ledger_counts_until_the_bookie_restarts(world: SimWorld) -> None:
    meta = Owned()
    shelf = await opened(world, meta)
    assert await shelf.add(7, 0, key=master_key(OURS)) is Status.OK
    meta.known[7] = None
    await Reclaimer(shelf.env, tiny(), shelf.storage, meta).drop_deleted()
    assert 7 not in shelf.storage.inventory.ledgers
    assert shelf.storage.own_ledgers.newest == 7


def test_newest_ledger_is_sent_only_to_clients_that_ask(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        served.shelf.storage.own_ledgers.newest = LedgerId(41)
        assert (await peer.ask(wire.encode_bookie_info(1, wire.NEWEST_LEDGER))).newest_ledger == 41
        assert (await peer.ask(wire.encode_bookie_info(2))).newest_ledger is None

    serve(world, scenario)
