"""Whatever a power cut leaves, at whatever moment: what was promised holds, and nothing is half there."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvstore.bookie.journal.record import FILE_HEADER_SIZE
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import FAST, Metadata, Shelf, crash, lac_packet, packet, run, segments, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog, _Marked, crash_images
from tests.sim.world.pause import pause

pytestmark = pytest.mark.sim

LEDGERS = (1, 2, 3)
FENCED = 4
"""Fenced before it was ever written to."""


def payload_of(ledger: int, entry: int) -> bytes:
    return bytes([ledger, entry % 251]) * (entry * 37 % 200)


class Writer:
    """Adds, fences and LACs on one storage; marks each in the log of operations when it is promised."""

    def __init__(self, shelf: Shelf, oplog: OpLog) -> None:
        self._shelf = shelf
        self._oplog = oplog

    async def work(self, first: int, count: int) -> None:
        """Several entries in flight on each ledger; in the middle one ledger is fenced, and one never seen."""
        answers = []
        for entry in range(first, first + count):
            for ledger in LEDGERS:
                answers.append(self._add(ledger, entry))
            if entry == first + count // 2:
                answers += [self._fence(3), self._fence(FENCED)]
                assert await self._shelf.write_lac(1, entry - 1) is Status.OK
                self._oplog.mark(("lac", 1, entry - 1))
            if entry % 3 == 0:
                await answers[-1]
        for answer in answers:
            await answer

    def _add(self, ledger: int, entry: int) -> asyncio.Future[Status]:
        answer = self._shelf.submit(ledger, entry, payload_of(ledger, entry), recovery=ledger == 2)

        def note(answer: asyncio.Future[Status]) -> None:
            if answer.result() is Status.OK:
                self._oplog.mark(("entry", ledger, entry))
            else:
                assert (ledger, answer.result()) == (3, Status.FENCED)

        answer.add_done_callback(note)
        return answer

    def _fence(self, ledger: int) -> asyncio.Future[object]:
        answer = self._shelf.submit_read(ledger, fence=True)
        answer.add_done_callback(lambda _: self._oplog.mark(("fence", ledger)))
        return answer  # type: ignore[return-value]


async def check(shelf: Shelf, promises: tuple[object, ...], last: int) -> None:
    """What was promised holds; what is there is whole; nothing is in doubt."""
    assert shelf.storage.statistics.damaged_records == 0
    assert not shelf.storage.inventory.is_limbo
    there = {}
    for ledger in LEDGERS:
        for entry in range(last):
            status, body, _ = await shelf.read(ledger, entry)
            assert status in (Status.OK, Status.NO_ENTRY, Status.NO_LEDGER)
            if body is not None:
                assert body == packet(ledger, entry, payload_of(ledger, entry))
                there[ledger, entry] = True
    for promise in promises:
        match promise:
            case ("entry", ledger, entry):
                assert (ledger, entry) in there, f"entry {entry} of ledger {ledger} was acknowledged"
            case ("fence", ledger):
                assert await shelf.add(ledger, last) is Status.FENCED, f"ledger {ledger} was fenced"
            case ("lac", ledger, lac):
                assert (await shelf.read_lac(ledger))[1] == lac_packet(ledger, lac)


def on_disk(world: SimWorld, disk: SimDisk, name: str) -> str:
    """A node with this disk."""
    world.node(name).disk = disk
    return name


IMAGES = 2000


def test_acknowledged_records_survive_a_power_cut_at_any_moment(world: SimWorld, seed: int) -> None:
    disk = world.node("b1").disk
    oplog = OpLog(disk)

    async def write() -> None:
        shelf = await Shelf(world.env("b1")).start()
        await Writer(shelf, oplog).work(0, 24)
        shelf.storage.stop()

    run(world, write())
    assert len(segments(disk)) >= 4
    for number, image in enumerate(crash_images(oplog, IMAGES, Random(seed))):
        node = on_disk(world, image.disk, f"image{number}")

        async def read(node: str = node, marks: tuple[object, ...] = image.marks) -> None:
            shelf = await Shelf(world.env(node)).start()
            await check(shelf, marks, 24)

        try:
            run(world, read(), node)
        except BaseException as error:
            error.add_note(image.name)
            raise


def test_power_cut_during_the_start_after_a_power_cut_loses_nothing(world: SimWorld, seed: int) -> None:
    """Also twice: the first start writes again what it is not sure of, and may be cut short in that."""
    disk = world.node("b1").disk
    oplog = OpLog(disk)

    async def write(node: str, log: OpLog, first: int) -> None:
        shelf = await Shelf(world.env(node)).start()
        await Writer(shelf, log).work(first, 8)

    run(world, write("b1", oplog, 0))
    number = 0
    for image in crash_images(oplog, 25, Random(seed)):
        number += 1
        node = on_disk(world, image.disk, f"first{number}")
        again = OpLog(image.disk)

        async def restart(node: str = node) -> None:
            await Shelf(world.env(node)).start()

        run(world, restart(), node)
        for second in crash_images(again, 25, Random(seed + number)):
            number += 1
            node = on_disk(world, second.disk, f"second{number}")

            async def read(node: str = node, marks: tuple[object, ...] = image.marks) -> None:
                shelf = await Shelf(world.env(node)).start()
                await check(shelf, marks, 8)

            try:
                run(world, read(), node)
            except BaseException as error:
                error.add_note(f"{image.name}; then {second.name}")
                raise


# docs/protocol.md B9
def test_power_cut_while_a_start_removes_empty_segments_loses_nothing(world: SimWorld, seed: int) -> None:
    disk = world.node("b1").disk
    promises = OpLog(disk)

    async def write() -> None:
        shelf = await Shelf(world.env("b1")).start()
        await Writer(shelf, promises).work(0, 8)
        shelf.storage.stop()

    async def idle(node: str) -> None:
        await Shelf(world.env(node)).start()
        await pause(0.1)

    run(world, write())
    marks = tuple(op.promise for op in promises.ops if isinstance(op, _Marked))
    assert len(marks) > 20
    for _ in range(2):
        crash(world, power=False)
        run(world, idle("b1"))
    crash(world, power=False)
    before = segments(disk)
    oplog = OpLog(disk)
    run(world, idle("b1"))
    assert len(segments(disk)) == len(before), "of three starts only the last has left a segment, and one ahead"
    for number, image in enumerate(crash_images(oplog, 400, Random(seed))):
        node = on_disk(world, image.disk, f"image{number}")

        async def read(node: str = node) -> None:
            shelf = await Shelf(world.env(node)).start()
            await check(shelf, marks, 8)

        try:
            run(world, read(), node)
        except BaseException as error:
            error.add_note(image.name)
            raise


def test_many_power_cuts_in_a_row_lose_nothing(seed: int) -> None:
    for round_seed in range(seed, seed + 12):
        with SimWorld(round_seed, disk=FAST) as world:
            cut_again_and_again(world, Random(round_seed))


def cut_again_and_again(world: SimWorld, random: Random) -> None:
    """Life after life on one disk, each ended by a cut in the middle of its work."""
    promised: list[object] = []
    meta = Metadata()

    async def life(first: int) -> None:
        shelf = await Shelf(world.env("b1"), tiny(segment_bytes=2048), meta).start()
        await check(shelf, tuple(promised), first)
        for entry in range(first, first + 10):
            for ledger in LEDGERS[:2]:
                answer = shelf.submit(ledger, entry, payload_of(ledger, entry))
                answer.add_done_callback(
                    lambda answer, ledger=ledger, entry=entry: (
                        promised.append(("entry", ledger, entry)) if answer.result() is Status.OK else None
                    )
                )
            if random.random() < 0.5:
                await answer

    for number in range(12):
        run(world, life(number * 10))
        world.node("b1").crash(power=random.random() < 0.8)


def test_group_torn_at_any_sector_is_dropped_from_there_on(world: SimWorld, seed: int) -> None:
    """Unsynced bytes may reach the platter in any order: what follows a bad record is not believed."""
    disk = world.node("b1").disk

    async def write() -> None:
        shelf = await Shelf(world.env("b1"), tiny(segment_bytes=1 << 15)).start()
        assert await shelf.add(1, 0) is Status.OK
        disk.slow_syncs((1000, 1000))
        for entry in range(1, 40):
            shelf.submit(1, entry, payload_of(1, entry))
        shelf.storage.journal._flush()

    run(world, write())
    world.node("b1").crash()
    random = Random(seed)
    for number in range(100):
        copy = disk.copy(random)
        copy.slow_syncs((0.001, 0.001))
        copy.power_cut(random=random)
        node = on_disk(world, copy, f"torn{number}")

        async def read(node: str = node) -> None:
            shelf = await Shelf(world.env(node), tiny(segment_bytes=1 << 15)).start()
            _, runs = await shelf.entries(1)
            assert len(runs) == 1
            assert runs[0][0] == 0
            assert shelf.storage.statistics.damaged_records == 0
            for entry in range(1, runs[0][1]):
                assert (await shelf.read(1, entry))[1] == packet(1, entry, payload_of(1, entry))

        run(world, read(), node)
    assert disk.names.now.files[segments(disk)[0]].cache.size > FILE_HEADER_SIZE
