"""Trials of directories: on real file systems that are read-only or full, and with each step failing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.files import write_trial
from kvstore.env.files.write_trial import nearest, write_fault
from tests.env.namespaces import need_mounts, run_mounted

TELL = """
import sys
from pathlib import Path
from kvstore.env.files.write_trial import write_fault
fault = write_fault(Path(sys.argv[1]))
print("writable" if fault is None else f"{'full' if fault.is_full else 'unwritable'} {fault}")
"""


def test_usable_directory_has_no_fault_and_nothing_is_left(tmp_path: Path) -> None:
    assert write_fault(tmp_path) is None
    assert write_fault(tmp_path / "made" / "later") is None
    assert list(tmp_path.iterdir()) == []


def test_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert str(write_fault(place)) == (
            f"{tmp_path}/file: expected to read the directory, got ENOTDIR (Not a directory); name a directory"
        )
    assert nearest(tmp_path / "none" / "none") == tmp_path


READ_ONLY = "unwritable {place}: expected to {step}, got EROFS (Read-only file system); the file system is read-only"
FULL = "full {place}: expected to {step}, got ENOSPC (No space left on device); the disk is full"
MOUNTS = {
    "writable": ('mount -t tmpfs tmpfs "$1"', "writable"),
    "gone read-only": (
        'mount -t tmpfs tmpfs "$1"\nmount -o remount,ro "$1"',
        READ_ONLY.format(place="{place}", step="create a file"),
    ),
    "read-only bind mount": (
        'mount --bind "$1" "$1"\nmount -o remount,bind,ro "$1"',
        READ_ONLY.format(place="{place}", step="create a file"),
    ),
    "full": (
        'mount -t tmpfs -o size=64k tmpfs "$1"\nhead -c 65536 /dev/zero > "$1/all"',
        FULL.format(place="{place}", step="write to a file"),
    ),
    "without inodes": (
        'mount -t tmpfs -o nr_inodes=2 tmpfs "$1"\n: > "$1/last"',
        FULL.format(place="{place}", step="create a file"),
    ),
}


@pytest.mark.parametrize("name", MOUNTS)
def test_file_system_is_tested_by_a_real_write(tmp_path: Path, name: str) -> None:
    need_mounts(tmp_path)
    mounts, wanted = MOUNTS[name]
    found = run_mounted(mounts, TELL, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(wanted.format(place=tmp_path)), found.stdout


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("name", "step"),
    [("open", "create a file"), ("write", "write to a file"), ("fsync", "sync a file")],
)
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_failed_step_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(write_trial.os, name, failing(number))
        fault = write_fault(tmp_path)
    assert fault is not None
    assert (fault.step, fault.errno, fault.is_full) == (step, number, number == errno.EDQUOT)
    assert f"{tmp_path}: expected to {step}, got {errno.errorcode[number]}" in str(fault)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "step"), [("rename", "rename a file"), ("unlink", "delete a file")])
def test_directory_that_forbids_rename_or_delete_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(write_trial.os, name, failing(errno.EPERM))
        fault = write_fault(tmp_path)
    assert fault is not None
    assert (fault.step, fault.errno) == (step, errno.EPERM)
