"""Every errno at every operation of a bookie's disk: a temporary error costs time, a permanent one ends the use of the
directory, and nothing acknowledged is lost (docs/protocol.md, B9, B39 and B40)."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from kvstore.bookie.journal.supply import FILES_RESERVE, POLL_S, RETRY_S
from kvstore.env.ports import FILES_UNLIMITED
from kvstore.errors import ConfigError
from kvstore.os_errors import is_passing, reason_of
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Metadata, Shelf, crash, in_world, metadata, run, tiny
from tests.sim.world.disk import Refusal, SimDisk
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

L = 7
NO_SPACE = ("ENOSPC", "EDQUOT", "EFBIG")
PASSING = (*NO_SPACE, "EAGAIN", "EINTR", "ENOMEM", "EMFILE", "ENFILE")
BROKEN = ("EIO", "EROFS", "ENXIO", "ENODEV", "ESTALE", "ETIMEDOUT", "EUCLEAN")
JOURNAL_WRITES = ("create", "allocate", "pwrite")
INDEX_WRITES = ("open", "create", "pwrite", "truncate", "submit_sync", "sync", "rename", "sync_dir")
STARTS = ("open", "read", "create", "pwrite", "truncate", "allocate", "rename")


def refuse(disk: SimDisk, name: str, *operations: str, part: str = "") -> None:
    disk.refusals.append(Refusal(getattr(errno, name), frozenset(operations), part))


def error_of(name: str) -> OSError:
    return OSError(getattr(errno, name), os.strerror(getattr(errno, name)))


async def opened(world: SimWorld) -> Shelf:
    meta = Metadata()
    meta.known = {L: metadata(L)}
    return await Shelf(world.env("b1"), tiny(), meta).start()


async def write(shelf: Shelf, answers: list[asyncio.Future[Status]], count: int) -> None:
    """Send adds one after the other. An add without an answer within a second waits in its group."""
    for _ in range(count):
        answers.append(shelf.submit(L, len(answers), b"x" * 300))
        await asyncio.wait([answers[-1]], timeout=1.0)


def acknowledged(answers: list[asyncio.Future[Status]]) -> list[int]:
    return [entry for entry, each in enumerate(answers) if each.done() and each.result() is Status.OK]


# docs/protocol.md B9, B39
@pytest.mark.parametrize("operation", JOURNAL_WRITES)
@pytest.mark.parametrize("name", PASSING)
def test_journal_accepts_adds_again_after_a_temporary_error(world: SimWorld, name: str, operation: str) -> None:
    answers: list[asyncio.Future[Status]] = []
    disk = world.node("b1").disk

    async def scenario() -> None:
        shelf = await opened(world)
        await write(shelf, answers, 5)
        refuse(disk, name, operation, part=".journal")
        await write(shelf, answers, 30)
        before = acknowledged(answers)
        assert shelf.storage.is_readonly
        assert shelf.storage.journal.why_full == reason_of(error_of(name), "bookie/journal")
        assert [await shelf.status(L, each) for each in before] == [Status.OK] * len(before), "reads continue"
        disk.refusals.clear()
        await pause(2 * RETRY_S)
        assert not shelf.storage.is_readonly
        assert shelf.storage.journal.why_full == ""
        await write(shelf, answers, 30)
        assert len(acknowledged(answers)) >= len(before) + 30

    async def again() -> None:
        shelf = await opened(world)
        assert {await shelf.status(L, each) for each in acknowledged(answers)} == {Status.OK}
        assert not shelf.storage.inventory.is_limbo

    run(world, scenario())
    assert world.fatals == []
    crash(world)
    run(world, again())


@pytest.mark.parametrize("operation", JOURNAL_WRITES)
@pytest.mark.parametrize("name", BROKEN)
def test_journal_ends_after_a_permanent_error(world: SimWorld, name: str, operation: str) -> None:
    answers: list[asyncio.Future[Status]] = []

    async def scenario() -> None:
        shelf = await opened(world)
        await write(shelf, answers, 5)
        refuse(world.node("b1").disk, name, operation, part=".journal")
        await write(shelf, answers, 30)

    with pytest.raises(NodeCrashed):
        run(world, scenario())
    assert "bookie/journal" in world.fatals[0][1]
    world.node("b1").disk.mend()

    async def again() -> None:
        shelf = await opened(world)
        assert {await shelf.status(L, each) for each in acknowledged(answers)} == {Status.OK}

    run(world, again())


# docs/protocol.md B1
@pytest.mark.parametrize("operation", ["sync", "sync_dir"])
@pytest.mark.parametrize("name", [*PASSING, *BROKEN])
def test_failed_sync_ends_the_journal_whatever_its_errno(world: SimWorld, name: str, operation: str) -> None:
    """File systems with delayed allocation report a quota there, for bytes that are lost."""
    answers: list[asyncio.Future[Status]] = []

    async def scenario() -> None:
        shelf = await opened(world)
        await write(shelf, answers, 5)
        refuse(world.node("b1").disk, name, operation, part="bookie/journal")
        await write(shelf, answers, 30)

    with pytest.raises(NodeCrashed):
        run(world, scenario())
    assert "sync failed" in world.fatals[0][1]


# docs/protocol.md B31
@pytest.mark.parametrize("operation", INDEX_WRITES)
@pytest.mark.parametrize("name", [*PASSING, *BROKEN])
def test_index_file_that_cannot_be_written_costs_only_memory(world: SimWorld, name: str, operation: str) -> None:
    async def scenario() -> None:
        shelf = await opened(world)
        part = "bookie/index" if operation == "sync_dir" else ".new"
        refuse(world.node("b1").disk, name, operation, part=part)
        answers: list[asyncio.Future[Status]] = []
        await write(shelf, answers, 30)
        assert len(acknowledged(answers)) == 30
        assert shelf.storage.inventory.index_files.in_memory
        assert {await shelf.status(L, each) for each in range(30)} == {Status.OK}
        world.node("b1").disk.refusals.clear()
        await write(shelf, answers, 60)
        await pause(1)
        assert not shelf.storage.inventory.index_files.in_memory, "each is tried again"

    run(world, scenario())
    assert world.fatals == []


# docs/protocol.md B40
@pytest.mark.parametrize("operation", ["open", "read"])
@pytest.mark.parametrize("part", [".journal", ".index"])
@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EINTR"])
@in_world
async def test_read_that_fails_temporarily_is_no_damage(world: SimWorld, name: str, part: str, operation: str) -> None:
    shelf = await opened(world)
    answers: list[asyncio.Future[Status]] = []
    await write(shelf, answers, 40)
    await pause(1)
    for segment in shelf.storage.inventory.segments.values():
        if segment is not shelf.storage.journal.open_group.segment:
            segment.release()
    shelf.storage.inventory.index_files.close()
    refuse(world.node("b1").disk, name, operation, part=part)
    assert await shelf.status(L, 3) is Status.IO_ERROR
    assert await shelf.status(L, 3, fence=True) is Status.IO_ERROR
    world.node("b1").disk.refusals.clear()
    assert {await shelf.status(L, each) for each in range(40)} == {Status.OK}
    found = shelf.storage.refresh_statistics()
    assert (found.damaged_records, found.limbo_ledgers, found.index_files_rebuilt) == (0, 0, 0)


# docs/protocol.md B39, B40
@pytest.mark.parametrize("operation", STARTS)
@pytest.mark.parametrize("name", [*PASSING, *BROKEN])
def test_start_that_meets_an_error_restarts_after_it(world: SimWorld, name: str, operation: str) -> None:
    answers: list[asyncio.Future[Status]] = []
    disk = world.node("b1").disk

    async def fill() -> None:
        shelf = await opened(world)
        await write(shelf, answers, 40)

    async def start() -> None:
        await opened(world)

    async def again() -> None:
        shelf = await opened(world)
        assert {await shelf.status(L, each) for each in range(40)} == {Status.OK}
        found = shelf.storage.refresh_statistics()
        assert (found.damaged_records, found.limbo_ledgers) == (0, 0)

    run(world, fill())
    crash(world)
    refuse(disk, name, operation)
    failed: Exception | None = None
    try:
        run(world, start())
    except (OSError, ConfigError, NodeCrashed) as error:
        failed = error
    # A start may serve without what a broken disk does not give (B7); nor does each start cut or rename a file.
    assert failed is not None or operation in ("read", "rename", "truncate", "allocate", "pwrite", "create")
    assert failed is None or is_passing(failed) is (name in PASSING), f"{failed!r} ends the process"
    crash(world)
    disk.refusals.clear()
    if name in PASSING:
        run(world, again())


# docs/protocol.md B9
def test_bookie_without_inodes_is_readonly_and_reports_it(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, free = world.node("b1").disk, FILES_UNLIMITED

    async def scenario() -> None:
        nonlocal free
        monkeypatch.setattr(disk, "free_files", lambda _path="": free)
        shelf = await opened(world)
        free = FILES_RESERVE // 2 - 1
        await pause(POLL_S + 1)
        assert shelf.storage.is_readonly
        assert shelf.storage.journal.why_full == f"fewer than {FILES_RESERVE} inodes are free: bookie/journal"
        assert await shelf.add(L, 0) is Status.READ_ONLY
        assert await shelf.status(L, fence=True) is Status.NO_ENTRY, "a fence still has space"
        free = 0
        await pause(POLL_S + 1)
        assert shelf.storage.journal.why_full.startswith("no inodes are free, although bytes are: bookie/journal")
        free = FILES_RESERVE
        await pause(POLL_S + 1)
        assert not shelf.storage.is_readonly

    run(world, scenario())
