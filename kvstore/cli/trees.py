"""Stores folders, and compares folders with the store. Memory is bounded; failing nodes do not stop it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvstore.cli.manifests import Chunked, Symlink, decode, encode, first_difference, is_plain
from kvstore.client import AsyncClient, ClientConfig
from kvstore.errors import Corrupted, InvalidRequest, StoreError
from kvstore.limits import VALUE_BYTES_MAX

WORKERS = 24
"""Number of files in progress at a time."""


@dataclass
class TreeRun:
    """Counts and problems of one run over a folder."""

    client: AsyncClient
    prefix: bytes
    progress: Progress
    bar: TaskID
    files: int = 0
    size: int = 0
    """Total size of the files in bytes."""
    links: int = 0
    problems: list[dict[str, str]] = field(default_factory=list)

    def problem(self, path: bytes, what: str) -> None:
        self.problems.append({"path": path.decode("utf-8", "backslashreplace"), "what": what})

    def document(self) -> dict[str, Any]:
        self.problems.sort(key=lambda each: (each["path"], each["what"]))
        return {"files": self.files, "bytes": self.size, "links": self.links, "problems": self.problems}


Work = Callable[[TreeRun, bytes, bytes, os.stat_result], Awaitable[None]]
"""Works on one file: (run, path below the folder, path of the file, its lstat result)."""


async def load(config: ClientConfig, folder: Path, prefix: bytes, chunk_bytes: int) -> dict[str, Any]:
    """Store every file and symbolic link. Problems are files that could not be read or stored."""
    if not 0 < chunk_bytes <= VALUE_BYTES_MAX:
        raise InvalidRequest(f"expected chunks of 1 to {VALUE_BYTES_MAX} bytes, got {chunk_bytes}")

    async def work(job: TreeRun, name: bytes, path: bytes, found: os.stat_result) -> None:
        await _load_one(job, name, path, found, chunk_bytes)

    return await _over_tree(config, folder, prefix, "load", work)


async def verify(config: ClientConfig, folder: Path, prefix: bytes) -> dict[str, Any]:
    """Compare every file and symbolic link. Problems are the differences."""
    return await _over_tree(config, folder, prefix, "verify", _verify_one)


# ── one file ──


async def _load_one(job: TreeRun, name: bytes, path: bytes, found: os.stat_result, chunk_bytes: int) -> None:
    key = job.prefix + name
    if stat.S_ISLNK(found.st_mode):
        await _replace(job, key, encode(Symlink(os.readlink(path))))
        job.links += 1
        return
    if found.st_size <= chunk_bytes:
        content = _read(path)
        if is_plain(content, chunk_bytes):
            await _replace(job, key, content)
            _count(job, len(content))
            return
    whole, size = await asyncio.to_thread(_digest, path)
    before = await _stored_or_none(job, key)
    if before is not None and (before.size, before.sha256) == (size, whole):
        chunk_bytes = (
            before.chunk_bytes
        )  # equal content has equal chunk keys, so chunks of another size would not fit the old manifest
    entry = Chunked(size, whole, chunk_bytes)
    check = hashlib.sha256()
    with open(path, "rb") as file:
        for number in range(entry.chunks):
            chunk = file.read(chunk_bytes)
            check.update(chunk)
            await job.client.put(entry.key(key, number), chunk)
            job.progress.advance(job.bar, len(chunk))
    if check.hexdigest() != whole:
        raise InvalidRequest("the file changed while it was read")
    await _replace(job, key, encode(entry))
    job.files += 1
    job.size += size


async def _verify_one(job: TreeRun, name: bytes, path: bytes, found: os.stat_result) -> None:
    key = job.prefix + name
    item = await job.client.get(key)
    if item is None:
        job.problem(name, "is not stored")
        return
    entry = decode(item.value)
    if stat.S_ISLNK(found.st_mode):
        job.links += 1
        if entry != Symlink(os.readlink(path)):
            job.problem(name, f"is a link to {os.readlink(path)!r}, stored is {_what(entry)}")
        return
    if isinstance(entry, Symlink):
        job.problem(name, f"is a file, stored is {_what(entry)}")
        return
    if isinstance(entry, bytes):
        content = _read(path)
        if content != entry:
            job.problem(name, _difference(content, entry, 0))
        _count(job, len(content))
        return
    await _verify_chunks(job, name, path, key, entry)


async def _verify_chunks(job: TreeRun, name: bytes, path: bytes, key: bytes, entry: Chunked) -> None:
    whole = hashlib.sha256()
    job.files += 1
    with open(path, "rb") as file:
        for number in range(entry.chunks):
            chunk = file.read(entry.chunk_bytes)
            item = await job.client.get(entry.key(key, number))
            job.progress.advance(job.bar, len(chunk))
            job.size += len(chunk)
            if item is None:
                job.problem(name, f"chunk {number} of {entry.chunks} is not stored")
                return
            if item.value != chunk:
                job.problem(name, _difference(chunk, item.value, number * entry.chunk_bytes))
                return
            whole.update(item.value)
        if file.read(1):
            job.problem(name, f"is longer than the {entry.size} stored bytes")
        elif whole.hexdigest() != entry.sha256:
            job.problem(name, "its SHA-256 differs from the stored one")


async def _stored_or_none(job: TreeRun, key: bytes) -> Chunked | None:
    """Return the manifest under a path, or None if no file in chunks is stored there."""
    item = await job.client.get(key)
    return None if item is None else _manifest_or_none(item.value)


def _manifest_or_none(value: bytes) -> Chunked | None:
    try:
        found = decode(value)
    except Corrupted:
        return None
    return found if isinstance(found, Chunked) else None


async def _replace(job: TreeRun, key: bytes, value: bytes) -> None:
    """Write the value under a path, and delete the chunks of the value that it replaces."""
    replaced = await job.client.replace(key, value)
    old = None if replaced.old is None else _manifest_or_none(replaced.old.value)
    new = _manifest_or_none(value)
    for name in sorted(_chunk_keys(old, key) - _chunk_keys(new, key)):
        await job.client.delete(name)


def _chunk_keys(manifest: Chunked | None, key: bytes) -> set[bytes]:
    return set() if manifest is None else set(manifest.keys(key))


def _count(job: TreeRun, size: int) -> None:
    job.files += 1
    job.size += size
    job.progress.advance(job.bar, size)


def _difference(local: bytes, stored: bytes, offset: int) -> str:
    at = offset + first_difference(local, stored)
    return f"differs from byte {at} ({offset + len(local)} bytes here, {offset + len(stored)} stored)"


def _what(entry: bytes | Chunked | Symlink) -> str:
    match entry:
        case Symlink(target):
            return f"a link to {target!r}"
        case Chunked(size):
            return f"a file of {size} bytes"
    return f"a file of {len(entry)} bytes"


# ── the tree ──


def walk(folder: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (path below the folder, path) in order for everything that is not a folder, and for each folder that cannot
    be read. Links are not followed. Raises OSError if `folder` itself cannot be read."""
    return _below(_listed(folder))


def _listed(folder: bytes) -> list[os.DirEntry[bytes]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _below(entries: list[os.DirEntry[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for entry in entries:
        inside: list[os.DirEntry[bytes]] | None = None
        if entry.is_dir(follow_symlinks=False):
            with suppress(OSError):
                inside = _listed(entry.path)
        if inside is None:
            yield entry.name, entry.path
            continue
        for below, path in _below(inside):
            yield entry.name + b"/" + below, path


def _size(path: bytes) -> int:
    """Return the size of a file for the progress bar; 0 if the file is gone, which is reported when its turn comes."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


async def _over_tree(config: ClientConfig, folder: Path, prefix: bytes, verb: str, work: Work) -> dict[str, Any]:
    names = await asyncio.to_thread(lambda: list(walk(os.fsencode(folder))))
    sizes = [_size(path) for _, path in names]
    async with AsyncClient(config) as client:
        with _bar(verb, sum(sizes)) as (progress, bar):
            job = TreeRun(client, prefix, progress, bar)
            left = iter(enumerate(names, start=1))

            async def worker() -> None:
                for number, (name, path) in left:
                    progress.update(bar, description=f"{verb} file {number} of {len(names)}")
                    await _one(job, name, path, work)

            await asyncio.gather(*(worker() for _ in range(min(WORKERS, len(names)))))
            return job.document()


async def _one(job: TreeRun, name: bytes, path: bytes, work: Work) -> None:
    """Work on one file. An error becomes a problem, and other files continue."""
    try:
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            job.problem(name, "is a folder that cannot be read; its content is left out")
            return
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            job.problem(name, "is neither a file nor a link; left out")
            return
        await work(job, name, path, found)
    except (StoreError, OSError) as error:
        job.problem(name, f"{type(error).__name__}: {error}")


@contextmanager
def _bar(verb: str, size: int) -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(verb, total=size)


def _read(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _digest(path: bytes) -> tuple[str, int]:
    whole, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            whole.update(chunk)
            size += len(chunk)
    return whole.hexdigest(), size
