"""A directory of snapshots: `<id>/manifest.json` and `<id>/data/*.parquet`; what is being made or removed is hidden.

    <id>/            a snapshot: it came here by one rename, whole
    .work-<id>/      one that is being made, or that a killed job has left
    .gone-<id>/      one that is being removed
    .lock            held by whoever gives a snapshot a child, or takes one away

The directory may be on any file system that driver and executors see under the same path and that renames atomically.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.errors import ConfigError, Corrupted, InvalidRequest, Unavailable
from kvstore.places import local_path
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.chains import newest_or_none
from kvstore.spark.snapshots.manifest import Manifest

WORK = ".work-"
GONE = ".gone-"
LOCK = ".lock"
LOCK_S, LOCK_AGAIN_S = 60.0, 0.05
"""It is held for as long as a rename and its sync take."""
RESUMABLE_S = 86_400.0
"""Pins live no longer."""


class SnapshotStore:
    """Reads raise ConfigError for a directory that holds no snapshots, Corrupted and InvalidRequest for manifests."""

    def __init__(self, root: Path) -> None:
        self.root = local_path(root)

    @classmethod
    def at(cls, path: Path) -> tuple[SnapshotStore, str | None]:
        """The store at `path`, or the store around the one snapshot that `path` is and its id."""
        path = Path(os.path.abspath(local_path(path)))
        if (path / manifests.NAME).exists():
            return cls(path.parent), path.name
        if not path.is_dir():
            raise ConfigError(f"{path} is no directory of snapshots: `kvstore snapshot create --to {path}` makes one")
        if (
            not any(cls(path).ids())
            and not any(path.glob(f"{WORK}*"))
            and {each.name for each in path.iterdir()} - {LOCK}
        ):
            raise ConfigError(f"{path} holds no snapshot: none of its folders has a {manifests.NAME}")
        return cls(path), None

    def folder(self, snapshot: str) -> Path:
        return self.root / snapshot

    def work(self, snapshot: str) -> Path:
        return self.root / f"{WORK}{snapshot}"

    def check_writable(self) -> None:
        """Check that the place can be written, before anything is begun. Raises ConfigError."""
        place = self.root
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise ConfigError(f"{place} is no directory: give --to one, or the name of one that is to be made")
        if not os.access(place, os.W_OK | os.X_OK):
            why = "a read-only file system" if os.statvfs(place).f_flag & os.ST_RDONLY else "no permission"
            raise ConfigError(f"{place} cannot be written to: {why}")
        found = os.statvfs(place)
        if found.f_blocks and not found.f_bfree:
            raise _no_room(place)

    def ids(self) -> list[str]:
        """Of all finished snapshots, readable or not, sorted."""
        try:
            found = [each.name for each in self.root.iterdir() if (each / manifests.NAME).is_file()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if manifests.is_id(name))

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
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if path.parent.is_dir():  # who removes a snapshot renames its folder first
                raise Corrupted(f"{path} is missing; {manifests.REMEDY}") from None
            return None
        found = manifests.decode(data, what=str(path))
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
        """Those that can be read, and for the others why not."""
        found: dict[str, Manifest] = {}
        problems: dict[str, str] = {}
        for name in self.ids():
            try:
                manifest = self._load_or_none(name)
            except (Corrupted, InvalidRequest) as error:
                problems[name] = str(error)
            else:
                found |= {name: manifest} if manifest is not None else {}
        return found, problems

    def newest(self) -> Manifest:
        """Raises InvalidRequest if there is none."""
        found = newest_or_none(self.load_all())
        if found is None:
            raise InvalidRequest(f"there is no snapshot in {self.root}")
        return found

    def newest_of(self, cluster: str) -> Manifest:
        """The newest that can be read and is of this cluster. Raises InvalidRequest."""
        found = newest_or_none({each.id: each for each in self.load_readable()[0].values() if each.cluster == cluster})
        if found is None:
            raise InvalidRequest(f"there is no snapshot of this cluster in {self.root}: take a full one")
        return found

    # ── coming and going ──

    def publish(self, manifest: Manifest, ready: Path) -> None:
        """Make the folder `ready`, which has its data files, a snapshot: write the manifest, then rename. Everything
        is on disk before it is visible."""
        sync_tree(ready)
        write_durably(ready / manifests.NAME, manifests.encode(manifest))
        sync_directory(ready)
        os.rename(ready, self.folder(manifest.id))
        sync_directory(self.root)

    @contextmanager
    def coming_and_going(self) -> Iterator[None]:
        """Nobody else gives a snapshot a child, or takes one away, meanwhile. Raises Unavailable."""
        until = time.monotonic() + LOCK_S
        with open(self.root / LOCK, "ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise Unavailable(f"{file.name} is locked by another `kvstore snapshot`: try again") from None
                    time.sleep(LOCK_AGAIN_S)
            yield

    def remove(self, snapshot: str) -> bool:
        """Take a snapshot away: from one moment to the next it is none, then its files go. Two may do it at once. False
        if another continues it, perhaps since a moment ago: then it stays. Raises Unavailable."""
        gone = self.root / f"{GONE}{snapshot}"
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError), self.coming_and_going():
            if any(each.parent == snapshot for each in self.load_readable()[0].values()):
                return False
            os.rename(self.folder(snapshot), gone)
            sync_directory(self.root)
        shutil.rmtree(gone, onerror=_raise_unless_gone)
        return True

    def remains(self) -> list[Path]:
        """Find the remains of killed jobs and of removals that were not finished."""
        try:
            return sorted(each for each in self.root.iterdir() if each.name.startswith((WORK, GONE)))
        except FileNotFoundError:
            return []

    def stale_remains(self, now_s: float) -> list[Path]:
        """Those with which nobody can go on any more: their drivers are gone, and so are their pins."""
        return [each for each in self.remains() if each.name.startswith(GONE) or _age_s(each, now_s) > RESUMABLE_S]

    def remove_remains(self, folders: Iterable[Path]) -> list[Path]:
        """Remove them, but for those that a driver holds or another user has left. Returns what is gone."""
        for folder in folders:
            if folder.name.startswith(GONE):  # nobody needs it: no lock, a new file there while another removes it
                shutil.rmtree(folder, ignore_errors=True)
            elif (lock := lock_or_none(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
        return [folder for folder in folders if not folder.exists()]


def _raise_unless_gone(_: object, path: str, found: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(found[1], FileNotFoundError):
        raise found[1]


def _age_s(path: Path, now_s: float) -> float:
    try:
        return now_s - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@contextmanager
def room_at(path: Path) -> Iterator[None]:
    """Raises ConfigError, which says what to do, when the disk of `path` is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _no_room(path) from None


def _no_room(path: Path) -> ConfigError:
    return ConfigError(f"no space left at {path}: make room there, and the same command goes on with what is finished")


def lock_or_raise(folder: Path) -> int:
    """A lock that ends with this process. Raises OSError."""
    lock = lock_or_none(folder)
    if lock is None:  # a driver that began just now took the folder for what a killed one has left
        raise BlockingIOError(errno.EAGAIN, "another snapshot is being begun here, try again", str(folder))
    return lock


def lock_or_none(folder: Path) -> int | None:
    """A lock that ends with this process; None if another one has it, the folder is another user's, or gone."""
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, and synced."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Make the names below a directory durable; files are synced by whoever wrote them."""
    for folder in _folders(path):
        sync_directory(folder)


def _folders(path: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(path, topdown=False):
        yield Path(folder)
