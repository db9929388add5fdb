"""A snapshot in progress: its plan and its finished parts. A job continues where a killed one stopped.

.work-<id>/lock                           held as long as the driver lives
.work-<id>/plan.json                      positions, pin, parts
.work-<id>/attempts/<piece>.<attempt>.parquet   each attempt at a part has its own file ...
.work-<id>/attempts/<piece>.<attempt>.json      ... and this note once it is finished and synced
.work-<id>/ready/data/<piece>.parquet     the one attempt of each part that the manifest names
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvstore.env.files.private import FOLDER_MODE
from kvstore.errors import Corrupted, StoreError
from kvstore.meta import codec
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.directory import write_durably
from kvstore.spark.snapshots.manifest import DataFile, Manifest, PartitionPosition, SnapshotKind
from kvstore.spark.snapshots.remote import Location, RemotePath
from kvstore.spark.snapshots.store import WORK, SnapshotLock, SnapshotStore
from kvstore.spark.snapshots.stored import StoredFile, read_document
from kvstore.spark.snapshots.table import sha256_of

log = logging.getLogger(__name__)
PLAN, ATTEMPTS = "plan.json", "attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """The part of a snapshot that one task writes into one file."""

    name: str
    partition: str
    first: int
    """For a full snapshot, the first token. For an incremental one, the sequence after which the part starts."""
    last: int
    """The last token or the last sequence, included."""
    servers: tuple[str, ...]
    """Servers to ask, `host:port`, best first."""
    rows: int
    """Approximate number of rows."""
    intents_only: bool = False
    """True for the part of an incremental snapshot that has what committed intents write at the pinned position, which
    the log up to there lacks. `first` and `last` are then tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """The plan of a snapshot. It stays the same until the snapshot is finished, even if several drivers work on it
    in turn."""

    id: str
    kind: SnapshotKind
    parent: str | None
    cluster: str
    started_ms: int
    ring_version: int
    pin: str
    partitions: tuple[PartitionPosition, ...]
    pieces: tuple[SnapshotPart, ...]
    compression: str
    hash: str
    """Name of the cluster's key hash."""

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.pieces)


class Work:
    """The work on one snapshot in progress, in a hidden folder that this process has locked."""

    def __init__(self, store: SnapshotStore, folder: Location, lock: SnapshotLock | None = None) -> None:
        self._store, self.folder = store, folder
        self._lock = lock

    @classmethod
    def begin(cls, store: SnapshotStore, plan: SnapshotPlan) -> Work:
        """Create the folder of a new snapshot, lock it and store the plan. Raises OSError, StoreError; after an
        error, nothing is left behind."""
        work = cls(store, store.work(plan.id))
        try:
            if not isinstance(work.attempts, RemotePath):
                work.attempts.parent.mkdir(mode=FOLDER_MODE, parents=True)
                work.attempts.mkdir(mode=FOLDER_MODE)
            work._lock = store.lock_or_none(work.folder)
            if work._lock is None:  # another driver took the new folder for remains of a killed one
                raise BlockingIOError(errno.EAGAIN, "another snapshot is being started here; retry", str(work.folder))
            write_durably(work.folder / PLAN, codec.encode(plan))
        except (OSError, StoreError):
            work.remove()
            raise
        return work

    @classmethod
    def abandoned_or_none(cls, store: SnapshotStore, folder: Location) -> Work | None:
        """Lock and return the work in a folder whose driver has ended. Returns None if the driver is alive."""
        lock = store.lock_or_none(folder)
        return None if lock is None else cls(store, folder, lock)

    def plan_or_none(self) -> SnapshotPlan | None:
        """Return the plan; None if the driver was killed before it had written one."""
        try:
            found = read_document(self.folder / PLAN, levels=2)
            return codec.decode(SnapshotPlan, found, what=str(self.folder / PLAN))
        except (FileNotFoundError, Corrupted):
            return None

    @property
    def attempts(self) -> Location:
        return self.folder / ATTEMPTS

    @property
    def snapshot(self) -> str:
        return self.folder.name.removeprefix(WORK)

    def notes(self) -> list[Location]:
        """Return the paths of the notes of finished attempts."""
        return sorted(each for each in self._attempted() if each.name.endswith(".json"))

    def _attempted(self) -> list[Location]:
        try:
            return list(self.attempts.iterdir())
        except FileNotFoundError:  # an object store has no empty folders
            return []

    def finished(self) -> dict[str, DataFile]:
        """Return the files of the parts that earlier drivers have finished, by the part's name, after verifying each
        file. Removes the files of other attempts."""
        noted = [(note.name.partition(".")[0], file) for note in self.notes() if (file := _noted_or_none(note))]
        found: dict[str, DataFile] = {}
        for piece, file in noted:  # moved files first: beside the file of another attempt they would be unknown files
            if piece not in found and _is_complete(self._store.place_of(self.snapshot, piece, file), file):
                found[piece] = file
        for piece, file in noted:
            if piece not in found and _is_complete(self.attempts / file.path, file):
                found[piece] = file
        kept = {each.path for each in found.values()}
        for path in self._attempted():
            if f"{path.name.rpartition('.')[0]}.parquet" not in kept:
                path.unlink(missing_ok=True)
        return found

    def publish(self, plan: SnapshotPlan, winners: Mapping[str, DataFile], ended_ms: int) -> Manifest:
        """Publish the snapshot with one attempt of each part, and remove everything else.

        `winners` are the files by the part's name. Raises Corrupted if a file is not as its task wrote it, which means
        that executors and driver do not share the directory.
        """
        assert sorted(winners) == sorted(each.name for each in plan.pieces)
        places = {piece: self._store.place_of(plan.id, piece, file) for piece, file in winners.items()}
        files = tuple(
            sorted(
                (replace(file, path=f"{manifests.DATA}/{places[piece].name}") for piece, file in winners.items()),
                key=lambda each: each.path,
            )
        )
        manifest = Manifest(
            id=plan.id,
            kind=plan.kind,
            parent=plan.parent,
            cluster=plan.cluster,
            started_ms=plan.started_ms,
            ended_ms=ended_ms,
            ring_version=plan.ring_version,
            rows=sum(each.rows for each in files),
            size_bytes=sum(each.size_bytes for each in files),
            partitions=plan.partitions,
            files=files,
            hash=plan.hash,
        )
        problem = manifests.problem_or_none(manifest)
        assert problem is None, problem
        self.check()
        self._store.publish(manifest, {self.attempts / file.path: places[piece] for piece, file in winners.items()})
        self.remove()
        return manifest

    def check(self) -> None:
        """Raise Unavailable if another driver continues this work."""
        if self._lock is not None:
            self._lock.check()

    def remove(self) -> None:
        """Remove all files of the work, unless another driver continues it."""
        if self._lock is not None:
            self._lock.stop()
            if not self._is_ours(self._lock):
                self._lock = None
                return
        self._store.remove_work(self.folder)
        self.release()

    def _is_ours(self, lock: SnapshotLock) -> bool:
        try:
            return lock.is_held()
        except (OSError, StoreError) as error:
            log.warning("folder=%s is left for `kvstore snapshot prune`: %s", self.folder, error)
            return False

    def release(self) -> None:
        """Unlock the work and leave its files for another driver."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def note_of(file: DataFile) -> bytes:
    """Return the bytes of the note that marks an attempt as finished."""
    return codec.encode(file)


def _is_complete(path: Location, file: DataFile) -> bool:
    try:
        return sha256_of(StoredFile(path, file)) == file.sha256
    except Corrupted:
        return False


def _noted_or_none(path: Location) -> DataFile | None:
    try:
        return codec.decode(DataFile, read_document(path, levels=3), what=str(path))
    except (FileNotFoundError, Corrupted):
        return None
