"""Snapshots where folders cannot be renamed atomically: object stores, and file systems that are not mounted here.

    <id>/data/<piece>.<attempt>.parquet   each attempt's file has its own name: nobody overwrites another's
    <id>/manifest.json                    one put that fails if it exists: it turns the folder into a snapshot
    .work-<id>/lock-<n>                   the n-th driver of this work is alive: it counts there every few seconds
    .gone-<id>/mark-<remover>             a remover checks if the snapshot can be removed, or removes it
    .read-<reader>/reads.json, lock-<n>   a restore is running: these snapshots stay as long as it lives
    .hold-<id>                            a legal hold on a snapshot

No lock here ends with a process. A driver counts as dead when its count has not changed for LEASE_S. The next driver
then puts `lock-<n+1>`, which only one of several can do. A driver that was only paused notices this at its next count.
If it publishes before that, each driver names its own files, and only one manifest is put. If the next driver only
removes the work, it puts a mark, then checks for the manifest, then removes. A publisher puts the manifest, then checks
for a mark and for its files. So at least one of the two sees the other, and no manifest without files remains.

The driver of an incremental snapshot first puts a plan that names the parent, then checks for a mark. A remover first
puts a mark, then checks for children and plans. So at least one of the two sees the other and yields. Each remover has
its own mark, so a remover that yields does not delete the mark of another.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import uuid4

from kvstore.errors import ConfigError, Corrupted, StoreError, Unavailable
from kvstore.meta import codec
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.chains import chain_of
from kvstore.spark.snapshots.legal_holds import LegalHold, encode_hold
from kvstore.spark.snapshots.manifest import DataFile, Manifest
from kvstore.spark.snapshots.remote import Location, RemotePath
from kvstore.spark.snapshots.signing import Keys
from kvstore.spark.snapshots.store import GONE, HOLD, READ, RESUMABLE_S, WORK, SnapshotStore, going
from kvstore.spark.snapshots.work import PLAN, SnapshotPlan

log = logging.getLogger(__name__)
LOCK, MARK, READS = "lock-", "mark", "reads.json"
COUNT_S, LEASE_S = 5.0, 30.0
"""Seconds between a driver's counts, and seconds without a new count after which other drivers consider it dead."""
MARK_S = 3600.0
"""Seconds after which a remover counts as dead if it has neither removed the snapshot nor its mark."""
CHECKS, AGAIN_S = 4, 0.1
"""Number of times that a driver checks for its own lock before it considers the lock lost, and seconds between the
checks."""
MOVES = 8
"""Number of files that are moved at a time."""


class RemoteStore(SnapshotStore):
    """The store of snapshots below a URL."""

    check_s = 5.0

    def __init__(self, root: RemotePath, keys: Keys = ()) -> None:
        super().__init__(root, keys)
        self._url = root

    @property
    def root(self) -> RemotePath:
        return self._url

    def folder(self, snapshot: str) -> RemotePath:
        return self.root / snapshot

    def work(self, snapshot: str) -> RemotePath:
        return self.root / f"{WORK}{snapshot}"

    def _marks(self, snapshot: str) -> RemotePath:
        return self.root / f"{GONE}{snapshot}"

    def _is_marked(self, snapshot: str) -> bool:
        return bool(_names_in(self._marks(snapshot)))

    def check_writable(self) -> None:
        """Write and remove a file, because only a refused write shows missing permissions."""
        probe = self.root / f".probe-{uuid4().hex}"
        try:
            probe.write(b"")
            probe.unlink(missing_ok=True)
        except Unavailable:
            raise
        except (OSError, StoreError) as error:
            raise ConfigError(f"{self.root} cannot be written to: {error}") from None

    def begin(self) -> None:
        """Do nothing: the first file creates the folder."""

    def lock_or_none(self, folder: Location) -> LockHeartbeat | None:
        assert isinstance(folder, RemotePath)
        return LockHeartbeat.or_none(folder)

    def is_torn(self, snapshot: str) -> bool:
        busy = self.work(snapshot).exists() or self._is_marked(snapshot)
        return not busy and self.folder(snapshot).is_dir()

    def may_continue(self, parent: str) -> bool:
        return not self._is_marked(parent) and self._is_published(parent)

    # ── coming and going ──

    def place_of(self, snapshot: str, piece: str, file: DataFile) -> RemotePath:
        return self.folder(snapshot) / manifests.DATA / file.path.rpartition("/")[2]

    def publish(self, manifest: Manifest, moves: Mapping[Location, Location]) -> None:
        folder = self.folder(manifest.id)
        with ThreadPoolExecutor(MOVES, "publish") as threads:
            list(threads.map(_move, moves, moves.values()))
            sizes = [file.size_bytes for file in manifest.files]
            list(threads.map(_check_size, [folder / file.path for file in manifest.files], sizes))
        if not (folder / manifests.NAME).create(manifests.encode(manifest, self.keys)):
            self._leave_to_other(manifest)
            raise Unavailable(
                f"snapshot {manifest.id} was published by another driver, which considered this driver dead"
            )
        try:
            self._check_kept(manifest)
        except (OSError, StoreError):
            (folder / manifests.NAME).unlink(missing_ok=True)  # so that the next driver can continue the work
            raise

    def _check_kept(self, manifest: Manifest) -> None:
        """Raise Unavailable if another driver has removed files of this snapshot, or is about to, because it saw no
        manifest yet."""
        is_marked = self._is_marked(manifest.id)
        found = {*self.folder(manifest.id).files_below()}
        if is_marked or not found >= {file.path for file in manifest.files}:
            raise Unavailable(
                f"snapshot {manifest.id}: another driver considered this driver dead and removed its work; run the "
                "command again"
            )

    def _leave_to_other(self, manifest: Manifest) -> None:
        """Remove the files that only this driver's manifest names. The other driver has continued with the files
        that it found."""
        theirs = self.load(manifest.id).files
        for file in manifest.files:
            if file not in theirs:
                (self.folder(manifest.id) / file.path).unlink(missing_ok=True)

    @contextmanager
    def coming_and_going(self) -> Iterator[None]:
        """Do nothing: the plan, which was put before the check for a mark, protects the parent."""
        yield

    @contextmanager
    def reading(self, snapshots: Sequence[str]) -> Iterator[None]:
        """Protect the snapshots during the block: announce the read, then check for marks of removers. A remover
        puts its mark first and then checks for readers, so at least one of the two notices the other."""
        folder = self.root / f"{READ}{uuid4().hex}"
        lease = _reader_or_none(folder, snapshots)
        try:
            if lease is not None:
                for each in snapshots:
                    if not self.may_continue(each):
                        raise going(each)
            yield
        finally:
            if lease is not None:
                lease.stop()
                _forget(folder)

    def hold_file(self, snapshot: str) -> RemotePath:
        return self.root / f"{HOLD}{snapshot}"

    def hold(self, snapshot: str, hold: LegalHold) -> None:
        """Put the hold, then check for marks. A remover puts its mark, then checks for a hold, so at least one of the
        two sees the other."""
        chain = chain_of(self.load_chain(snapshot), snapshot)
        file = self.hold_file(snapshot)
        earlier = file.read_bytes() if self.is_held(snapshot) else None
        file.write(encode_hold(hold))
        for each in chain:
            if not self.may_continue(each.id):
                if earlier is None:
                    self.release_hold(snapshot)
                else:  # the snapshot was under this hold all the time
                    file.write(earlier)
                raise going(each.id)

    def _mark(self, snapshot: str) -> RemotePath:
        """Put a mark that announces the removal of the snapshot, and return the mark's path."""
        mark = self._marks(snapshot) / f"{MARK}-{uuid4().hex}"
        mark.write(b"")
        return mark

    def _is_published(self, snapshot: str) -> bool:
        return (self.folder(snapshot) / manifests.NAME).exists()

    def remove(self, snapshot: str) -> bool:
        mark = self._mark(snapshot)
        if self._is_continued(snapshot) or _is_read(self.root, snapshot) or self.is_held(snapshot):
            mark.unlink(missing_ok=True)
            return False
        if not mark.exists() and self._is_published(snapshot):
            return False  # this driver paused for MARK_S and was considered dead: a child may exist by now
        (self.folder(snapshot) / manifests.NAME).unlink(missing_ok=True)
        self.folder(snapshot).remove_all()
        mark.parent.remove_all()
        return True

    def _is_continued(self, snapshot: str) -> bool:
        plans = (_plan_or_none(each) for each in self.remains() if each.name.startswith(WORK))
        if any(plan is not None and plan.parent == snapshot for plan in plans):
            return True
        return any(each.parent == snapshot for each in self.load_readable()[0].values())

    def remove_work(self, folder: Location) -> None:
        """Remove the files of unfinished work. Files that were already moved go first, so that the remaining files
        can still be found by name. Removes nothing if a driver that was considered dead publishes the snapshot
        meanwhile."""
        assert isinstance(folder, RemotePath)
        snapshot, mark = folder.name.removeprefix(WORK), None
        try:
            if not self._is_published(snapshot) and self.folder(snapshot).exists():
                mark = self._mark(snapshot)
                if self._is_published(snapshot):
                    mark.unlink(missing_ok=True)
                    return
                self.folder(snapshot).remove_all()
            folder.remove_all()
            if mark is not None:
                mark.parent.remove_all()
        except (OSError, StoreError) as error:
            log.warning("folder=%s is left for `kvstore snapshot prune`: %s", folder, error)

    def stale_remains(self, now_s: float) -> list[Location]:
        return [each for each in self.remains() if self._age_s(each, now_s) > (RESUMABLE_S, MARK_S)[_is_mark(each)]]

    def _age_s(self, folder: Location, now_s: float) -> float:
        """Return the seconds since the last write in the folder. Released locks are ignored, because a driver that
        only checked the work and released the lock did no work."""
        assert isinstance(folder, RemotePath)
        locks = [each for each in _names_in(folder) if _is_lock(each)]
        return now_s - folder.last_written_s({each for each in locks if _is_released(_bytes_of(folder / each))})

    def remove_remains(self, folders: Iterable[Location]) -> list[Location]:
        for folder in folders:
            assert isinstance(folder, RemotePath)
            if not _is_mark(folder):
                if (lease := LockHeartbeat.or_none(folder)) is not None:  # its age depends on this machine's clock
                    lease.stop()
                    self.remove_work(folder)
                continue
            snapshot = self.folder(folder.name.removeprefix(GONE))
            if not (snapshot / manifests.NAME).exists():  # otherwise the remover died before it removed anything
                snapshot.remove_all()
            folder.remove_all()
        return [folder for folder in folders if not folder.exists()]


def _plan_or_none(folder: Location) -> SnapshotPlan | None:
    try:
        return codec.decode(SnapshotPlan, (folder / PLAN).read_bytes(), what=str(folder))
    except (FileNotFoundError, Corrupted):
        return None


def _reader_or_none(folder: RemotePath, snapshots: Sequence[str]) -> LockHeartbeat | None:
    lease = None
    try:
        # The lock comes first: a remover takes an announcement without a lock for that of a dead reader.
        lease = LockHeartbeat.or_none(folder)
        (folder / READS).write(json.dumps(list(snapshots)).encode())
    except (OSError, StoreError) as error:  # a restore may have no right to write there
        log.warning(
            "folder=%s cannot be written, so a prune may remove snapshots that are being read: %s", folder, error
        )
        if lease is not None:
            lease.stop()
            _forget(folder)
        return None
    return lease


def _is_read(root: RemotePath, snapshot: str) -> bool:
    """Return True if a live reader reads the snapshot. Removes the announcements of dead readers."""
    for folder in root.iterdir():
        if not folder.name.startswith(READ) or snapshot not in _read_by(folder):
            continue
        if (lease := LockHeartbeat.or_none(folder)) is None:
            return True
        lease.stop()
        _forget(folder)
    return False


def _forget(folder: RemotePath) -> None:
    try:
        folder.remove_all()
    except (OSError, StoreError) as error:
        log.warning("folder=%s stays until the next prune: %s", folder, error)


def _read_by(folder: RemotePath) -> list[str]:
    """Return the ids of the snapshots that a reader has announced."""
    try:
        return list(json.loads((folder / READS).read_bytes()))
    except (FileNotFoundError, ValueError):  # the reader is leaving, or ended while it wrote
        return []


def _is_mark(folder: Location) -> bool:
    return folder.name.startswith(GONE)


def _move(source: Location, place: Location) -> None:
    assert isinstance(source, RemotePath)
    assert isinstance(place, RemotePath)
    if source.exists():
        source.move_to(place)


def _check_size(place: RemotePath, wanted: int) -> None:
    try:
        found = place.size()
    except FileNotFoundError:
        found = None
    if found != wanted:
        raise Corrupted(
            f"{place}: expected {wanted} bytes as its task wrote, got {found}; driver and executors must reach the "
            "same "
            "store (its address is in the environment of each)"
        )


class LockHeartbeat:
    """A lock that shows that this process is alive: a thread raises a count in the file `lock-<n>` of a folder."""

    def __init__(self, folder: RemotePath, number: int) -> None:
        self._folder, self._number = folder, number
        self._owner = uuid4().hex
        self._count = 0
        self._over = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    @classmethod
    def or_none(cls, folder: RemotePath) -> LockHeartbeat | None:
        """Take the lock of a folder. Returns None if another driver is alive; finding that out takes up to LEASE_S
        seconds."""
        number, content = _last_of(folder)
        over = time.monotonic() + LEASE_S
        while number and time.monotonic() < over:
            if _is_released(content):
                break
            time.sleep(min(COUNT_S, LEASE_S) / 2)
            if _last_of(folder) != (number, content):
                return None
        lease = cls(folder, number + 1)
        if not lease._place.create(lease._content()):
            return None
        lease._thread.start()
        return lease

    @property
    def _place(self) -> RemotePath:
        return self._folder / f"{LOCK}{self._number:06d}"

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "count": self._count}).encode()

    def is_held(self) -> bool:
        for _ in range(CHECKS):
            if self._lost or (number := _last_of(self._folder)[0]) > self._number:
                return False
            if number == self._number:
                return True
            time.sleep(AGAIN_S)  # without an atomic overwrite, the file is missing for a moment at each count
        return False

    def check(self) -> None:
        if not self.is_held():
            raise Unavailable(
                f"{self._folder}: another driver considered this driver dead and continues its work; let it finish"
            )

    def _keep(self) -> None:
        while not self._over.wait(COUNT_S):
            self._count += 1
            try:
                if not self.is_held():
                    self._lost = True
                    return
                self._place.write(self._content())
            except (OSError, StoreError) as error:
                log.warning("folder=%s cannot write that this driver is alive: %s", self._folder, error)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def release(self) -> None:
        """Release the lock, so that another driver can continue at once."""
        self.stop()
        try:
            if not self._lost and self._place.exists():
                self._place.write(b"{}")
        except (OSError, StoreError) as error:
            log.info("folder=%s its lock expires on its own: %s", self._folder, error)


def _is_released(content: bytes) -> bool:
    return content == b"{}"


def _last_of(folder: RemotePath) -> tuple[int, bytes]:
    """Return the number and the content of the last driver's lock; the number is 0 if there is no lock."""
    last = max(filter(_is_lock, _names_in(folder)), default=None)
    if last is None:
        return 0, b""
    try:
        return int(last.removeprefix(LOCK)), (folder / last).read_bytes()
    except FileNotFoundError:
        return 0, b""


def _is_lock(name: str) -> bool:
    return name.startswith(LOCK) and name.removeprefix(LOCK).isdigit()


def _names_in(folder: RemotePath) -> list[str]:
    try:
        return [each.name for each in folder.iterdir()]
    except FileNotFoundError:
        return []


def _bytes_of(place: RemotePath) -> bytes:
    try:
        return place.read_bytes()
    except FileNotFoundError:  # it is being removed
        return b""
