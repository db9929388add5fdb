"""A store of snapshots: `<id>/manifest.json` and `<id>/data/*.parquet`. Unfinished and removed snapshots are hidden.

    <id>/            a snapshot, once it has its manifest
    .work-<id>/      a snapshot in progress, or the work of a killed job
    .gone-<id>/      a snapshot that is being removed
    .read-<reader>/  at a URL: a restore is running, and names the snapshots that must stay
    .hold-<id>       a legal hold on a snapshot, which must stay with all snapshots that it builds on

This module has what is common to all stores. Publishing and removing: directory.py, objects.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from kvstore.errors import Corrupted, InvalidRequest, Unavailable
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.chains import newest_or_none
from kvstore.spark.snapshots.legal_holds import LegalHold, decode_hold
from kvstore.spark.snapshots.manifest import DataFile, Manifest
from kvstore.spark.snapshots.remote import TEMPORARY, Location
from kvstore.spark.snapshots.signing import Keys
from kvstore.spark.snapshots.stored import read_document

WORK = ".work-"
GONE = ".gone-"
READ = ".read-"
HOLD = ".hold-"
RESUMABLE_S = 86_400.0
"""Seconds for which unfinished work can be resumed, which is the maximum lifetime of pins."""


class SnapshotLock(Protocol):
    """A lock that shows other processes that the driver of a snapshot is alive. It ends with the driver's process."""

    def is_held(self) -> bool:
        """Return True unless another driver has taken the lock meanwhile."""

    def check(self) -> None:
        """Raise Unavailable if another driver has taken the lock meanwhile."""

    def stop(self) -> None:
        """Stop writing to the folder, which is about to be removed."""

    def release(self) -> None: ...


class SnapshotStore(ABC):
    """A store of snapshots at one place. Reads raise ConfigError if the place has no snapshots, and Corrupted or
    InvalidRequest for unusable manifests."""

    check_s = 0.5
    """Minimum seconds between checks of the progress of work."""

    def __init__(self, root: Location, keys: Keys = ()) -> None:
        self._root, self.keys = root, keys

    @property
    def root(self) -> Location:
        return self._root

    def folder(self, snapshot: str) -> Location:
        return self.root / snapshot

    def work(self, snapshot: str) -> Location:
        return self.root / f"{WORK}{snapshot}"

    def ids(self) -> list[str]:
        """Return the ids of all finished snapshots, readable or not, sorted."""
        try:
            named = [each for each in self.root.iterdir() if manifests.is_id(each.name)]
        except FileNotFoundError:
            return []
        return sorted(each.name for each in named if (each / manifests.NAME).is_file())

    def load(self, snapshot: str) -> Manifest:
        found = self._load_or_none(snapshot)
        if found is None:
            known = ", ".join(self.ids()[-3:]) or "none"
            raise InvalidRequest(f"no snapshot {snapshot} in {self.root}; the latest are: {known}")
        return found

    def _load_or_none(self, snapshot: str) -> Manifest | None:
        """Return the manifest, or None if it does not exist, for example because `prune` has removed it meanwhile."""
        path = self.folder(snapshot) / manifests.NAME
        try:
            data = read_document(path, levels=2)
        except (FileNotFoundError, NotADirectoryError):
            if self.is_torn(snapshot):
                raise Corrupted(f"{path} is missing; {manifests.REMEDY}") from None
            return None
        found = manifests.decode(data, what=str(path), keys=self.keys)
        if found.id != snapshot:
            raise Corrupted(f"{path} belongs to snapshot {found.id}; snapshots cannot be renamed")
        return found

    def load_all(self) -> dict[str, Manifest]:
        """Return the manifests of all snapshots by id. Raises the error of `load` for the first unreadable manifest,
        because the parent of that snapshot is unknown."""
        return {each.id: each for each in map(self._load_or_none, self.ids()) if each is not None}

    def load_chain(self, snapshot: str) -> dict[str, Manifest]:
        """Return the manifests of a snapshot and of the existing snapshots that it builds on. Other snapshots may be
        damaged."""
        found = {snapshot: self.load(snapshot)}
        name = found[snapshot].parent
        while name is not None and name not in found and (parent := self._load_or_none(name)) is not None:
            found[name] = parent
            name = parent.parent
        return found

    def load_readable(self) -> tuple[dict[str, Manifest], dict[str, str]]:
        """Return the manifests of all readable snapshots by id, and the reason why each other snapshot is unreadable
        by id."""
        found: dict[str, Manifest] = {}
        problems: dict[str, str] = {}
        for name in self.ids():
            try:
                manifest = self._load_or_none(name)
            except (Corrupted, InvalidRequest) as error:
                problems[name] = str(error)
            else:
                found |= {name: manifest} if manifest is not None else {}
        for name in {each.parent for each in found.values() if each.parent} - found.keys() - problems.keys():
            try:
                self._load_or_none(name)
            except (Corrupted, InvalidRequest) as error:  # its folder exists, its manifest does not
                problems[name] = str(error)
        return found, problems

    def newest(self) -> Manifest:
        """Return the newest snapshot. Raises InvalidRequest if there is none."""
        found = newest_or_none(self.load_all())
        if found is None:
            raise InvalidRequest(f"no snapshots in {self.root}")
        return found

    # ── legal holds ──

    def hold_file(self, snapshot: str) -> Location:
        return self.root / f"{HOLD}{snapshot}"

    def is_held(self, snapshot: str) -> bool:
        """Return True if the snapshot is under a legal hold, readable or not."""
        return self.hold_file(snapshot).exists()

    def holds(self) -> dict[str, LegalHold]:
        """Return the legal holds by the snapshot's id, also those whose snapshot is missing. A hold that cannot be
        read counts."""
        found: dict[str, LegalHold] = {}
        try:
            names = sorted(each.name for each in self.root.iterdir())
        except FileNotFoundError:
            return {}
        for name in names:
            if name.startswith(HOLD) and not name.endswith(TEMPORARY):
                with suppress(FileNotFoundError):  # it has just been released
                    found[name.removeprefix(HOLD)] = decode_hold(self.root / name)
        return found

    @abstractmethod
    def hold(self, snapshot: str, hold: LegalHold) -> None:
        """Put a snapshot under a legal hold, which replaces an earlier hold. Afterwards no `remove` removes the
        snapshot or a snapshot that it builds on. Raises InvalidRequest or Corrupted if the chain of the snapshot is not
        there, Unavailable if one of them is being removed, OSError."""

    def release_hold(self, snapshot: str) -> bool:
        """Remove the legal hold of a snapshot. Returns False if there is none. Raises OSError."""
        is_there = self.is_held(snapshot)
        self.hold_file(snapshot).unlink(missing_ok=True)
        return is_there

    # ── coming and going ──

    @abstractmethod
    def check_writable(self) -> None:
        """Check that the place can be written, before any work starts. Raises ConfigError, Unavailable."""

    @abstractmethod
    def begin(self) -> None:
        """Create the place if it does not exist."""

    @abstractmethod
    def lock_or_none(self, folder: Location) -> SnapshotLock | None:
        """Lock a folder of work. Returns None if another driver has the lock, or if the folder is missing or belongs
        to another user."""

    @abstractmethod
    def is_torn(self, snapshot: str) -> bool:
        """Return True if the snapshot has files but no manifest, and no process is creating or removing it."""

    @abstractmethod
    def may_continue(self, parent: str) -> bool:
        """Return True if `parent` exists and will stay. Call this after the plan that announces a child of `parent`
        is written."""

    @abstractmethod
    def place_of(self, snapshot: str, piece: str, file: DataFile) -> Location:
        """Return the path to which a finished file moves when its snapshot is published. The manifest determines the
        file's name."""

    @abstractmethod
    def publish(self, manifest: Manifest, moves: Mapping[Location, Location]) -> None:
        """Move the files to their places, then turn them into a snapshot atomically. `moves` maps each file to its
        place.

        Raises Corrupted if a file is not as its task wrote it, Unavailable if another driver has published the
        snapshot.
        """

    @abstractmethod
    def coming_and_going(self) -> AbstractContextManager[None]:
        """Keep other processes from adding a child to a snapshot, or from removing a snapshot, during the block.
        Raises Unavailable."""

    @abstractmethod
    def reading(self, snapshots: Sequence[str]) -> AbstractContextManager[None]:
        """Protect the snapshots from removal during the block. A reader without write access continues unprotected.
        Raises Unavailable if one of the snapshots is being removed."""

    @abstractmethod
    def remove(self, snapshot: str) -> bool:
        """Remove a snapshot: first its manifest, atomically, then its files. Two processes may remove the same snapshot
        at once.

        Returns False and keeps the snapshot if it is being read, is under a legal hold, or another snapshot continues
        it. Raises Unavailable.
        """

    @abstractmethod
    def remove_work(self, folder: Location) -> None:
        """Remove all files of an unfinished snapshot."""

    @abstractmethod
    def stale_remains(self, now_s: float) -> list[Location]:
        """Return the folders of work that no driver can continue, because its driver and its pin are gone. `now_s`
        is the current time in seconds since 1970."""

    @abstractmethod
    def remove_remains(self, folders: Iterable[Location]) -> list[Location]:
        """Remove these folders, except those that a driver holds or that belong to another user. Returns the removed
        folders."""

    def remains(self) -> list[Location]:
        """Return the folders that killed jobs and unfinished removals have left."""
        try:
            return sorted(each for each in self.root.iterdir() if each.name.startswith((WORK, GONE)))
        except FileNotFoundError:
            return []


def going(snapshot: str) -> Unavailable:
    """Return the error for a reader whose snapshot is already being removed."""
    return Unavailable(f"snapshot {snapshot} is being removed by `kvstore snapshot prune`")


def newest_of(store: SnapshotStore, cluster: str) -> Manifest:
    """Return the newest readable snapshot of this cluster. Raises InvalidRequest."""
    found = newest_or_none({each.id: each for each in store.load_readable()[0].values() if each.cluster == cluster})
    if found is None:
        raise InvalidRequest(f"no snapshot of this cluster in {store.root}; take a full snapshot")
    return found
