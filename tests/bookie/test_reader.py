"""The answers of a bookie's storage: entries, last-add-confirmed, long polls."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.proto.bookkeeper import LAST_ENTRY, Status
from tests.bookie.support import KEY, Metadata, Shelf, crash, in_world, lac_packet, packet, run, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7


async def opened(world: SimWorld, meta: Metadata | None = None, **config: int) -> Shelf:
    return await Shelf(world.env("b1"), tiny(**config), meta).start()


@in_world
async def test_reader_distinguishes_missing_from_present_entries(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 3)
    assert await shelf.status(L, 2) is Status.NO_ENTRY
    assert await shelf.status(L, 4) is Status.NO_ENTRY
    assert await shelf.status(8, 0) is Status.NO_LEDGER
    assert await shelf.status(8) is Status.NO_LEDGER
    assert await shelf.status(L, -2) is Status.BAD_REQUEST
    assert await shelf.entries(L) == (Status.OK, [(3, 1)])
    assert await shelf.entries(8) == (Status.NO_LEDGER, [])


def test_read_returns_the_highest_known_lac(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await opened(world)
        await shelf.add(L, 0)
        await shelf.add(L, 1)
        assert (await shelf.read(L, 0))[2] == 0
        await shelf.write_lac(L, 1)
        assert (await shelf.read(L, 0))[2] == 1

    async def after_restart() -> None:
        shelf = await opened(world)
        assert (await shelf.read(L, 0))[2] == 1
        assert await shelf.read_lac(L) == (Status.OK, lac_packet(L, 1), packet(L, 1))

    run(world, scenario())
    crash(world)
    run(world, after_restart())


@in_world
async def test_explicit_lac_waits_for_other_records_and_delays_nobody(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    await shelf.status(L, 0, fence=True)
    syncs = shelf.storage.statistics.syncs
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    assert await shelf.write_lac(L, 0) is Status.OK
    assert 0.04 < loop.time() - began < 0.06
    began = loop.time()
    told = loop.create_future()
    shelf.storage.write_lac(L, lac_packet(L, 0), KEY, done=told.set_result)
    assert await shelf.status(L, 0, fence=True) is Status.OK
    assert loop.time() - began < 0.005
    assert told.done()
    assert shelf.storage.statistics.syncs == syncs + 2


@in_world
async def test_older_explicit_lac_does_not_replace_a_newer_one(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    assert await shelf.write_lac(L, 5) is Status.OK
    assert await shelf.write_lac(L, 3) is Status.OK
    assert (await shelf.read_lac(L))[1] == lac_packet(L, 5)


@in_world
async def test_lac_read_distinguishes_three_kinds_of_nothing(world: SimWorld) -> None:
    shelf = await opened(world)
    assert await shelf.read_lac(L) == (Status.NO_ENTRY, None, None)
    await shelf.status(L, fence=True)
    assert await shelf.read_lac(L) == (Status.NO_ENTRY, None, None)
    await shelf.write_lac(L, 4)
    assert await shelf.read_lac(L) == (Status.OK, lac_packet(L, 4), None)


@in_world
async def test_long_poll_returns_the_next_entry_when_the_lac_rises(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    await shelf.add(L, 1)
    assert shelf.poll(L, -1).result() == (Status.OK, 0, packet(L, 0), 0), "the LAC has passed already"
    poll = shelf.poll(L, 0)
    await pause(0.5)
    assert not poll.done()
    await shelf.add(L, 2)
    assert await poll == (Status.OK, 1, packet(L, 1), 1)
    by_explicit = shelf.poll(L, 1)
    await shelf.write_lac(L, 2)
    assert await by_explicit == (Status.OK, 2, packet(L, 2), 2)


@in_world
async def test_long_poll_ends_at_its_timeout_without_an_entry(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    began = asyncio.get_running_loop().time()
    assert await shelf.poll(L, 5, 700) == (Status.OK, -1, None, -1)
    assert asyncio.get_running_loop().time() == pytest.approx(began + 0.7)
    assert shelf.poll(L, 5, 0).done()
    assert shelf.poll(8, 5).result() == (Status.NO_LEDGER, -1, None, -1)
    assert not shelf.storage.inventory.ledgers[L].waiters


@in_world
async def test_long_poll_for_an_entry_elsewhere_names_none(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 4)
    assert shelf.poll(L, 0).result() == (Status.OK, -1, None, 3)


class Heard:
    """A listener that records its notifications."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bytes] | int] = []

    def entry_stored(self, entry: int, packet: bytes) -> None:
        self.told.append((entry, packet))

    def lac_raised(self, lac: int) -> None:
        self.told.append(lac)


@in_world
async def test_sender_is_answered_before_listeners_are_notified(world: SimWorld) -> None:
    """A writer waits for the answer, and a follower that applies confirmed entries takes longer than that."""
    shelf = await opened(world)
    await shelf.add(L, 0)
    heard, answers = Heard(), list[str]()
    shelf.storage.listen(L, heard)
    heard.told.clear()

    def answered(status: Status) -> None:
        answers.append(f"{status.name} after {[each for each in heard.told if isinstance(each, int)]}")

    for entry in (1, 2, 3):
        shelf.storage.add(L, entry, packet(L, entry), KEY, recovery=False, done=answered)
    await shelf.add(L, 4)
    assert answers == ["OK after []"] * 3
    assert heard.told[-1] == 3


# docs/protocol.md T11
@in_world
async def test_listener_gets_stored_packets_until_it_ends(world: SimWorld) -> None:
    shelf = await opened(world)
    heard, other = Heard(), Heard()
    assert shelf.storage.listen(L, heard) is None
    await shelf.add(L, 0)
    await shelf.add(L, 1)
    end = shelf.storage.listen(L, heard)
    end_other = shelf.storage.listen(L, other)
    assert end is not None
    assert end_other is not None
    assert heard.told == [0]
    added = shelf.submit(L, 2)
    await asyncio.sleep(0)
    assert heard.told == [0]
    assert await added is Status.OK
    assert heard.told == [0, (2, packet(L, 2)), 1]
    await shelf.write_lac(L, 2)
    assert heard.told.pop() == 2
    await shelf.add(8, 0)
    end()
    await shelf.add(L, 3)
    assert heard.told == [0, (2, packet(L, 2)), 1]
    assert other.told == [0, (2, packet(L, 2)), 1, 2, (3, packet(L, 3))]
    end_other()
    assert shelf.storage.inventory.ledgers[L].listeners == ()


@in_world
async def test_long_poll_of_a_busy_striped_ledger_is_answered(world: SimWorld) -> None:
    """The next entry is on other bookies, and something of the ledger always waits for a sync."""
    shelf = await opened(world, segment_bytes=1 << 20)
    assert await shelf.add(L, 0, lac=-1) is Status.OK
    polling, entry = shelf.poll(L, 0, 500), 2
    until = world.loop.time() + 2
    world.node("b1").disk.slow_syncs((0.01, 0.01))
    while world.loop.time() < until and not polling.done():
        shelf.submit(L, entry)
        entry += 1
        await pause(0.003)
    assert polling.done()
    assert (await polling)[:3] == (Status.OK, LAST_ENTRY, None)
