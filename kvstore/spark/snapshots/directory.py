"""Snapshots in a local or shared directory. The driver and the executors must see it under the same path, and it must
rename atomically.

The files:

    <id>/            a snapshot, complete since one rename put it here
    .work-<id>/      a snapshot in progress, or the work of a killed job
    .gone-<id>/      a snapshot that is being removed
    .lock            held while a snapshot gets a child or a legal hold, or is removed
    .hold-<id>       a legal hold on a snapshot
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvstore.env.files.private import FILE_MODE, FOLDER_MODE, private_opener
from kvstore.env.files.write_trial import nearest, write_fault
from kvstore.errors import ConfigError, Corrupted, Unavailable
from kvstore.os_errors import is_no_space, reason_of
from kvstore.places import local_path
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.chains import chain_of
from kvstore.spark.snapshots.legal_holds import LegalHold, encode_hold
from kvstore.spark.snapshots.manifest import DataFile, Manifest
from kvstore.spark.snapshots.remote import Location, RemotePath
from kvstore.spark.snapshots.signing import Keys
from kvstore.spark.snapshots.store import GONE, HOLD, RESUMABLE_S, WORK, SnapshotStore, going

log = logging.getLogger(__name__)
LOCK = ".lock"
LOCK_S, LOCK_AGAIN_S = 60.0, 0.05
"""Maximum seconds to wait for the lock, and seconds between attempts. The lock is only held for a rename and its
sync."""
READY = "ready"
"""The folder within a work folder that becomes the snapshot."""


class DirectoryStore(SnapshotStore):
    """The store of snapshots for a directory on a mounted file system."""

    def __init__(self, root: Path, keys: Keys = ()) -> None:
        super().__init__(local_path(root), keys)
        self._path = local_path(root)

    @property
    def root(self) -> Path:
        return self._path

    def folder(self, snapshot: str) -> Path:
        return self.root / snapshot

    def work(self, snapshot: str) -> Path:
        return self.root / f"{WORK}{snapshot}"

    def check_writable(self) -> None:
        place = nearest(self.root)
        if not place.is_dir():
            raise ConfigError(f"{place} is not a directory; pass a directory to --to, or the name of a new one")
        if fault := write_fault(self.root):
            raise _no_space(place, OSError(fault.errno, fault.reason)) if fault.is_full else ConfigError(str(fault))

    def begin(self) -> None:
        self.root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def lock_or_none(self, folder: Location) -> FileLock | None:
        assert isinstance(folder, Path)
        lock = lock_or_none(folder)
        return None if lock is None else FileLock(lock)

    def is_torn(self, snapshot: str) -> bool:
        """Return True if the snapshot's folder exists. A removal cannot leave such a folder, because it renames the
        folder first."""
        return self.folder(snapshot).is_dir()

    def may_continue(self, parent: str) -> bool:
        """Return True if the parent exists now. `publish` checks again under the lock."""
        return parent in self.ids()

    # ── coming and going ──

    def place_of(self, snapshot: str, piece: str, file: DataFile) -> Path:
        return self.work(snapshot) / READY / manifests.DATA / f"{piece}.parquet"

    def publish(self, manifest: Manifest, moves: Mapping[Location, Location]) -> None:
        """Write the manifest, then make the snapshot visible with one rename. Everything is synced to disk before
        the rename."""
        ready = self.work(manifest.id) / READY
        ready.mkdir(mode=FOLDER_MODE, exist_ok=True)
        (ready / manifests.DATA).mkdir(mode=FOLDER_MODE, exist_ok=True)
        for source, place in moves.items():
            if source.exists():
                os.rename(str(source), str(place))
        sizes = {file.path: file.size_bytes for file in manifest.files}
        for path, wanted in sizes.items():
            _check_size(ready / path, wanted)
        self.publish_folder(manifest, ready)

    def publish_folder(self, manifest: Manifest, ready: Path) -> None:
        """Turn the folder `ready`, which has the data files, into a snapshot."""
        sync_tree(ready)
        write_durably(ready / manifests.NAME, manifests.encode(manifest, self.keys))
        sync_directory(ready)
        os.rename(ready, self.folder(manifest.id))
        sync_directory(self.root)

    @contextmanager
    def coming_and_going(self) -> Iterator[None]:
        until = time.monotonic() + LOCK_S
        with open(self.root / LOCK, "ab", opener=private_opener) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise Unavailable(f"{file.name} is locked by another `kvstore snapshot`; retry") from None
                    time.sleep(LOCK_AGAIN_S)
            yield

    @contextmanager
    def reading(self, snapshots: Sequence[str]) -> Iterator[None]:
        """Hold a shared lock on each manifest during the block. The locks end with this process if it dies."""
        with ExitStack() as held:
            for each in snapshots:
                path = self.folder(each) / manifests.NAME
                file = held.enter_context(open(path, "rb"))
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise going(each) from None
                except OSError as error:  # a file system without locks
                    log.warning(
                        "snapshot=%s cannot be locked, so a prune may remove it while it is read: %s", each, error
                    )
                if not path.exists():  # it was removed before the file was locked
                    raise going(each)
            yield

    def is_held(self, snapshot: str) -> bool:
        return os.path.lexists(self.root / f"{HOLD}{snapshot}")

    def hold(self, snapshot: str, hold: LegalHold) -> None:
        with self.coming_and_going():
            chain_of(self.load_chain(snapshot), snapshot)
            write_durably(self.hold_file(snapshot), encode_hold(hold))

    def remove(self, snapshot: str) -> bool:
        gone = self.root / f"{GONE}{snapshot}"
        shutil.rmtree(gone, ignore_errors=True)
        with (
            suppress(FileNotFoundError),
            self.coming_and_going(),
            _unread(self.folder(snapshot) / manifests.NAME) as is_unread,
        ):
            if not is_unread or self.is_held(snapshot):
                return False
            if any(each.parent == snapshot for each in self.load_readable()[0].values()):
                return False
            os.rename(self.folder(snapshot), gone)
            sync_directory(self.root)
        shutil.rmtree(gone, onerror=_raise_unless_gone)
        return True

    def remove_work(self, folder: Location) -> None:
        """Remove the folder of unfinished work. A task that was forgotten may still write there; `prune` removes its
        files."""
        shutil.rmtree(str(folder), ignore_errors=True)

    def stale_remains(self, now_s: float) -> list[Location]:
        return [each for each in self.remains() if each.name.startswith(GONE) or _age_s(each, now_s) > RESUMABLE_S]

    def remove_remains(self, folders: Iterable[Location]) -> list[Location]:
        for folder in folders:
            assert isinstance(folder, Path)
            if folder.name.startswith(GONE):  # nobody needs it; a lock file would disturb another removal
                shutil.rmtree(folder, ignore_errors=True)
            elif (lock := lock_or_none(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
        return [folder for folder in folders if not folder.exists()]


@contextmanager
def _unread(manifest: Path) -> Iterator[bool]:
    """Yield True if no process reads the snapshot. Then no process can start to read it while the block runs. Raises
    FileNotFoundError."""
    try:
        file = os.open(manifest, os.O_RDWR)  # NFS requires write access for an exclusive lock
    except PermissionError:
        file = os.open(manifest, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_unread = True
    except BlockingIOError:
        is_unread = False
    except OSError as error:  # a file system without locks
        log.info("file=%s cannot be locked: %s", manifest, error)
        is_unread = True
    try:
        yield is_unread
    finally:
        os.close(file)


class FileLock:
    """An exclusive lock on a file, held until `release` or the end of this process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def is_held(self) -> bool:
        """Return True: no other process can take the lock while this process lives."""
        return True

    def check(self) -> None:
        """Do nothing: this process holds the lock as long as it lives."""

    def stop(self) -> None:
        """Do nothing: there is no heartbeat to stop."""

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _check_size(place: Path, wanted: int) -> None:
    found = place.stat().st_size if place.exists() else None
    if found != wanted:
        raise Corrupted(
            f"{place}: expected {wanted} bytes as its task wrote, got {found}; pass a directory to --to that the "
            "driver "
            "and all executors share"
        )


def _raise_unless_gone(_: object, path: str, found: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(found[1], FileNotFoundError):
        raise found[1]


def _age_s(path: Location, now_s: float) -> float:
    try:
        return now_s - os.stat(str(path)).st_mtime
    except FileNotFoundError:
        return 0.0


@contextmanager
def explaining_full_disk(path: Location) -> Iterator[None]:
    """Replace the error of a full disk at `path` by a ConfigError with advice."""
    try:
        yield
    except OSError as error:
        if not is_no_space(error):
            raise
        raise _no_space(path, error) from None


def _no_space(path: Location, error: OSError) -> ConfigError:
    why = reason_of(error, str(path), has_inodes=_has_inodes(path))
    return ConfigError(f"{why}; free space there and run the same command again to continue")


def _has_inodes(path: Location) -> bool:
    if isinstance(path, RemotePath):
        return True
    try:
        found = os.statvfs(path)
    except OSError:
        return True
    return not found.f_files or found.f_favail > 0


def lock_or_none(folder: Path) -> int | None:
    """Return the descriptor of a locked file; the lock ends with this process. Return None if another process holds
    the lock, or if the folder is missing or belongs to another user."""
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, FILE_MODE)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def write_durably(path: Location, data: bytes) -> None:
    """Write a file atomically and sync it."""
    if isinstance(path, RemotePath):
        path.write(data)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb", opener=private_opener) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names in it survive a crash."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Sync all directories below a path, so that their names survive a crash. The content of files is synced by
    their writers."""
    for folder in _folders(path):
        sync_directory(folder)


def _folders(path: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(path, topdown=False):
        yield Path(folder)
