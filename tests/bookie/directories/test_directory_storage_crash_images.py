"""Power cuts between any two disk operations while a directory is added, lost or replaced: promises hold or are in
doubt, but nothing is denied (docs/protocol.md, B23)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest

from kvstore.errors import ConfigError
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.directories.support import A, B, C, Marking, Naming, Spread, empty, open_spread
from tests.bookie.support import crash, run
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import CrashImage, OpLog, crash_images

pytestmark = pytest.mark.sim

IMAGES = 400
Dirs = tuple[str, ...]


class Story:
    """A bookie whose operator changes its directories. Each life is recorded; the last one may be cut anywhere."""

    def __init__(self, world: SimWorld) -> None:
        self.world, self.meta, self.tree = world, Naming(), MemoryTree()
        self.fenced: set[int] = set()
        self.promised: dict[int, int] = {}
        """The entries of each ledger."""
        self.before: tuple[object, ...] = ()
        """The promises before the last life began."""
        self.oplog = OpLog(self.disk)
        for ledger in range(1, 40):
            self.meta.create(ledger)

    @property
    def disk(self) -> SimDisk:
        return self.world.node("b1").disk

    def live(self, dirs: Dirs, lost: Dirs = (), *, ledgers: range) -> None:
        """Run a whole life, in which new ledgers get three entries each, and every fourth one a fence; then kill the
        process."""
        self.oplog = OpLog(self.disk)
        self.before = (
            ("tree", deepcopy(self.tree)),
            *(("entries", ledger, self.promised[ledger]) for ledger in sorted(self.promised)),
            *(("fence", ledger) for ledger in sorted(self.fenced)),
        )

        async def life() -> None:
            shelf = await open_spread(self.world, Marking(self.tree, self.oplog), self.meta, dirs, lost)
            self.oplog.mark("started")
            for ledger in ledgers:
                assert set(await asyncio.gather(*(shelf.submit(ledger, entry) for entry in range(3)))) == {Status.OK}
                self.promised[ledger] = 3
                self.oplog.mark(("entries", ledger, 3))
                if ledger % 4 == 0:
                    self.meta.create(ledger, LedgerState.IN_RECOVERY)
                    assert (await shelf.read(ledger, fence=True))[0] is Status.OK
                    self.fenced.add(ledger)
                    self.oplog.mark(("fence", ledger))

        run(self.world, life())
        crash(self.world, power=False)

    def images(self, limit: int, seed: int) -> Iterator[CrashImage]:
        """Return the states that a cut in the last life may leave."""
        for image in crash_images(self.oplog, limit, Random(seed)):
            yield replace(image, marks=(*self.before, *image.marks))

    async def start(self, image: CrashImage, node: str, dirs: Dirs, lost: Dirs = ()) -> Spread:
        """Start on the remains of a cut, with the metadata store as it was then."""
        store = MemoryStore(deepcopy(_tree(image)))
        return await open_spread(self.world, store, self.meta, dirs, lost, node=node)

    async def check(self, image: CrashImage, shelf: Spread, *, may_doubt: bool) -> None:
        """Assert that nothing promised is denied, and that without a loss nothing is doubted."""
        doubted = set(shelf.doubted)
        assert may_doubt or not doubted
        for number, mark in enumerate(image.marks):
            match mark:
                case ("entries", int(ledger), int(count)):
                    # stored in the last life, so not in the directory that was lost before
                    was_here = number >= len(self.before)
                    for entry in range(count):
                        status = await shelf.status(ledger, entry)
                        is_doubted = status is Status.UNKNOWN_LEDGER_STATE and ledger in doubted and not was_here
                        assert status is Status.OK or is_doubted, f"ledger {ledger} entry {entry} was acknowledged"
                case ("fence", int(ledger)):
                    assert await shelf.add(ledger, 9) is Status.FENCED, f"ledger {ledger} was fenced"


def each_image(story: Story, seed: int) -> list[tuple[CrashImage, str]]:
    """Return the images of the last life, each as the disk of a separate node."""
    found = []
    for number, image in enumerate(story.images(IMAGES, seed)):
        story.world.node(f"image{number}").disk = image.disk
        found.append((image, f"image{number}"))
    return found


def run_noted(story: Story, image: CrashImage, node: str, dirs: Dirs, lost: Dirs = (), *, may_doubt: bool) -> None:
    """Start on an image, and check the promises."""

    async def life() -> None:
        shelf = await story.start(image, node, dirs, lost)
        await story.check(image, shelf, may_doubt=may_doubt)

    try:
        run(story.world, life(), node)
    except BaseException as error:
        error.add_note(f"{image.name}; with {dirs}, lost {lost}")
        raise


def test_crash_while_a_directory_is_added_keeps_all_promises(world: SimWorld, seed: int) -> None:
    story = Story(world)
    story.live((A,), ledgers=range(1, 9))
    story.live((A, B), ledgers=range(9, 17))
    for image, node in each_image(story, seed):
        run_noted(story, image, node, (A, B), may_doubt=False)


def test_crash_while_two_directories_are_added_keeps_all_promises(world: SimWorld, seed: int) -> None:
    story = Story(world)
    story.live((A, B), ledgers=range(1, 9))
    story.live((A, B, C, "disk3/journal"), ledgers=range(9, 17))
    for image, node in each_image(story, seed):
        run_noted(story, image, node, (A, B, C, "disk3/journal"), may_doubt=False)


def test_crash_while_an_added_directory_is_withdrawn_keeps_all_promises(world: SimWorld, seed: int) -> None:
    """It may be removed without declaring it lost only as long as nothing was stored in it."""
    story = Story(world)
    story.live((A,), ledgers=range(1, 9))
    story.live((A, B), ledgers=range(9, 17))
    refused = 0
    for image, node in each_image(story, seed):
        try:
            run_noted(story, image, node, (A,), may_doubt=False)
        except ConfigError:
            refused += 1
        else:
            assert not {("entries", ledger, 3) for ledger in range(9, 17)} & set(map(_plain, image.marks))
    assert 0 < refused < IMAGES


def _tree(image: CrashImage) -> MemoryTree:
    """The metadata store at that moment."""
    trees = [mark[1] for mark in image.marks if isinstance(mark, tuple) and isinstance(mark[1], MemoryTree)]
    return trees[-1]


def _plain(mark: object) -> object:
    return mark if isinstance(mark, tuple) and mark[0] != "tree" else None


@pytest.mark.parametrize("lost", [A, B])
def test_crash_while_a_directory_is_declared_lost_keeps_all_promises(world: SimWorld, seed: int, lost: str) -> None:
    story = Story(world)
    story.live((A, B), ledgers=range(1, 17))
    story.live((A, B), (lost,), ledgers=range(17, 25))
    for image, node in each_image(story, seed):
        run_noted(story, image, node, (A, B), (lost,), may_doubt=True)


def test_lost_directory_returns_only_if_nothing_was_answered_without_it(world: SimWorld, seed: int) -> None:
    story = Story(world)
    story.live((A, B), ledgers=range(1, 17))
    story.live((A, B), (B,), ledgers=range(17, 25))
    refused = 0
    for image, node in each_image(story, seed):
        try:
            run_noted(story, image, node, (A, B), may_doubt=True)
        except ConfigError:
            refused += 1
        else:
            assert "started" not in image.marks, image.name
    assert 0 < refused < IMAGES


@pytest.mark.parametrize("lost", [A, B])
def test_crash_while_an_empty_disk_replaces_one_keeps_all_promises(world: SimWorld, seed: int, lost: str) -> None:
    story = Story(world)
    story.live((A, B), ledgers=range(1, 17))
    story.live((A, B), (lost,), ledgers=range(17, 21))
    empty(story.disk, lost)
    story.live((A, B), ledgers=range(21, 29))
    for image, node in each_image(story, seed):
        run_noted(story, image, node, (A, B), may_doubt=True)


def test_crash_while_a_second_start_repeats_the_first_keeps_all_promises(world: SimWorld, seed: int) -> None:
    """A cut during the start after a cut during a loss."""
    story = Story(world)
    story.live((A, B, C), ledgers=range(1, 17))
    story.live((A, B, C), (B,), ledgers=range(17, 19))
    number = 0
    for image in story.images(20, seed):
        number += 1
        node = f"first{number}"
        world.node(node).disk = image.disk
        tree = _tree(image)
        again = OpLog(image.disk)

        async def restart(node: str = node, again: OpLog = again, tree: MemoryTree = tree) -> None:
            await open_spread(world, Marking(deepcopy(tree), again), story.meta, (A, B, C), (B,), node=node)

        run(world, restart(), node)
        for second in crash_images(again, 20, Random(seed + number)):
            number += 1
            node = f"second{number}"
            world.node(node).disk = second.disk
            both = CrashImage(second.disk, (*image.marks, *second.marks), f"{image.name}; then {second.name}")
            run_noted(story, both, node, (A, B, C), (B,), may_doubt=True)
