"""A place that holds snapshots: `<id>/manifest.json` and `<id>/data/*.parquet`; what is made or removed is hidden.

    <id>/            a snapshot, from the moment on at which it has its manifest
    .work-<id>/      one that is being made, or that a killed job has left
    .gone-<id>/      one that is being removed
    .read-<reader>/  at a URL: somebody restores, and names the snapshots that must stay

What is the same wherever that place is. How a snapshot comes and goes: directory.py, objects.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvstore.errors import Corrupted, InvalidRequest, Unavailable
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.chains import newest_or_none
from kvstore.spark.snapshots.manifest import DataFile, Manifest
from kvstore.spark.snapshots.remote import Location
from kvstore.spark.snapshots.signing import Keys
from kvstore.spark.snapshots.stored import read_document

WORK = ".work-"
GONE = ".gone-"
READ = ".read-"
RESUMABLE_S = 86_400.0
"""Pins live no longer."""


class SnapshotLock(Protocol):
    """Says that the driver lives which makes a snapshot. It ends with its process."""

    def is_held(self) -> bool:
        """False if another driver has it meanwhile."""

    def check(self) -> None:
        """Raises Unavailable if another driver has it meanwhile."""

    def stop(self) -> None:
        """Leave the folder alone from now on: it is about to go."""

    def release(self) -> None: ...


class SnapshotStore(ABC):
    """Reads raise ConfigError for a place that holds no snapshots, Corrupted and InvalidRequest for manifests."""

    look_s = 0.5
    """How often its work may be looked at."""

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
        """Of all finished snapshots, readable or not, sorted."""
        try:
            named = [each for each in self.root.iterdir() if manifests.is_id(each.name)]
        except FileNotFoundError:
            return []
        return sorted(each.name for each in named if (each / manifests.NAME).is_file())

    def load(self, snapshot: str) -> Manifest:
        found = self._load_or_none(snapshot)
        if found is None:
            known = ", ".join(self.ids()[-3:]) or "none"
            raise InvalidRequest(f"no snapshot {snapshot} in {self.root} (the last there: {known})")
        return found

    def _load_or_none(self, snapshot: str) -> Manifest | None:
        """None if it is not there, perhaps since another `prune` removes it."""
        path = self.folder(snapshot) / manifests.NAME
        try:
            data = read_document(path, levels=2)
        except (FileNotFoundError, NotADirectoryError):
            if self.is_torn(snapshot):
                raise Corrupted(f"{path} is missing; {manifests.REMEDY}") from None
            return None
        found = manifests.decode(data, what=str(path), keys=self.keys)
        if found.id != snapshot:
            raise Corrupted(f"{path} is of snapshot {found.id}: a snapshot cannot be renamed")
        return found

    def load_all(self) -> dict[str, Manifest]:
        """Raises what `load` raises for the first that cannot be read: what it stands on is not known."""
        return {each.id: each for each in map(self._load_or_none, self.ids()) if each is not None}

    def load_chain(self, snapshot: str) -> dict[str, Manifest]:
        """It and what it stands on, as far as that is here: whatever else the directory holds may be damaged."""
        found = {snapshot: self.load(snapshot)}
        name = found[snapshot].parent
        while name is not None and name not in found and (parent := self._load_or_none(name)) is not None:
            found[name] = parent
            name = parent.parent
        return found

    def load_readable(self) -> tuple[dict[str, Manifest], dict[str, str]]:
        """Return the snapshots that can be read, and for the others the reason why not."""
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
            except (Corrupted, InvalidRequest) as error:  # its folder is here, its manifest is not
                problems[name] = str(error)
        return found, problems

    def newest(self) -> Manifest:
        """Raises InvalidRequest if there is none."""
        found = newest_or_none(self.load_all())
        if found is None:
            raise InvalidRequest(f"there is no snapshot in {self.root}")
        return found

    # ── coming and going ──

    @abstractmethod
    def check_writable(self) -> None:
        """Check that the place can be written, before anything is begun. Raises ConfigError."""

    @abstractmethod
    def begin(self) -> None:
        """Make the place."""

    @abstractmethod
    def lock_or_none(self, folder: Location) -> SnapshotLock | None:
        """The lock of a folder of work; None if another driver has it, the folder is another user's, or gone."""

    @abstractmethod
    def is_torn(self, snapshot: str) -> bool:
        """Whether there are files of a snapshot that has no manifest, and nobody makes or removes it just now."""

    @abstractmethod
    def may_continue(self, parent: str) -> bool:
        """Whether `parent` is here and stays, now that a plan says that it will get a child."""

    @abstractmethod
    def place_of(self, snapshot: str, piece: str, file: DataFile) -> Location:
        """Where a finished file goes when its snapshot is published. Its name there is the manifest's."""

    @abstractmethod
    def publish(self, manifest: Manifest, moves: Mapping[Location, Location]) -> None:
        """Move the files to their places, then make them a snapshot from one moment to the next. Raises Corrupted if a
        file is not here as its task wrote it, Unavailable if another driver has published it."""

    @abstractmethod
    def coming_and_going(self) -> AbstractContextManager[None]:
        """Nobody else gives a snapshot a child, or takes one away, meanwhile. Raises Unavailable."""

    @abstractmethod
    def reading(self, snapshots: Sequence[str]) -> AbstractContextManager[None]:
        """Nobody takes these away meanwhile, as far as that can be said where they are: who may only read there goes on
        without. Raises Unavailable if one is just being removed."""

    @abstractmethod
    def remove(self, snapshot: str) -> bool:
        """Take a snapshot away: from one moment to the next it is none, then its files go. Two may do it at once. False
        if it is being read, or another continues it, perhaps since a moment ago: then it stays. Raises Unavailable."""

    @abstractmethod
    def remove_work(self, folder: Location) -> None:
        """All of a snapshot that is not finished."""

    @abstractmethod
    def stale_remains(self, now_s: float) -> list[Location]:
        """Those with which nobody can go on any more: their drivers are gone, and so are their pins."""

    @abstractmethod
    def remove_remains(self, folders: Iterable[Location]) -> list[Location]:
        """Remove them, but for those that a driver holds or another user has left. Returns what is gone."""

    def remains(self) -> list[Location]:
        """Find the remains of killed jobs and of removals that were not finished."""
        try:
            return sorted(each for each in self.root.iterdir() if each.name.startswith((WORK, GONE)))
        except FileNotFoundError:
            return []


def going(snapshot: str) -> Unavailable:
    """The error of a reader that comes too late."""
    return Unavailable(f"snapshot {snapshot} is just being removed by `kvstore snapshot prune`")


def newest_of(store: SnapshotStore, cluster: str) -> Manifest:
    """The newest that can be read and is of this cluster. Raises InvalidRequest."""
    found = newest_or_none({each.id: each for each in store.load_readable()[0].values() if each.cluster == cluster})
    if found is None:
        raise InvalidRequest(f"there is no snapshot of this cluster in {store.root}: take a full one")
    return found
