"""The rules of a bookie's storage, in the simulated world."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from kvstore.bookie.journal.record import FileHeader, encode_file_header
from kvstore.bookie.journal.segment import segment_name
from kvstore.bookie.replay import replay
from kvstore.env.disk import DirectoryDisk
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.support import KEY, OTHERS, Metadata, Shelf, crash, in_world, metadata, packet, run, segments, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7


async def opened(world: SimWorld, meta: Metadata | None = None, **config: int) -> Shelf:
    return await Shelf(world.env("b1"), tiny(**config), meta).start()


def test_acknowledged_entry_is_readable_even_after_a_power_cut(world: SimWorld) -> None:
    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 0, b"a") is Status.OK
        assert await shelf.add(L, 1, b"b") is Status.OK
        assert await shelf.payload(L, 0) == b"a"

    async def read() -> None:
        shelf = await opened(world)
        assert [await shelf.payload(L, entry) for entry in (0, 1)] == [b"a", b"b"]
        assert await shelf.read(L) == (Status.OK, packet(L, 1, b"b"), 0)

    run(world, write())
    crash(world)
    run(world, read())


@in_world
async def test_adds_that_arrive_during_a_sync_share_the_next_one(world: SimWorld) -> None:
    shelf = await opened(world, segment_bytes=1 << 16)
    await shelf.add(L, 0)
    before = shelf.storage.statistics.syncs
    first = shelf.submit(L, 1)
    await pause(0.0005)
    rest = [shelf.submit(L, entry) for entry in range(2, 50)]
    assert await first is Status.OK
    assert not any(answer.done() for answer in rest)
    assert {await answer for answer in rest} == {Status.OK}
    assert shelf.storage.statistics.syncs == before + 2


@in_world
async def test_add_is_neither_acknowledged_nor_shown_before_its_sync(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    world.node("b1").disk.slow_syncs((10, 10))
    add, read, fencing = shelf.submit(L, 1), shelf.submit_read(L, 1), shelf.submit_read(L, 1, fence=True)
    await pause(5)
    assert not add.done()
    assert not read.done()
    assert not fencing.done()
    assert await shelf.read(L, 0) == (Status.OK, packet(L, 0), -1)
    assert await add is Status.OK
    assert (await read)[:2] == (Status.OK, packet(L, 1))
    assert (await fencing)[:2] == (Status.OK, packet(L, 1))


@in_world
async def test_fencing_read_sees_every_earlier_add_and_stops_every_later_one(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    before, fencing, after = shelf.submit(L, 1), shelf.submit_read(L, fence=True), shelf.submit(L, 2)
    assert await after is Status.FENCED
    assert await before is Status.OK
    assert (await fencing)[1] == packet(L, 1)
    assert await shelf.add(L, 1) is Status.FENCED, "an entry that it holds is no exception"
    assert await shelf.add(L, 2, recovery=True) is Status.OK


@pytest.mark.parametrize("power", [True, False])
def test_fence_outlives_a_crash_right_after_its_answer(world: SimWorld, power: bool) -> None:
    async def fence() -> None:
        shelf = await opened(world)
        await shelf.add(L, 0)
        assert await shelf.status(L, 0, fence=True) is Status.OK
        assert await shelf.status(8, 0, fence=True) is Status.NO_ENTRY, "never seen, and fenced all the same"

    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 1) is Status.FENCED
        assert await shelf.add(8, 0) is Status.FENCED
        assert shelf.meta.asked == []

    run(world, fence())
    crash(world, power=power)
    run(world, write())


# docs/protocol.md L5
@pytest.mark.parametrize("entry", [0, 5, -1])
@in_world
async def test_fencing_read_is_answered_only_once_the_fence_is_on_disk(world: SimWorld, entry: int) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    world.node("b1").disk.slow_syncs((10, 10))
    answers = [shelf.submit_read(ledger, entry, fence=True) for ledger in (L, 8)]
    answers += [shelf.submit_read(ledger, entry, fence=True) for ledger in (L, 8)]
    await pause(9)
    assert not any(answer.done() for answer in answers)
    for answer in answers:
        await answer
    again = shelf.submit_read(L, entry, fence=True)
    assert again.done(), "the second fence needs no sync"


@in_world
async def test_read_without_fence_fences_nothing(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    await shelf.read(L)
    assert await shelf.add(L, 1) is Status.OK


@in_world
async def test_wrong_key_neither_writes_nor_fences(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    assert await shelf.add(L, 1, key=b"x" * 20) is Status.UNAUTHORIZED
    assert await shelf.add(L, 1, key=b"x" * 20, recovery=True) is Status.UNAUTHORIZED
    assert await shelf.write_lac(L, 0, key=b"x" * 20) is Status.UNAUTHORIZED
    assert await shelf.status(L, 0, fence=True, key=b"x" * 20) is Status.UNAUTHORIZED
    assert await shelf.add(L, 1) is Status.OK


@in_world
async def test_repeated_add_is_answered_without_storing_it_twice(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    syncs = shelf.storage.statistics.syncs
    assert await shelf.add(L, 0) is Status.OK
    assert shelf.storage.statistics.syncs == syncs
    assert await shelf.add(L, 0, lac=0, recovery=True) is Status.OK, "recovery's copy has another LAC"
    assert (await shelf.read(L, 0))[1] == packet(L, 0, lac=0)


# Unknown ledgers


@in_world
async def test_first_add_is_judged_by_the_ledgers_metadata_once(world: SimWorld) -> None:
    shelf = await opened(world)
    answers = [shelf.submit(L, entry) for entry in range(5)]
    assert [await answer for answer in answers] == [Status.OK] * 5
    assert await shelf.add(L, 5) is Status.OK
    assert shelf.meta.asked == [L]
    assert [await shelf.payload(L, entry) for entry in range(6)] == [b"hello"] * 6


def test_admission_is_remembered_across_a_restart(world: SimWorld) -> None:
    meta = Metadata()

    async def write() -> None:
        shelf = await opened(world, meta)
        assert await shelf.add(L, 0) is Status.OK

    async def on() -> None:
        meta.is_away = True
        shelf = await opened(world, meta)
        assert await shelf.add(L, 1) is Status.OK

    run(world, write())
    crash(world)
    run(world, on())


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (None, Status.FENCED),
        (metadata(L, state=LedgerState.IN_RECOVERY), Status.FENCED),
        (metadata(L, state=LedgerState.CLOSED), Status.FENCED),
        (metadata(L, *OTHERS), Status.UNKNOWN_LEDGER_STATE),
    ],
)
@in_world
async def test_add_to_an_unknown_ledger_that_is_not_open_here_is_refused(
    world: SimWorld, found: object, status: Status
) -> None:
    meta = Metadata()
    meta.known[L] = found  # type: ignore[assignment]
    shelf = await opened(world, meta)
    assert await shelf.add(L, 0) is status
    assert await shelf.status(L, 0) is Status.NO_LEDGER


@in_world
async def test_unjudgeable_add_is_neither_accepted_nor_called_fenced(world: SimWorld) -> None:
    meta = Metadata()
    meta.is_away = True
    shelf = await opened(world, meta)
    assert await shelf.add(L, 0) is Status.UNKNOWN_LEDGER_STATE
    meta.is_away = False
    assert await shelf.add(L, 0) is Status.OK


@in_world
async def test_fence_during_a_metadata_read_wins(world: SimWorld) -> None:
    meta = Metadata()
    shelf = await opened(world, meta)
    assert await shelf.add(L, 1, recovery=True) is Status.OK  # so its key is known
    meta.gate = asyncio.Event()
    add = shelf.submit(L, 0)
    assert await shelf.status(L, 0, fence=True) is Status.NO_ENTRY
    meta.gate.set()
    assert await add is Status.FENCED


@in_world
async def test_fence_sees_entries_admitted_while_its_key_was_checked(world: SimWorld) -> None:
    meta = Metadata()
    meta.gate = asyncio.Event()
    shelf = await opened(world, meta)
    add, fence = shelf.submit(L, 0), shelf.submit_read(L, 0, fence=True)
    meta.gate.set()
    assert await add is Status.OK
    assert (await fence)[0] is Status.OK
    assert await shelf.add(L, 1) is Status.FENCED


@in_world
async def test_recovery_adds_to_an_unknown_ledger_do_not_admit_its_old_writer(world: SimWorld) -> None:
    meta = Metadata()
    meta.known[L] = metadata(L, state=LedgerState.IN_RECOVERY)
    shelf = await opened(world, meta)
    assert await shelf.add(L, 0, recovery=True) is Status.OK
    assert await shelf.add(L, 1) is Status.FENCED


@in_world
async def test_too_many_waiting_adds_are_refused(world: SimWorld) -> None:
    meta = Metadata()
    meta.gate = asyncio.Event()
    shelf = await opened(world, meta, segment_bytes=1 << 22)
    answers = [shelf.submit(L, entry) for entry in range(5000)]
    refused = [answer.result() for answer in answers if answer.done()]
    assert refused == [Status.TOO_MANY_REQUESTS] * (5000 - 4096)
    meta.gate.set()
    assert {await answer for answer in answers[:4096]} == {Status.OK}


# Bad input


@pytest.mark.parametrize(
    ("ledger", "entry", "body", "key"),
    [
        (L, 0, b"", KEY),
        (L, 0, packet(L, 0)[:31], KEY),
        (L, 0, packet(8, 0), KEY),
        (L, 1, packet(L, 0), KEY),
        (L, -1, packet(L, -1, lac=-1), KEY),
        (L, 0, packet(L, 0), b""),
        (L, 0, packet(L, 0), b"x" * 65),
        (L, 0, packet(L, 0, b"x" * (5 << 20)), KEY),
    ],
)
@in_world
async def test_add_that_contradicts_itself_is_a_bad_request(
    world: SimWorld, ledger: int, entry: int, body: bytes, key: bytes
) -> None:
    shelf = await opened(world)
    answers: list[Status] = []
    shelf.storage.add(ledger, entry, body, key, recovery=False, done=answers.append)
    shelf.storage.add(ledger, entry, body, key, recovery=True, done=answers.append)
    assert answers == [Status.BAD_REQUEST] * 2


# Segments


def test_entries_survive_any_number_of_segments_and_restarts(world: SimWorld) -> None:
    stored: dict[tuple[int, int], bytes] = {}

    async def write(round: int) -> None:
        shelf = await opened(world)
        for (ledger, entry), payload in stored.items():
            assert await shelf.payload(ledger, entry) == payload
        for entry in range(round * 20, round * 20 + 20):
            for ledger in (1, 2):
                payload = bytes([entry]) * (entry * 7 % 300)
                assert await shelf.add(ledger, entry, payload) is Status.OK
                stored[ledger, entry] = payload

    for round in range(6):
        run(world, write(round))
        crash(world, power=bool(round % 2))
    assert len(segments(world.node("b1").disk)) > 20
    run(world, write(6))


def test_restart_reads_checkpoints_instead_of_segments(world: SimWorld) -> None:
    async def write() -> None:
        shelf = await opened(world)
        for entry in range(60):
            assert await shelf.add(L, entry, b"x" * 200) is Status.OK

    run(world, write())
    crash(world, power=False)
    disk = world.node("b1").disk
    for path in segments(disk)[:-3]:
        disk.fail_reads(path, range(64, 1 << 30))

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.entries(L) == (Status.OK, [(0, 60)])
        assert await shelf.status(L, 0) is Status.IO_ERROR
        assert await shelf.status(L, 59) is Status.OK

    run(world, read())


def test_start_leaves_no_inspected_file_open(tmp_path: Path) -> None:
    """A disk has more segments than a process may have open files."""
    disk = DirectoryDisk(tmp_path)
    for directory in ("journal", "index"):
        disk.mkdir(directory)
    for file in range(1, 40):
        header = encode_file_header(FileHeader(file, salt=file))
        (tmp_path / f"journal/{segment_name(file)}").write_bytes(header + bytes(1000))
    before = psutil.Process().num_fds()
    replay(disk, "journal", "index")
    assert psutil.Process().num_fds() == before


def test_entry_larger_than_a_segment_gets_a_large_enough_segment(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 0, b"x" * 100_000) is Status.OK
        assert await shelf.payload(L, 0) == b"x" * 100_000

    run(world, scenario())
    crash(world)

    async def again() -> None:
        shelf = await opened(world)
        assert await shelf.payload(L, 0) == b"x" * 100_000

    run(world, again())


@in_world
async def test_force_answers_after_everything_accepted_before(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)
    order: list[str] = []
    shelf.submit(L, 1).add_done_callback(lambda _: order.append("add"))
    forced = asyncio.get_running_loop().create_future()
    shelf.storage.force(L, done=forced.set_result)
    forced.add_done_callback(lambda _: order.append("force"))
    assert await forced is Status.OK
    assert order == ["add", "force"]
