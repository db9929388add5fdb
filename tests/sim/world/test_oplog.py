"""Crash images are the states that a power cut could have left, and they convict code that promises too early."""

from __future__ import annotations

from random import Random

import pytest

from tests.sim.world.disk import SimDisk, SimFile
from tests.sim.world.inode import FATES, SECTOR
from tests.sim.world.oplog import OpLog, crash_images
from tests.sim.world.test_disk import disk_with

pytestmark = pytest.mark.sim


def journal(oplog: OpLog, file: SimFile, *, honest: bool) -> None:
    """Append three records and promise each after its sync or, unless `honest`, before it."""
    for number in range(3):
        file.pwrite(number * 700, bytes([65 + number]) * 700)
        if honest:
            file.sync()
        oplog.mark(number)
        if not honest:
            file.sync()


def lost(honest: bool) -> int:
    """Return the number of broken promises over all images."""
    disk = SimDisk(Random(1))
    file = disk.open("f", create=True)
    disk.sync_dir("")
    oplog = OpLog(disk)
    journal(oplog, file, honest=honest)
    broken = 0
    for image in crash_images(oplog, limit=1000, random=Random(2)):
        data = image.disk.open("f").read(0, 10_000)
        broken += any(data[m * 700 : m * 700 + 700] != bytes([65 + m]) * 700 for m in image.marks if isinstance(m, int))
    return broken


def test_crash_images_pass_correct_journal_and_convict_broken_one() -> None:
    assert lost(honest=True) == 0
    assert lost(honest=False) > 5


def test_crash_images_cover_every_operation_and_each_is_its_own_disk() -> None:
    disk, file = disk_with(b"o" * SECTOR)
    oplog = OpLog(disk)
    file.pwrite(0, b"1" * SECTOR)
    file.sync()
    disk.rename("f", "g")
    disk.open("f", create=True).pwrite(0, b"2")
    disk.sync_dir("")
    disk.remove("g")
    images = list(crash_images(oplog, limit=1000, random=Random(1)))
    assert len(images) == len(FATES) * (len(oplog.ops) + 1)
    states = {tuple((name, image.disk.open(name).read(0, 1)) for name in image.disk.list("")) for image in images}
    assert states >= {
        (("f", b"o"),),
        (("f", b"1"),),
        (("g", b"1"),),
        (("f", b""), ("g", b"1")),
        (("f", b"2"),),
    }
    images[0].disk.open("f").pwrite(0, b"changed")
    assert images[1].disk.open("f").read(0, 1) in (b"o", b"1")
    assert disk.list("") == ["f"]


def test_crash_images_are_limited_and_repeat() -> None:
    disk, file = disk_with(b"")
    oplog = OpLog(disk)
    for number in range(100):
        file.pwrite(number * 10, b"0123456789")
    first, second = (
        [(image.name, image.disk.open("f").read(0, 2000)) for image in crash_images(oplog, 50, Random(3))] for _ in "12"
    )
    assert len(first) == 50
    assert first == second
