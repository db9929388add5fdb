"""The settings of auto-recovery, which all nodes share, in Apache BookKeeper's layout: whether auto-recovery is on,
the delay before a lost bookie is replaced, and the times of the last checks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from kvstore.errors import Corrupted, MetadataError, NodeExists, NoSuchNode, UndecodableNode, VersionConflict
from kvstore.meta import marks, paths
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.store import MetadataStore, Watch, ensure_path
from kvstore.meta.update import until_known

_ATTEMPTS_MAX = 16


class CheckKind(StrEnum):
    """The auditor's periodic checks. The value is the name of the node with the time of the last completed check."""

    ENTRIES = "checkallledgersctime"
    PLACEMENT = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


class RecoverySettings:
    """Reads and changes the settings of auto-recovery. Calls raise MetadataUnavailable or MetadataUnknown in
    addition to the errors that they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def is_enabled(self) -> bool:
        """Return True if ledgers may be marked and repaired. An operator turns auto-recovery off for maintenance."""
        try:
            return await self._data_or_none(paths.RECOVERY_DISABLED) is None
        except UndecodableNode:
            return False  # another user has closed the node to ours, so it is there

    async def disable(self) -> None:
        """Turn auto-recovery off. Idempotent."""
        await self._put(paths.RECOVERY_DISABLED, b"")

    async def enable(self) -> None:
        """Turn auto-recovery on. Idempotent."""
        await until_known(self._enable)

    async def _enable(self) -> None:
        with suppress(NoSuchNode):
            await self._store.delete(paths.RECOVERY_DISABLED, -1)

    def watch_enabled(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after auto-recovery may have been turned on or off."""
        return self._store.watch(paths.RECOVERY_DISABLED, changed)

    async def lost_bookie_delay_s(self) -> int | None:
        """Return the seconds after which an absent bookie counts as lost, or None if the delay is not set. Raises
        UndecodableNode."""
        data = await self._data_or_none(paths.LOST_BOOKIE_DELAY)
        return None if data is None else _decoded(marks.decode_delay, data, paths.LOST_BOOKIE_DELAY)

    async def set_lost_bookie_delay_s(self, seconds: int) -> None:
        """Set the seconds after which an absent bookie counts as lost. Raises ValueError if the delay is negative or
        larger than Apache's tools can read."""
        await self._put(paths.LOST_BOOKIE_DELAY, marks.encode_delay(seconds))

    async def initialise_lost_bookie_delay_s(self, seconds: int) -> None:
        """Set the delay to `seconds` unless it is already set."""
        data = marks.encode_delay(seconds)

        async def create() -> None:
            await ensure_path(self._store, paths.UNDERREPLICATION)
            with suppress(NodeExists):
                await self._store.create(paths.LOST_BOOKIE_DELAY, data)

        await until_known(create)

    def watch_lost_bookie_delay(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the delay may have been set."""
        return self._store.watch(paths.LOST_BOOKIE_DELAY, changed)

    async def set_checked(self, kind: CheckKind, now_ms: int) -> None:
        """Record that a check was completed at `now_ms`, in milliseconds since 1970."""
        await self._put(paths.join(paths.UNDERREPLICATION, kind), marks.encode_checked(now_ms))

    async def checked_ms(self, kind: CheckKind) -> int | None:
        """Return the time of the last completed check in milliseconds since 1970, or None if there was none. Raises
        UndecodableNode."""
        path = paths.join(paths.UNDERREPLICATION, kind)
        data = await self._data_or_none(path)
        return None if data is None else _decoded(marks.decode_checked, data, path)

    async def _data_or_none(self, path: str) -> bytes | None:
        await self._store.sync(path)
        try:
            return (await get_unless_closed(self._store, path))[0]
        except NoSuchNode:
            return None

    async def _put(self, path: str, data: bytes) -> None:
        """Write `data` to the node, whatever its version: the last write wins."""
        await self._store.sync(path)  # data that are only cached, and were changed, must not count as written
        await until_known(lambda: self._put_once(path, data))

    async def _put_once(self, path: str, data: bytes) -> None:
        for _ in range(_ATTEMPTS_MAX):
            try:
                found, stat = await self._store.get(path)
                if found != data:
                    await self._store.set(path, data, stat.version)
                return
            except VersionConflict:
                continue
            except NoSuchNode:
                await ensure_path(self._store, paths.UNDERREPLICATION)
                with suppress(NodeExists):
                    await self._store.create(path, data)
                    return
        raise MetadataError(f"{path} was changed by another process during each attempt to write it")


def _decoded(decode: Callable[..., int], data: bytes, path: str) -> int:
    try:
        return decode(data, what=path)
    except Corrupted as error:
        raise UndecodableNode(str(error)) from error
