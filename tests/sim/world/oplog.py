"""Everything that was done to a disk, and the states that a power cut at any moment could have left.

oplog = OpLog(disk)                      # record from now on
... run the code under test, and oplog.mark("entry 7 acknowledged") when it promises something ...
for image in crash_images(oplog, limit=300, random=Random(seed)):
    ... start on image.disk, and check image.marks: the promises made before the cut ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.sim.world.disk import SimDisk
from tests.sim.world.inode import FATES, Inode, Resize, Write
from tests.sim.world.names import Create, NameChange


@dataclass(frozen=True, slots=True)
class _Changed:
    inode: int
    change: Write | Resize


@dataclass(frozen=True, slots=True)
class _Synced:
    inode: int
    mark: int


@dataclass(frozen=True, slots=True)
class _SyncedDir:
    path: str


@dataclass(frozen=True, slots=True)
class _Marked:
    promise: object


_Op = _Changed | _Synced | _SyncedDir | _Marked | NameChange


class OpLog:
    """Records what happens to `disk` from now on."""

    def __init__(self, disk: SimDisk) -> None:
        self.base = disk.copy(Random(0))
        self.ops: list[_Op] = []
        disk.oplog = self

    def mark(self, promise: object) -> None:
        """Record that `promise` must hold after any crash from here on."""
        self.ops.append(_Marked(promise))

    def changed(self, inode: Inode, change: Write | Resize) -> None:
        self.ops.append(_Changed(inode.number, change))

    def changed_names(self, change: NameChange) -> None:
        self.ops.append(change)

    def synced(self, inode: Inode, mark: int) -> None:
        self.ops.append(_Synced(inode.number, mark))

    def synced_dir(self, path: str) -> None:
        self.ops.append(_SyncedDir(path))


@dataclass(frozen=True, slots=True)
class CrashImage:
    """A disk after a power cut, and the promises made before it."""

    disk: SimDisk
    marks: tuple[object, ...]
    name: str
    """Names the number of operations before the power cut and the fate of the unsynced data."""


def crash_images(oplog: OpLog, limit: int, random: Random) -> Iterator[CrashImage]:
    """Yield states of the disk after a cut before, between and after all operations, each with several fates of the
    unsynced data. There are at most `limit`, drawn evenly from all; each is a separate disk."""
    every = [(point, fate) for point in range(len(oplog.ops) + 1) for fate in range(len(FATES))]
    chosen = every if len(every) <= limit else sorted(random.sample(every, limit))
    replay = _Replay(oplog.base)
    done = 0
    for point, fate in chosen:
        for op in oplog.ops[done:point]:
            replay.apply(op)
        done = point
        luck = Random(random.getrandbits(64))
        disk = replay.disk.copy(luck)
        disk.power_cut(FATES[fate], luck)
        yield CrashImage(disk, tuple(replay.marks), f"after {point} of {len(oplog.ops)} operations, {FATES[fate]}")


class _Replay:
    """Repeats the operations on a copy."""

    def __init__(self, base: SimDisk) -> None:
        self.disk = base.copy(Random(0))
        self.marks: list[object] = []
        self._inodes = self.disk.names.inodes()

    def apply(self, op: _Op) -> None:
        match op:
            case _Changed(number, change):
                self._inodes[number].change(change)
            case _Synced(number, mark):
                self._inodes[number].flush(mark)
            case _SyncedDir(path):
                self.disk.names.sync_dir(path)
            case _Marked(promise):
                self.marks.append(promise)
            case Create(path, inode):
                new = self._inodes.setdefault(inode.number, Inode(inode.number))
                self.disk.names.change(Create(path, new))
            case _:
                self.disk.names.change(op)
