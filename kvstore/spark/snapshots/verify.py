"""Verifies a snapshot without a cluster and without Spark: every byte against its checksum, and every row against
the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import Corrupted
from kvstore.ring.hashing import KeyHash, hash_named
from kvstore.spark.snapshots.manifest import DataFile, Manifest, PartitionPosition, SnapshotKind
from kvstore.spark.snapshots.remote import RemotePath
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.stored import StoredFile
from kvstore.spark.snapshots.table import read_table, sha256_of
from kvstore.spark.snapshots.usable import stored_files

THREADS = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """A difference between a file and the manifest of its snapshot."""

    snapshot: str
    path: str
    what: str


def problems_of(
    store: SnapshotStore, chain: Sequence[Manifest], done: Callable[[int], None] = lambda rows: None
) -> Iterator[Problem]:
    """Read all files of these snapshots and yield their problems. Calls `done` with the number of rows that were
    read."""
    for manifest in chain:
        with ThreadPoolExecutor(THREADS, "verify") as threads:
            checked = list(threads.map(lambda file, of=manifest: _file_problems(store, of, file, done), manifest.files))
        spans: dict[str, list[tuple[int, int]]] = {}
        for file, (problems, span) in zip(manifest.files, checked, strict=True):
            yield from (Problem(manifest.id, file.path, each) for each in problems)
            if span is not None:
                spans.setdefault(file.partition, []).append(span)
        for partition, each in sorted(spans.items()):
            if any(before[1] >= after[0] for before, after in pairwise(sorted(each))):
                yield Problem(manifest.id, partition, "two files of the partition have the same rows")
        yield from (Problem(manifest.id, name, "is not in the manifest") for name in unknown_files(store, manifest))


def unknown_files(store: SnapshotStore, manifest: Manifest) -> list[str]:
    """Return the paths of files in the snapshot's folder that the manifest does not list."""
    folder = store.folder(manifest.id)
    known = {each.path for each in manifest.files}
    if isinstance(folder, RemotePath):
        found = {each for each in folder.files_below() if each.endswith(".parquet")}
    else:
        found = {str(each.relative_to(folder)) for each in folder.rglob("*.parquet")}
    return sorted(found - known)


def _file_problems(
    store: SnapshotStore, manifest: Manifest, file: DataFile, done: Callable[[int], None]
) -> tuple[list[str], tuple[int, int] | None]:
    """Return the problems of a file, and the range of tokens or sequences of its rows."""
    stored = StoredFile(store.folder(manifest.id) / file.path, file)
    try:
        if sha256_of(stored) != file.sha256:
            return ["its checksum differs from the manifest's: it was changed or is damaged"], None
        check = _Check(file, manifest.places()[file.partition], manifest.kind, hash_named(manifest.hash))
        for batch in read_table(stored):
            check.add(batch)
            done(batch.num_rows)
        return check.problems(), check.span
    except Corrupted as error:
        return [str(error).removeprefix(str(stored.path)).removeprefix(":").strip()], None


class _Check:
    """The checks of one file's rows."""

    def __init__(self, file: DataFile, place: PartitionPosition, kind: SnapshotKind, hash: KeyHash) -> None:
        self._file, self._place, self._kind, self._hash = file, place, kind, hash
        self._rows = self._deletes = 0
        self._found: dict[str, None] = {}
        self._before: tuple[int, bytes] | int | None = None
        self._firsts = np.array([first for first, _ in place.ranges], np.int64)
        self._lasts = np.array([last for _, last in place.ranges], np.int64)
        self._first: int | None = None
        self._last = 0

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and last token or sequence; None without rows, and for intents in an incremental snapshot."""
        return None if self._first is None or self._file.is_of_intents else (self._first, self._last)

    def add(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        self._deletes += batch["value"].null_count
        if pc.any(pc.not_equal(batch["partition"], self._file.partition)).as_py():
            self._add_problem("has rows of another partition")
        low, high = pc.min_max(batch["version"]).as_py().values()
        if low < self._file.min_version or high > self._file.max_version or high > self._place.sequence:
            self._add_problem(f"has versions from {low} to {high}, but its position is {self._place.sequence}")
        if self._kind is SnapshotKind.FULL or self._file.is_of_intents:
            self._add_records(batch["key"].to_pylist())
        else:
            self._add_changes(batch["version"].to_pylist())

    def _add_records(self, keys: list[bytes]) -> None:
        """Check that records are in the order of (token, key), unique, and owned by the partition."""
        tokens = self._hash.tokens_of(keys)
        places = list(zip(tokens, keys, strict=True))
        if isinstance(self._before, tuple):
            places.insert(0, self._before)
        if any(before >= after for before, after in pairwise(places)):
            self._add_problem("has records out of order or duplicated")
        numbers = np.array(tokens, np.int64)
        at = np.searchsorted(self._firsts, numbers, "right") - 1
        if not len(self._firsts) or (at < 0).any() or (numbers > self._lasts[at]).any():
            self._add_problem("has records that the partition did not own")
        self._before = places[-1]
        self._first = tokens[0] if self._first is None else self._first
        self._last = tokens[-1]

    def _add_changes(self, sequences: list[int]) -> None:
        """Check that changes are in log order and unique."""
        if isinstance(self._before, int):
            sequences.insert(0, self._before)
        if any(before >= after for before, after in pairwise(sequences)):
            self._add_problem("has changes out of order or duplicated")
        self._first = sequences[0] if self._first is None else self._first
        self._before = self._last = sequences[-1]

    def _add_problem(self, what: str) -> None:
        self._found[what] = None

    def problems(self) -> list[str]:
        if (self._rows, self._deletes) != (self._file.rows, self._file.deletes):
            self._add_problem(
                f"has {self._rows} rows with {self._deletes} deletes, but the manifest states {self._file.rows} and "
                f"{self._file.deletes}"
            )
        if self._kind is SnapshotKind.FULL and self._deletes:
            self._add_problem("has records without a value")
        return list(self._found)


def check_files(store: SnapshotStore, chain: Sequence[Manifest], done: Callable[[int], None]) -> None:
    """Check the checksum of every file without reading rows, which is fast. Calls `done` for each file. Raises
    Corrupted."""
    files = [stored for manifest in chain for stored in stored_files(store, manifest)]
    with ThreadPoolExecutor(THREADS, "verify") as threads:
        for stored, found in zip(files, threads.map(sha256_of, files), strict=True):
            if found != stored.file.sha256:
                raise Corrupted(
                    f"{stored.path} is damaged: its checksum differs from the manifest's; restore it from a copy"
                )
            done(1)
