"""Applies the partition's log to the state while this replica does not lead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvstore.errors import (
    ClusterTooNew,
    LedgerDeleted,
    LedgerError,
    MetadataError,
    MetadataLost,
    NoSuchEntry,
    NoSuchLedger,
    StoreError,
    Unavailable,
    UndecodableNode,
    WrittenByNewer,
)
from kvstore.os_errors import is_passing
from kvstore.partition.state.engine import wait_caught_up, wait_resumable
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId, Position, Seq
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.log import PartitionLogs
from kvstore.wal.ports import LogEntry
from kvstore.wal.tailing.tail import TailReader

log = logging.getLogger(__name__)

POLL_MS = 10_000
"""Milliseconds of one read. Entries that arrive meanwhile are delivered at once."""
RETRY_S, DELETED_S = 0.1, 5.0
"""Seconds between two attempts to read; the second applies if the next ledger is deleted or undecodable, or the
next entry is marked as lost."""
NO_SPACE_RETRY_S = 1.0
"""Seconds between two attempts to write to an engine that found no space."""
ENTRIES_PER_TURN = 16
"""Entries applied before the event loop gets another turn: a few milliseconds at most."""


class Tail:
    """Follows the log from the position of the state, while `run` is running."""

    def __init__(
        self,
        partition: PartitionId,
        state: ReplicaState,
        logs: PartitionLogs,
        install_snapshot: Callable[[int], Awaitable[None]],
    ) -> None:
        """`install_snapshot` replaces the state by another replica's, if that replica has applied at least the given
        sequence. Raises StoreError if there is none."""
        self._partition, self._state, self._logs = partition, state, logs
        self._install_snapshot = install_snapshot
        self._progress = asyncio.Event()
        self._reader: TailReader | None = None
        self.lost = ""
        """Why the listed log cannot be the one that was read before; empty if it can."""
        self.on_lost: Callable[[Position], None] = lambda _: None
        """Called with this replica's position while `lost` is set."""
        self._last_logged = ""
        """The last error logged about a ledger that is deleted or undecodable."""
        self.entries = 0
        self.installs = 0
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """The reason why no entries can be applied now; empty if they can."""
        stopped = self._state.engine.stopped
        return self._trouble if stopped is None else str(stopped)

    @property
    def position(self) -> Position:
        """The position of the last entry applied, or BEGINNING if there is none."""
        return self._state.position or BEGINNING

    async def run(self) -> None:
        """Follow the log until cancelled. Raises Corrupted if the log does not continue the state; the replica must
        then not serve. Raises OSError if the engine is unusable. Transient errors are retried."""
        while True:
            try:
                await self._follow()
            except OSError as error:
                if not is_passing(error):
                    raise
                self._trouble = str(error)
                log.warning("partition=%s cannot apply the log, retrying: %s", self._partition, error)
                await asyncio.sleep(NO_SPACE_RETRY_S)

    async def _follow(self) -> None:
        """Continue reading at the position of the engine."""
        if not self._state.is_complete or self._state.engine.stopped is not None:
            await wait_resumable(self._state.engine)
            self._state.recover()
        while True:
            reader = self._reader = self._logs.reader(self._partition, self._state.position)
            try:
                while True:
                    entries = await reader.read(POLL_MS, self)
                    self.lost = ""
                    await self._apply(entries)
            except NoSuchLedger:
                log.info("partition=%s position=%s was trimmed: installing a snapshot", self._partition, self.position)
                await self._install()
            except MetadataLost as error:
                if str(error) != self.lost:
                    self.lost = str(error)
                    log.error("%s", error)
                self.on_lost(self.position)
                await asyncio.sleep(DELETED_S)
            except (LedgerDeleted, UndecodableNode, NoSuchEntry) as error:  # it lasts until an operator acts
                if str(error) != self._last_logged:
                    self._last_logged = str(error)
                    log.error(
                        "partition=%s position=%s cannot continue reading: %s", self._partition, self.position, error
                    )
                if self._state.position is None and isinstance(error, UndecodableNode):
                    await self._install()  # this replica loses no state by it
                elif isinstance(error, NoSuchEntry):  # docs/protocol.md A14
                    await self._install(self._state.seq + 1)  # of a replica that is past the lost entry
                await asyncio.sleep(DELETED_S)
            except (LedgerError, MetadataError) as error:
                log.debug("partition=%s tail waits: %s", self._partition, error)
                await asyncio.sleep(RETRY_S)
            finally:
                self._reader = None
                await reader.close()

    # docs/protocol.md T13
    def catch_up(self) -> None:
        """Apply at once all confirmed entries that have arrived, because the state is about to be read."""
        if self._reader is not None:
            self._reader.give_now()

    async def wait_applied(self, position: Position, patience_s: float) -> None:
        """Wait until the entry at `position` is applied. Raises TimeoutError if no entry was applied for `patience_s`
        seconds."""
        self.catch_up()
        while self.position < position:
            self._progress.clear()
            async with asyncio.timeout(patience_s):
                await self._progress.wait()

    async def wait_seq(self, seq: Seq) -> None:
        """Wait until the mutation with this sequence is applied and the engine accepts writes. Raises Unavailable if
        the engine has stopped."""
        await self.reach(seq)
        try:
            await wait_caught_up(self._state.engine)
        except OSError as error:
            raise Unavailable(f"partition {self._partition}: {error}") from error

    async def reach(self, seq: Seq) -> None:
        """Wait until the mutation with this sequence is applied."""
        self.catch_up()
        while self._state.seq < seq:
            self._progress.clear()
            await self._progress.wait()

    def may_take(self) -> bool:
        return not self._state.engine.is_behind()

    def take(self, entries: Sequence[LogEntry]) -> None:
        """Apply entries that have arrived during a read. Raises the errors of `run`."""
        self._state.apply_all(entries)
        self._trouble = ""
        self.entries += len(entries)
        self._progress.set()

    async def _apply(self, entries: Sequence[LogEntry]) -> None:
        if self._state.engine.stopped is not None:
            raise self._state.engine.stopped
        for start in range(0, len(entries), ENTRIES_PER_TURN):
            await wait_caught_up(self._state.engine)
            self.take(entries[start : start + ENTRIES_PER_TURN])
            await asyncio.sleep(0)

    async def _install(self, least: int = 0) -> None:
        try:
            await self._install_snapshot(least)
        except (ClusterTooNew, WrittenByNewer):
            raise
        except StoreError as error:
            log.info("partition=%s snapshot not installed: %s", self._partition, error)
            await asyncio.sleep(1.0)
        else:
            self.installs += 1
            self._progress.set()
