"""The marks of under-replicated ledgers, and the locks of the workers that repair them. The layout is Apache
BookKeeper's, so that Apache's shell and auto-recovery work beside ours. `recovery_settings.py` has the settings of
auto-recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

from kvstore.errors import (
    ConfigError,
    Corrupted,
    MetadataError,
    NodeExists,
    NoSuchNode,
    NotEmpty,
    UndecodableNode,
    VersionConflict,
)
from kvstore.meta import marks, paths
from kvstore.meta.layout import get_unless_closed, unless_closed
from kvstore.meta.marks import LedgerMark
from kvstore.meta.store import MetadataStore, SessionState, Watch, ensure_path
from kvstore.meta.update import until_known
from kvstore.types import BookieId, LedgerId

_ATTEMPTS_MAX = 16
_STEP = 1_000
"""Number of ledgers that are processed between two turns of the event loop."""


class MarkLock:
    """The right to repair one marked ledger. It lasts until it is released or the session ends."""

    def __init__(self, store: MetadataStore, mark: LedgerMark, session: int) -> None:
        self.mark = mark
        """The mark as read after the lock was taken."""
        self._store, self._session = store, session

    @property
    def is_held(self) -> bool:
        """True if the session that holds the lock is not known to have ended. Check this before each write that the
        lock protects."""
        return self._store.state is SessionState.CONNECTED and self._store.session == self._session

    # docs/protocol.md A2
    async def release(self) -> None:
        """Release the lock. Succeeds if the lock no longer exists. After the session has ended, an existing lock
        belongs to another worker and stays.

        If this call raises an error, the session and its lock may still exist: call again.
        """
        await until_known(self._delete)

    async def _delete(self) -> None:
        path = paths.mark_lock(self.mark.ledger)
        with suppress(NoSuchNode):
            _, stat = await self._store.get(path)
            if stat.owner == self._session == self._store.session:
                await self._store.delete(path, stat.version)


class Underreplication:
    """Reads and changes all marks and locks. Calls raise MetadataUnavailable or MetadataUnknown in addition to the
    errors that they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def ensure(self) -> None:
        """Create the parent nodes that Apache's tools and this class expect. Idempotent. Raises ConfigError if the
        layout of marks is unknown."""
        await until_known(self._ensure)

    async def _ensure(self) -> None:
        for path in (paths.MARKS, paths.MARK_LOCKS, paths.AUDITOR_VOTES):
            await ensure_path(self._store, path)
        with suppress(NodeExists):
            await self._store.create(paths.MARKS_LAYOUT, marks.encode_layout())
        data, _ = await self._store.get(paths.MARKS_LAYOUT)
        try:
            found = marks.decode_layout(data, what=paths.MARKS_LAYOUT)
        except Corrupted as error:
            raise ConfigError(str(error)) from error
        if found != marks.LAYOUT:
            raise ConfigError(f"{paths.MARKS_LAYOUT} is {found}; this build works with {marks.LAYOUT}")

    # ── marks ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md A1
    async def mark(self, ledger: LedgerId, missing: Iterable[BookieId], now_ms: int, *, rewrite: bool = False) -> bool:
        """Add `missing` to the bookies in the ledger's mark, and return True if that changed the mark.

        With `rewrite`, write the mark even if it already names all of these bookies, because new damage was found. Then
        a worker that is repairing the ledger, and may have passed the damaged entries, does not remove the mark. Raises
        VersionConflict if other writers were first at every attempt, UndecodableNode if another user has closed the
        mark, or a directory above it, to ours.
        """
        wanted = sorted(set(missing))
        await self._store.sync(paths.MARKS)  # a mark that is only cached, and was removed, must not count
        return await until_known(lambda: self._mark(ledger, wanted, now_ms, rewrite=rewrite))

    async def _mark(self, ledger: LedgerId, wanted: list[BookieId], now_ms: int, *, rewrite: bool) -> bool:
        path = paths.mark(ledger)
        for _ in range(_ATTEMPTS_MAX):
            try:
                data, stat = await get_unless_closed(self._store, path)
                found = marks.decode_mark(ledger, data, stat)
                more = [each for each in wanted if each not in found.replicas]
                if not more and found.replicas and not rewrite:
                    return False
                await self._store.set(path, marks.encode_mark((*found.replicas, *more), now_ms), stat.version)
                return True
            except VersionConflict:
                continue
            except NoSuchNode:
                with suppress(NodeExists):
                    async with unless_closed(self._store, paths.parent(path)):
                        await self._create(path, marks.encode_mark(wanted, now_ms))
                    return True
        raise VersionConflict(f"{path}: lost {_ATTEMPTS_MAX} times in a row against other writers")

    async def _create(self, path: str, data: bytes, *, ephemeral: bool = False) -> None:
        """Create a node and its parents. Raises NodeExists."""
        for _ in range(_ATTEMPTS_MAX):
            with suppress(NoSuchNode):
                await self._store.create(path, data, ephemeral=ephemeral)
                return
            with suppress(NoSuchNode):  # or it was removed as empty meanwhile
                await ensure_path(self._store, paths.parent(path))
        raise MetadataError(f"{path}: its parent nodes were deleted during each attempt to create it")

    async def get(self, ledger: LedgerId) -> LedgerMark | None:
        """Return the ledger's mark, which may be slightly old, or None if the ledger has no mark."""
        try:
            data, stat = await self._store.get(paths.mark(ledger))
        except NoSuchNode:
            return None
        return marks.decode_mark(ledger, data, stat)

    async def marked(self) -> AsyncIterator[LedgerMark]:
        """Yield all marks in ascending order of ledgers. Memory holds one page of the tree at a time, which covers
        65,536 ledger ids."""
        await self._store.sync(paths.MARKS)
        levels = [iter([paths.MARKS])]
        while levels:
            path = next(levels[-1], None)
            if path is None:
                levels.pop()
            elif (ledger := paths.marked_of(path)) is not None:
                if (mark := await self.get(ledger)) is not None:
                    yield mark
            else:
                names = await self._children(path)
                levels.append(iter([paths.join(path, name) for name in names]))

    async def marked_ledgers(
        self, unreadable: Callable[[str, UndecodableNode], None] | None = None
    ) -> AsyncIterator[LedgerId]:
        """Yield the ids of the marked ledgers in ascending order. Costs one request to the store per 65,536 ids,
        instead of two per ledger. The result may include a ledger whose mark is just being created or removed. A
        directory that another user has closed to ours is passed to `unreadable` and skipped, or raises UndecodableNode
        if that is None."""
        await self._store.sync(paths.MARKS)
        levels = [iter([paths.MARKS])]
        while levels:
            path = next(levels[-1], None)
            if path is None:
                levels.pop()
                continue
            try:
                names = sorted(await self._children(path))
            except UndecodableNode as error:
                if unreadable is None:
                    raise
                unreadable(path, error)
                continue
            if not paths.is_marks_page(path):
                levels.append(iter([paths.join(path, name) for name in names]))
                continue
            for start in range(0, len(names), _STEP):
                for ledger in paths.marks_of_page(path, names[start : start + _STEP]):
                    yield ledger
                await asyncio.sleep(0)  # let other tasks run

    async def _children(self, path: str) -> list[str]:
        try:
            async with unless_closed(self._store, path):
                return await self._store.children(path)
        except NoSuchNode:
            return []  # it was empty and has been removed

    def watch_marks(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the first mark appears or the last mark disappears. Other changes of marks do
        not trigger a call."""
        return self._store.watch(paths.MARKS, changed)

    # ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md A2
    async def lock(self, ledger: LedgerId, worker: str) -> MarkLock | None:
        """Take the lock of a marked ledger. Returns None if another worker has the lock, or if the ledger has no mark.

        Within a process, workers must have different names, and a worker must not request a lock that it has.
        """
        path, data = paths.mark_lock(ledger), marks.encode_lock(worker)
        session = await until_known(lambda: self._take(path, data))
        if session is None:
            return None
        try:
            mark = await until_known(lambda: self.get(ledger))
            if mark is not None:
                return MarkLock(self._store, mark, session)
            await self._remove_empty(ledger)
        except MetadataError:
            # The caller does not know of the lock: until the session ends nobody else could repair the ledger.
            with suppress(MetadataError):
                await MarkLock(self._store, LedgerMark(ledger, (), 0, 0, 0), session).release()
            raise
        await MarkLock(self._store, LedgerMark(ledger, (), 0, 0, 0), session).release()
        return None

    async def _take(self, path: str, data: bytes) -> int | None:
        """Return the id of the session that holds the lock now. If this session owns the node, and the node has this
        worker's bytes, it was made by a create whose answer was lost."""
        for _ in range(_ATTEMPTS_MAX):
            with suppress(NodeExists):
                await self._create(path, data, ephemeral=True)
            try:
                found, stat = await self._store.get(path)
            except NoSuchNode:
                continue
            return stat.owner if stat.owner == self._store.session and found == data else None
        return None

    async def holder_or_none(self, ledger: LedgerId) -> str | None:
        """Return the name of the worker that repairs the ledger, or None if there is none. Apache's workers use the
        name of their host. The name is empty if the bytes of the lock are malformed."""
        try:
            data, _ = await self._store.get(paths.mark_lock(ledger))
            return marks.decode_lock(data, what=paths.mark_lock(ledger))
        except NoSuchNode:
            return None
        except Corrupted:
            return ""

    # docs/protocol.md A3
    async def mark_replicated(self, lock: MarkLock, version: int) -> bool:
        """Remove the mark if it still has `version`, the version at which the repair began, and release the lock.

        Returns False if the mark has grown meanwhile; then the mark stays. The lock is released in both cases, unless
        the call raises an error.
        """
        mark = paths.mark(lock.mark.ledger)
        try:
            await until_known(lambda: self._remove_mark(mark, lock.mark.created, version))
            is_done = True
        except VersionConflict:
            is_done = False
        if is_done:
            await self._remove_empty(lock.mark.ledger)
        await lock.release()
        return is_done

    async def _remove_empty(self, ledger: LedgerId) -> None:
        """Remove the empty parents of a removed mark, because `marked_ledgers` would still report the ledger."""
        path = paths.mark(ledger)
        while (path := paths.parent(path)) != paths.MARKS:
            try:
                await until_known(lambda: self._remove(path, -1))
            except NotEmpty:
                break

    async def _remove_mark(self, path: str, created: int, version: int) -> None:
        """Remove a mark. If the answer to a removal is lost, a new mark may exist afterwards; `created`
        distinguishes it."""
        with suppress(NoSuchNode):
            _, stat = await self._store.get(path)
            if stat.created != created:
                raise VersionConflict(path)
            await self._store.delete(path, version)

    async def _remove(self, path: str, version: int) -> None:
        with suppress(NoSuchNode):
            await self._store.delete(path, version)
