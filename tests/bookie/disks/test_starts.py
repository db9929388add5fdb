"""A start that fails at any step, because of a full disk, a broken disk, the metadata store or a stop: the bookie can
start again, in the same process or another one, and denies nothing (B35)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EIO, ENOSPC
from typing import Any

import psutil
import pytest

from kvstore.bookie import Bookie, storage
from kvstore.bookie.identity import STARTS, _note_start
from kvstore.bookie.journal.reserve import JournalFull
from kvstore.bookie.small_files import replace_file
from kvstore.env.disk import DirectoryDisk, DirectoryFile
from kvstore.errors import ConfigError, MetadataUnavailable, MetadataUnknown
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import Status
from kvstore.types import EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from tests.bookie.support import KEY, Shelf, crash, packet, run, segments, tiny
from tests.sim.world.disk import SimDisk, SimFile
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

L = LedgerId(7)
ONE: dict[str, Any] = {}
SEVERAL: dict[str, Any] = {"journal_dirs": ("bookie/journal", "disk2/journal")}
WRITES = ((SimFile, "pwrite"), (SimFile, "allocate"))
READS = ((SimFile, "read"), (SimDisk, "open"))
CHANGES = (
    *WRITES, (SimFile, "sync"), (SimFile, "submit_sync"), (SimDisk, "sync_dir"), (SimDisk, "rename"),
    (SimDisk, "remove"),
)  # fmt: skip
CALLS = ("get", "children", "create", "set", "delete", "multi", "sync")
STEPS_MAX = 400
Steps = tuple[tuple[type, str], ...]


class Life:
    """A process with only the bookie; each start has its own session."""

    def __init__(self, world: SimWorld, tree: MemoryTree, config: dict[str, Any]) -> None:
        self._world, self._tree = world, tree
        self._config = tiny(**{"listen": "b1:3181", **config})

    async def start(self, store: MemoryStore | None = None) -> Bookie:
        store = store or MemoryStore(self._tree)
        await LayoutStore(MemoryStore(self._tree)).ensure("8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47")
        return await Bookie(self._world.env("b1"), self._config, store).__aenter__()

    async def first(self, entries: int) -> None:
        """Store several segments of one ledger."""
        bookie = await self.start()
        fragment = Fragment(EntryId(0), (bookie.id,))
        ledger = LedgerMetadata(L, Quorum(1, 1, 1), (fragment,), token=1)
        await LedgerStore(MemoryStore(self._tree)).create(ledger)
        for entry in range(entries):
            assert await add(bookie, entry) is Status.OK
        await pause(0.2)

    async def last(self, entries: int, *, may_doubt: bool = False) -> None:
        """Assert that everything is there, that nothing is in doubt (unless allowed), and that a ledger can be written
        to."""
        bookie = await self.start()
        unknown = {Status.UNKNOWN_LEDGER_STATE, Status.IO_ERROR} if may_doubt else set()
        assert {await status(bookie, entry) for entry in range(entries)} <= {Status.OK, *unknown}
        assert await status(bookie, entries) in {Status.NO_ENTRY, *unknown}
        assert await add(bookie, entries) is Status.OK
        await pause(2.5)  # a part that was not stopped has had time to do harm
        assert await add(bookie, entries + 1) is Status.OK


async def add(bookie: Bookie, entry: int) -> Status:
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    bookie.storage.add(L, entry, packet(L, entry, b"x" * 300), KEY, recovery=False, done=answer.set_result)
    return await answer


async def status(bookie: Bookie, entry: int) -> Status:
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    bookie.storage.read(L, entry, done=lambda found, *_: answer.set_result(found))
    return await answer


@contextmanager
def failing(steps: Steps, nth: int, error: BaseException) -> Iterator[Callable[[], bool]]:
    """Let the nth of these steps fail. Yield whether it was reached."""
    count = 0

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth:
                raise error
            return original(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in steps:
            patch.setattr(owner, name, broken(getattr(owner, name)))
        yield lambda: count >= nth


class FailingStore(MemoryStore):
    """A store whose nth call does not reach the tree, or reaches it and loses its answer."""

    def __init__(self, tree: MemoryTree, nth: int, error: BaseException) -> None:
        super().__init__(tree)
        self.left, self.is_over = nth, False
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS or self.is_over:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left:
                return await found(*args, **kwargs)
            if isinstance(self._error, MetadataUnknown):
                await found(*args, **kwargs)
            raise self._error

        return call


@pytest.mark.parametrize("config", [ONE, SEVERAL], ids=["one", "several"])
def test_start_without_disk_space_at_any_step_is_repeated_by_the_process(
    config: dict[str, Any],
) -> None:
    for nth in range(1, STEPS_MAX):
        with SimWorld(nth) as world:
            life, came = Life(world, MemoryTree(), config), False

            async def again(life: Life = life, nth: int = nth) -> None:
                nonlocal came
                with failing(WRITES, nth, OSError(ENOSPC, "no room")) as has_come:
                    try:
                        bookie = await life.start()
                        await bookie.close()
                    except OSError as error:
                        if error.errno != ENOSPC:
                            raise
                    came = has_come()
                await life.last(20)

            run(world, life.first(20))
            crash(world)
            run(world, again())
            crash(world)
            run(world, life.last(22))
            if not came:
                assert nth > 5
                return
    raise AssertionError("a start that has no end")


@pytest.mark.parametrize("config", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("steps", [READS, CHANGES], ids=["reads", "changes"])
def test_start_with_a_disk_failure_at_any_step_is_repeated_by_another(config: dict[str, Any], steps: Steps) -> None:
    for nth in range(1, STEPS_MAX):
        with SimWorld(nth) as world:
            life, came = Life(world, MemoryTree(), config), False

            async def fail(life: Life = life, nth: int = nth) -> None:
                nonlocal came
                with failing(steps, nth, OSError(EIO, "the disk is broken")) as has_come:
                    try:
                        bookie = await life.start()
                        await bookie.close()
                    finally:
                        came = has_come()

            run(world, life.first(20))
            crash(world)
            with suppress(OSError, ConfigError, NodeCrashed):
                run(world, fail())
            crash(world)
            run(world, life.last(20, may_doubt=steps is READS))  # the unread bytes may have said anything
            if not came:
                assert nth > 10
                return
    raise AssertionError("a start that has no end")


@pytest.mark.parametrize("config", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize(
    "error",
    [MetadataUnavailable("not connected"), MetadataUnknown("no answer"), asyncio.CancelledError()],
    ids=["unavailable", "unknown", "stop"],
)
def test_start_ended_by_metadata_or_stop_at_any_step_is_repeated(config: dict[str, Any], error: BaseException) -> None:
    for nth in range(1, STEPS_MAX):
        with SimWorld(nth) as world:
            tree = MemoryTree()
            life, store = Life(world, tree, config), FailingStore(tree, nth, error)

            async def again(life: Life = life, store: FailingStore = store) -> None:
                try:
                    bookie = await life.start(store)
                    store.is_over = True
                    await bookie.close()
                except (MetadataUnavailable, MetadataUnknown, asyncio.CancelledError):
                    await store.close()
                await life.last(20)

            run(world, life.first(20))
            crash(world)
            run(world, again())
            if store.left > 0:
                assert nth > 5
                return
    raise AssertionError("a start that has no end")


# docs/protocol.md B9
def test_headless_segment_of_a_crash_takes_no_space_from_a_start(world: SimWorld) -> None:
    """The segment ahead has its full size before its header is on disk, and the rest of the current segment may be
    smaller than a start needs."""
    disk, config = world.node("b1").disk, tiny(segment_bytes=64 << 10)

    async def fill() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        while shelf.storage.journal.bytes_left > 700:
            assert await shelf.add(L, shelf.storage.statistics.adds, b"x" * 300) is Status.OK
        await pause(0.2)

    async def start() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        assert await shelf.status(L, 0) is Status.OK

    run(world, fill())
    crash(world)
    disk.overwrite(segments(disk, config)[-1], 0, bytes(100))
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes())
    run(world, start())


def test_small_file_without_space_leaves_no_file_open(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that waits for free space retries until there is some."""

    def refuse(*_: object) -> None:
        raise OSError(ENOSPC, "no room")

    disk = DirectoryDisk(tmp_path)
    disk.mkdir("journal")
    monkeypatch.setattr(DirectoryFile, "pwrite", refuse)
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            replace_file(disk, "journal/VERSION", b"new")
        with pytest.raises(OSError, match="no room"):
            _note_start(disk, "journal", 1, 2)
    assert psutil.Process().num_fds() == before
    assert disk.list("journal") == [STARTS, "VERSION.new"]


def test_start_without_space_for_its_records_reports_a_full_disk(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node then waits for free space; any other error would end it."""

    def full(*_: object) -> None:
        raise JournalFull

    monkeypatch.setattr(storage, "release_empty_segments", full)
    for config in (ONE, SEVERAL):
        with pytest.raises(OSError, match="no space is left") as refused:
            run(world, Life(world, MemoryTree(), config).first(0))
        assert refused.value.errno == ENOSPC
        crash(world)
        world.node("b1").disk = SimDisk(world.random, name="b1")
