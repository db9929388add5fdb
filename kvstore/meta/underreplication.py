"""Which ledgers lack copies, and who repairs which: Apache BookKeeper's nodes and texts below `underreplication`.

A mark is a node that names the bookies whose copies are missing. A worker takes a ledger by an ephemeral lock, repairs
it, and deletes the mark with the version it had when the lock was taken: if somebody marked the ledger again meanwhile,
the mark stays. Auto-recovery is off while the node `disable` exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf import text_format

from kvstore.errors import ConfigError, Corrupted, NodeExists, NoSuchNode, NotEmpty, VersionConflict
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore, Watch, ensure_path
from kvstore.meta.update import until_known
from kvstore.proto.bookkeeper_metadata_pb2 import (
    LedgerRereplicationLayoutFormat,
    LockDataFormat,
    UnderreplicatedLedgerFormat,
)
from kvstore.types import BookieId, LedgerId

LAYOUT = LedgerRereplicationLayoutFormat(type="BASIC", version=1)
_ATTEMPTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Mark:
    """A ledger that lacks copies."""

    ledger: LedgerId
    missing: tuple[BookieId, ...]
    """Bookies whose copies are missing, in the order in which that was found."""
    ctime_ms: int
    """When it was first marked; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class RepairLock:
    """A marked ledger that this process alone repairs, until its session ends."""

    mark: Mark
    version: int
    """Of the mark, when the lock was taken."""
    session: int


def encode_mark(mark: Mark) -> bytes:
    message = UnderreplicatedLedgerFormat(replica=mark.missing)
    if mark.ctime_ms:
        message.ctime = mark.ctime_ms
    return text_format.MessageToString(message).encode()


def decode_mark(ledger: LedgerId, data: bytes) -> Mark:
    """Raises Corrupted."""
    try:
        message = text_format.Parse(data.decode(), UnderreplicatedLedgerFormat(), allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise Corrupted(f"ledger {ledger}: its under-replication mark is malformed: {error}") from error
    return Mark(ledger, tuple(map(BookieId, message.replica)), message.ctime)


class RepairMarks:
    """Marks and locks. Calls raise MetadataUnavailable or MetadataUnknown besides what they name."""

    def __init__(self, store: MetadataStore, worker: str) -> None:
        """`worker` says in a lock who holds it, for people to read."""
        self._store, self._worker = store, worker
        self._held: set[LedgerId] = set()
        """Taken by this object: two workers of one process share a session, and exclude each other too."""

    async def initialise(self) -> None:
        """Make the nodes where they are absent. Raises ConfigError for a layout that this build does not understand."""
        await ensure_path(self._store, paths.UNDERREPLICATION)
        try:
            await self._store.create(paths.UNDERREPLICATION_LAYOUT, text_format.MessageToString(LAYOUT).encode())
        except NodeExists:
            await self._check_layout()
        for path in (paths.UNDERREPLICATED, paths.UNDERREPLICATION_LOCKS):
            await ensure_path(self._store, path)

    async def _check_layout(self) -> None:
        data, _ = await self._store.get(paths.UNDERREPLICATION_LAYOUT)
        try:
            layout = text_format.Parse(data.decode(), LedgerRereplicationLayoutFormat(), allow_unknown_field=True)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise ConfigError(f"{paths.UNDERREPLICATION_LAYOUT} is malformed: {error}") from error
        if layout != LAYOUT:
            raise ConfigError(
                f"{paths.UNDERREPLICATION_LAYOUT} is {layout.type} {layout.version}; this build works with BASIC 1"
            )

    async def mark(self, ledger: LedgerId, missing: Iterable[BookieId], now_ms: int) -> None:
        """Note that the copies of `missing` are lacking, besides those noted before."""
        wanted = tuple(missing)
        await until_known(lambda: self._mark(ledger, wanted, now_ms))

    async def _mark(self, ledger: LedgerId, missing: tuple[BookieId, ...], now_ms: int) -> None:
        path = paths.underreplicated(ledger)
        for _ in range(_ATTEMPTS_MAX):
            try:
                await self._store.create(path, encode_mark(Mark(ledger, missing, now_ms)))
                return
            except NoSuchNode:
                await ensure_path(self._store, paths.parent(path))
                continue
            except NodeExists:
                pass
            try:
                mark, version = await self.read(ledger)
                merged = Mark(ledger, tuple(dict.fromkeys((*mark.missing, *missing))), mark.ctime_ms)
                # Also when nothing is new: the version tells a worker that the ledger was found lacking again.
                await self._store.set(path, encode_mark(merged), version)
                return
            except (NoSuchNode, VersionConflict):
                continue
        raise VersionConflict(path)

    async def read(self, ledger: LedgerId) -> tuple[Mark, int]:
        """The ledger's mark and its version. Raises NoSuchNode if it is not marked, Corrupted."""
        data, stat = await self._store.get(paths.underreplicated(ledger))
        return decode_mark(ledger, data), stat.version

    async def list_marked(self) -> list[LedgerId]:
        """The ledgers that lack copies, rising. A listing that fails raises; it is never a shorter list."""
        await self._store.sync(paths.UNDERREPLICATED)
        return sorted(await self._marked_below(paths.UNDERREPLICATED))

    async def _marked_below(self, path: str) -> list[LedgerId]:
        ledger = paths.underreplicated_of(path)
        if ledger is not None:
            return [ledger]
        try:
            names = await self._store.children(path)
        except NoSuchNode:
            return []  # it had become empty and was removed
        return [found for name in names for found in await self._marked_below(paths.join(path, name))]

    async def locked(self) -> list[LedgerId]:
        """The ledgers that somebody repairs just now, rising."""
        try:
            names = await self._store.children(paths.UNDERREPLICATION_LOCKS)
        except NoSuchNode:
            return []
        return sorted(LedgerId(int(name.removeprefix("urL"))) for name in names if name.startswith("urL"))

    async def acquire(self, ledger: LedgerId) -> RepairLock | None:
        """Lock a marked ledger for repair; None if another worker has it, or if it is not marked any more."""
        if ledger in self._held:
            return None
        self._held.add(ledger)
        lock = None
        try:
            lock = await until_known(lambda: self._acquire(ledger))
        finally:
            if lock is None:
                self._held.discard(ledger)
        return lock

    async def _acquire(self, ledger: LedgerId) -> RepairLock | None:
        path = paths.underreplication_lock(ledger)
        text = text_format.MessageToString(LockDataFormat(bookieId=self._worker)).encode()
        try:
            await self._store.create(path, text, ephemeral=True)
        except NodeExists:
            if not await self._is_own(path):
                return None
        session = self._store.session
        try:
            mark, version = await self.read(ledger)
        except NoSuchNode:
            await self._unlock(path, session)
            return None
        return RepairLock(mark, version, session)

    async def _is_own(self, path: str) -> bool:
        """Whether this session has the lock: from an attempt whose connection broke."""
        try:
            _, stat = await self._store.get(path)
        except NoSuchNode:
            return False
        return stat.owner == self._store.session

    async def replicated(self, lock: RepairLock) -> bool:
        """The ledger is repaired: remove its mark and the lock. False if it was marked again meanwhile; the mark
        stays."""
        path = paths.underreplicated(lock.mark.ledger)
        try:
            await until_known(lambda: self._delete(path, lock.version))
            is_done = True
        except VersionConflict:
            is_done = False
        while is_done and (path := paths.parent(path)) != paths.UNDERREPLICATED:
            try:
                await until_known(lambda: self._delete(path, -1))
            except NotEmpty:
                break
        await self.release(lock)
        return is_done

    async def release(self, lock: RepairLock) -> None:
        """Leave the ledger to others. A lock that went with a lost session is another's by now, and is left alone."""
        ledger = lock.mark.ledger
        try:
            await until_known(lambda: self._unlock(paths.underreplication_lock(ledger), lock.session))
        finally:
            self._held.discard(ledger)

    async def _unlock(self, path: str, session: int) -> None:
        try:
            _, stat = await self._store.get(path)
            if stat.owner == session == self._store.session:
                await self._store.delete(path, stat.version)
        except NoSuchNode:
            return

    async def _delete(self, path: str, version: int) -> None:
        try:
            await self._store.delete(path, version)
        except NoSuchNode:
            return

    async def is_enabled(self) -> bool:
        """Whether auto-recovery may work."""
        try:
            await self._store.get(paths.UNDERREPLICATION_DISABLED)
        except NoSuchNode:
            return True
        return False

    async def disable(self) -> None:
        """Keep every worker of the cluster from starting a repair. Disabling twice changes nothing."""
        await until_known(lambda: self._disable())

    async def _disable(self) -> None:
        await ensure_path(self._store, paths.UNDERREPLICATION_DISABLED)

    async def enable(self) -> None:
        await until_known(lambda: self._delete(paths.UNDERREPLICATION_DISABLED, -1))

    def watch_enabled(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after auto-recovery may have been enabled or disabled."""
        return self._store.watch(paths.UNDERREPLICATION_DISABLED, changed)

    async def lost_bookie_delay_s(self) -> int:
        """How long a bookie must be away before its ledgers are marked; 0 if nobody has set it. Raises Corrupted."""
        try:
            data, _ = await self._store.get(paths.LOST_BOOKIE_RECOVERY_DELAY)
        except NoSuchNode:
            return 0
        if not data.isdigit():
            raise Corrupted(f"{paths.LOST_BOOKIE_RECOVERY_DELAY} is {data!r}, want seconds")
        return int(data)

    async def set_lost_bookie_delay_s(self, delay_s: int) -> None:
        data = str(delay_s).encode()
        await until_known(lambda: self._put(paths.LOST_BOOKIE_RECOVERY_DELAY, data))

    async def _put(self, path: str, data: bytes) -> None:
        await ensure_path(self._store, path)
        await self._store.set(path, data, -1)
