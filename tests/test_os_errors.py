"""The table of operating system errors, and that no code decides without it (docs/protocol.md, B39)."""

from __future__ import annotations

import ast
import errno
import os

import pytest

from kvstore import os_errors
from kvstore.os_errors import (
    CORRUPTION,
    Meaning,
    SyncFailed,
    errno_of_status,
    is_passing,
    is_shortage_here,
    meaning_of,
    no_space,
    reason_of,
)
from tests.source import Source, each_of, sources

TABLE = {
    Meaning.NO_SPACE: ("ENOSPC", "EDQUOT", "EFBIG"),
    Meaning.TRANSIENT: ("EAGAIN", "EINTR", "ENOMEM", "ENOBUFS", "EMFILE", "ENFILE"),
    Meaning.DIRECTORY: (
        *("EIO", "EROFS", "ENXIO", "ENODEV", "ESTALE", "ETIMEDOUT", "EUCLEAN", "EACCES", "EPERM", "ENOENT", "EEXIST"),
        "ECONNREFUSED",  # stands for all errors that the table does not list
    ),
    Meaning.PROCESS: ("EBADF", "EFAULT", "EINVAL", "ENOSYS"),
}
ROWS = [(name, meaning) for meaning, names in TABLE.items() for name in names]
TEXTS = {os.strerror(number) for number in errno.errorcode} | {*os_errors._STATUSES, "No space"}


# docs/protocol.md B39
@pytest.mark.parametrize(("name", "meaning"), ROWS)
def test_errno_has_the_meaning_of_the_table(name: str, meaning: Meaning) -> None:
    error = OSError(getattr(errno, name), "text of nobody's")
    assert meaning_of(error) is meaning
    assert is_passing(error) is (meaning in (Meaning.NO_SPACE, Meaning.TRANSIENT))


def test_every_errno_of_the_platform_has_one_meaning() -> None:
    assert {meaning_of(OSError(number, "")) for number in errno.errorcode} == set(Meaning)
    listed = [number for numbers in os_errors._LISTED.values() for number in set(numbers)]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.ENOMEM, errno.EIO])
def test_failed_sync_is_fatal_for_the_directory(number: int) -> None:
    assert meaning_of(SyncFailed(number, os.strerror(number))) is Meaning.DIRECTORY


def test_error_without_an_errno_is_not_retried() -> None:
    assert meaning_of(OSError("a driver's own words")) is Meaning.DIRECTORY


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("IO error: No space left on device: While appending to file: /a/8.sst: No space left on device", errno.ENOSPC),
        ("IO error: Space limit reached", errno.ENOSPC),
        ("IO error: While appending to file: /a/000008.sst: Disk quota exceeded", errno.EDQUOT),
        ("IO error: While appending to file: /a/000008.sst: File too large", errno.EFBIG),
        ("IO error: While open a file for appending: /a/000008.sst: Too many open files", errno.EMFILE),
        ("IO error: While mkdir if missing: /a: Read-only file system", errno.EROFS),
        ("IO error: While pread offset 0 len 53: /a/000008.sst: Input/output error", errno.EIO),
        ("IO error: Stale file handle", errno.ESTALE),
        ("IO error: No such file or directory: While open a file for random read: /a: No such file or directory", 2),
        ("IO error: the words of another release", errno.EIO),
        ("Corruption: block checksum mismatch: stored = 1, computed = 2 in /a/000008.sst", CORRUPTION),
        ("Corruption: IO error: No space left on device", CORRUPTION),
        ("Shutdown in progress: ", errno.EAGAIN),
        ("Resource busy: ", errno.EAGAIN),
        ("Invalid argument: /a: does not exist", errno.EINVAL),
        ("words that nobody knows", errno.EIO),
        ("No space left on device (os error 28)", errno.ENOSPC),
        ("File too large (os error 27)", errno.EFBIG),
    ],
)
def test_rocksdb_status_maps_to_the_errno_with_the_same_meaning(text: str, number: int) -> None:
    assert errno_of_status(text) == number


def test_os_error_text_has_the_reason_and_the_path() -> None:
    def said(name: str, **how: bool) -> str:
        number = getattr(errno, name)
        return reason_of(OSError(number, os.strerror(number)), "/data/journal", **how)

    assert said("EDQUOT") == "the disk quota is exceeded: /data/journal"
    assert said("ENOSPC") == "no space is left: /data/journal"
    assert said("ENOSPC", has_inodes=False) == "no inodes are free, although bytes are: /data/journal"
    assert said("EFBIG") == "a file would exceed the largest size allowed (`ulimit -f`): /data/journal"
    assert said("EROFS") == "the file system is read-only: /data/journal"
    assert said("EIO") == "the disk reports an I/O error: /data/journal"
    assert said("EMFILE") == "this process has no free file descriptor (`ulimit -n`): /data/journal"
    assert reason_of(no_space("less than 5 bytes are free"), "/d") == "less than 5 bytes are free: /d"
    assert reason_of(OSError(errno.EDQUOT, "said by a library"), "/d") == (
        "the disk quota is exceeded: /d (said by a library)"
    )
    assert reason_of(SyncFailed(errno.EIO, ""), "/d").startswith("a sync failed, the disk reports an I/O error: /d")


def test_lack_of_descriptors_is_not_blamed_on_the_peer() -> None:
    lacking = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "EADDRNOTAVAIL")
    assert all(is_shortage_here(OSError(getattr(errno, name), "")) for name in lacking)
    assert not is_shortage_here(ConnectionRefusedError(errno.ECONNREFUSED, ""))


# docs/protocol.md B39
@each_of(lambda: sources("kvstore", "loadtest"))
def test_only_the_table_interprets_errnos_and_error_texts(file: Source) -> None:
    if file.path == "kvstore/os_errors.py":
        return
    imported = {
        alias.asname or alias.name
        for node in file.nodes
        if isinstance(node, ast.ImportFrom) and node.module == "errno"
        for alias in node.names
    }
    for node in file.nodes:
        if isinstance(node, ast.Compare | ast.Match):
            assert not _names_an_errno(node, imported), f"{file.path}:{node.lineno}: ask kvstore.os_errors"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in TEXTS, f"{file.path}:{node.lineno}: text of an error; ask kvstore.os_errors"


def _names_an_errno(node: ast.AST, imported: set[str]) -> bool:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and (each.attr == "errno" or _is_number_of_module(each)):
            return True
        if isinstance(each, ast.Name) and each.id in imported:
            return True
    return False


def _is_number_of_module(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "errno"
