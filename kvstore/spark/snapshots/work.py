"""A snapshot that is being made: its plan and what of it is finished. A job goes on where a killed one stopped.

.work-<id>/lock                           held as long as the driver lives
.work-<id>/plan.json                      positions, pin, pieces
.work-<id>/attempts/<piece>.<attempt>.parquet   each attempt at a piece has its own file ...
.work-<id>/attempts/<piece>.<attempt>.json      ... and, when it is finished and synced, this beside it
.work-<id>/ready/data/<piece>.parquet     the one attempt of each piece that the manifest names
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.errors import Corrupted
from kvstore.meta import codec
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.manifest import DataFile, Kind, Manifest, Place
from kvstore.spark.snapshots.store import SnapshotStore, lock_or_none, lock_or_raise, write_durably
from kvstore.spark.snapshots.table import sha256_of

PLAN, ATTEMPTS, READY = "plan.json", "attempts", "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The records that one task writes into one file."""

    name: str
    partition: str
    first: int
    """Of a full snapshot, the first token; of an incremental, the sequence after which to begin."""
    last: int
    """The last token, or the last sequence."""
    servers: tuple[str, ...]
    """Whom to ask, `host:port`, best first."""
    rows: int
    """About."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a snapshot. Nothing of it changes while it is made, over however many drivers."""

    id: str
    kind: Kind
    parent: str | None
    cluster: str
    started_ms: int
    ring_version: int
    pin: str
    partitions: tuple[Place, ...]
    pieces: tuple[Piece, ...]
    compression: str

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.pieces)


class Work:
    """The hidden folder of one snapshot, locked by this process."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def begin(cls, store: SnapshotStore, plan: Plan) -> Work:
        """Raises OSError: then nothing is left."""
        work = cls(store.work(plan.id), -1)
        try:
            work.attempts.mkdir(parents=True)
            work._lock = lock_or_raise(work.folder)
            write_durably(work.folder / PLAN, codec.encode(plan))
        except OSError:
            work.remove()
            raise
        return work

    @classmethod
    def of_the_dead_or_none(cls, folder: Path) -> Work | None:
        """A folder whose driver has ended; None if it lives."""
        lock = lock_or_none(folder)
        return None if lock is None else cls(folder, lock)

    def plan_or_none(self) -> Plan | None:
        """None if the driver was killed before it had written one."""
        try:
            return codec.decode(Plan, (self.folder / PLAN).read_bytes(), what=str(self.folder / PLAN))
        except (FileNotFoundError, Corrupted):
            return None

    @property
    def attempts(self) -> Path:
        return self.folder / ATTEMPTS

    def finished(self) -> dict[str, DataFile]:
        """Pieces that earlier drivers have finished, by name, each file read and found as it was written. What else
        stands among the attempts is removed."""
        found: dict[str, DataFile] = {}
        for note in sorted(self.attempts.glob("*.json")):
            piece = note.name.partition(".")[0]
            file = _noted_or_none(note)
            if file is not None and piece not in found and self._is_whole(piece, file):
                found[piece] = file
        kept = {Path(each.path).name for each in found.values()}
        for path in self.attempts.iterdir():
            if path.with_suffix(".parquet").name not in kept:
                path.unlink(missing_ok=True)
        return found

    def _is_whole(self, piece: str, file: DataFile) -> bool:
        for path in (self.attempts / file.path, self._place(piece)):
            try:
                if sha256_of(path) == (file.size_bytes, file.sha256):
                    return True
            except FileNotFoundError:
                continue
        return False

    def _place(self, piece: str) -> Path:
        return self.folder / READY / manifests.DATA / f"{piece}.parquet"

    def publish(self, store: SnapshotStore, plan: Plan, winners: Mapping[str, DataFile], ended_ms: int) -> Manifest:
        """Make the snapshot of one attempt of each piece, and remove all else. Raises Corrupted if a file is not here
        as its task wrote it: then executors and driver do not see the same directory."""
        assert sorted(winners) == sorted(each.name for each in plan.pieces)
        self._place("x").parent.mkdir(parents=True, exist_ok=True)
        for piece, file in winners.items():
            self._move(piece, file)
        files = tuple(
            sorted(
                (replace(file, path=f"{manifests.DATA}/{piece}.parquet") for piece, file in winners.items()),
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
        )
        problem = manifests.problem_or_none(manifest)
        assert problem is None, problem
        store.publish(manifest, self.folder / READY)
        self.remove()
        return manifest

    def _move(self, piece: str, file: DataFile) -> None:
        source, place = self.attempts / file.path, self._place(piece)
        if source.exists():
            os.rename(source, place)
        found = place.stat().st_size if place.exists() else None
        if found != file.size_bytes:
            raise Corrupted(
                f"{place} has {found} bytes, its task wrote {file.size_bytes}: give --to a directory that the driver "
                "and all executors share"
            )

    def remove(self) -> None:
        """Leave nothing. A task that nobody waits for any more may still write here; `prune` takes what it leaves."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave all as it is, for whoever goes on."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def note_of(file: DataFile) -> bytes:
    """Make the note that stands beside a finished attempt."""
    return codec.encode(file)


def _noted_or_none(path: Path) -> DataFile | None:
    try:
        return codec.decode(DataFile, path.read_bytes(), what=str(path))
    except (FileNotFoundError, Corrupted):
        return None
