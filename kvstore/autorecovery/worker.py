"""The replication worker: repairs marked ledgers, a few at a time. It locks a ledger, repairs it, and removes the mark
(docs/protocol.md, A10).

Any number of workers may run: in every node with a bookie, and in separate processes. A worker that dies loses its
locks with its session. The copies that it made remain, and the next worker finds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress

from kvstore.autorecovery.backlog import Backlog
from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.repair_machine import AGAIN_S_MAX, AttemptHistory
from kvstore.autorecovery.repairer import LedgerRepairer
from kvstore.env.events import wait_within
from kvstore.env.ports import Env
from kvstore.errors import LedgerError, MetadataError, StoreError, UndecodableNode
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import MarkLock, Underreplication
from kvstore.types import LedgerId
from kvstore.wal.copies.pace import CopyPace, GuardedCopyPace
from kvstore.wal.handle import LedgerPorts

log = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds between two scans of the marks. A watch reports only the first mark."""
PAUSE_S = 1.0
"""Minimum number of seconds between two scans of the marks."""
AT_ONCE_MAX = 4
"""Maximum number of ledgers repaired concurrently. Repairs of small ledgers wait for the metadata store rather than for
bookies."""
HELD_S = 5.0
"""Seconds until the next attempt at a ledger that another worker has locked."""


class Worker:
    """The replication worker of one process. `name` identifies the worker in its locks, which other workers and
    operators see."""

    def __init__(
        self,
        env: Env,
        store: MetadataStore,
        ports: LedgerPorts,
        config: AutorecoveryConfig,
        pace: CopyPace,
        *,
        name: str,
    ) -> None:
        self._env, self._ports, self._name = env, ports, name
        self._marks, self._settings = Underreplication(store), RecoverySettings(store)
        self._nursery = env.nursery.child("autorecovery")
        self._pace, pace = pace, GuardedCopyPace(pace, self._ensure_enabled)
        self._repairer = LedgerRepairer(ports, store, self._nursery, pace, grace_s=config.open_ledger_grace_s)
        self._backlog = Backlog(env.random)
        self._wake, self._switch = asyncio.Event(), asyncio.Event()
        self._is_enabled = True
        self._repairing: set[LedgerId] = set()
        self._unreleased: list[MarkLock] = []
        """Locks whose release was not confirmed."""
        self._unreadable: set[str] = set()
        """Directories of marks that could not be read, and were reported."""
        self._copied = self._copied_bytes = self._repaired = self._failed = 0

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="worker")
        self._nursery.spawn(self._follow_switch(), name="follow the switch")
        self.poll()

    async def close(self) -> None:
        """Stop at once. The locks end with the session; locks whose earlier release failed are released here if
        possible."""
        await self._nursery.close()
        for lock in self._unreleased:
            with suppress(MetadataError):
                await lock.release()

    def poll(self) -> None:
        """Request a scan of the marks soon, because a mark was added."""
        self._wake.set()

    def statistics(self) -> dict[str, float]:
        """Return the worker's counters and gauges, by name."""
        return {
            "enabled": int(self._is_enabled),
            "ledgers_marked": self._backlog.marked,
            "ledgers_repairing": len(self._repairing),
            "ledgers_unreadable": self._backlog.unreadable,
            "ledgers_repaired": self._repaired,
            "attempts_failed": self._failed,
            "copies_made": self._copied,
            "copied_bytes": self._copied_bytes,
            "paced_bytes": self._pace.spent_bytes,
            "paced_seconds": round(self._pace.busy_s, 3),
        }

    async def _run(self) -> None:
        watches = [
            self._marks.watch_marks(self.poll),
            self._settings.watch_enabled(self._switch.set),
            self._settings.watch_lost_bookie_delay(self._retry_all),
        ]
        self._ports.choice.listen(self, self._retry_all)
        poll_s = POLL_S
        try:
            while True:
                wait_s = self._backlog.next_due_s(self._env.clock.now(), poll_s) if self._is_enabled else POLL_S
                await wait_within(self._wake, max(PAUSE_S, wait_s))
                self._wake.clear()
                try:
                    # After repairs, the next scan finds the marks that were added meanwhile, and counts the rest.
                    poll_s = PAUSE_S if await self._round() else POLL_S
                except StoreError as error:
                    log.info("scan of marked ledgers failed, retrying error=%r", error)
                    await asyncio.sleep(HELD_S)
        finally:
            self._ports.choice.forget(self)
            for watch in watches:
                watch.close()

    async def _follow_switch(self) -> None:
        """Follow the auto-recovery switch even in the middle of a large ledger, so that an operator who disables
        auto-recovery does not have to wait for copies to finish."""
        while True:
            await self._switch.wait()
            self._switch.clear()
            with suppress(MetadataError):
                self._is_enabled = await self._settings.is_enabled()
            self._retry_all()

    def _ensure_enabled(self) -> None:
        if not self._is_enabled:
            raise LedgerError("auto-recovery is switched off")

    def _retry_all(self) -> None:
        """Retry all ledgers soon, because bookies have come or gone or an operator has changed a setting."""
        self._backlog.all_due()
        self.poll()

    async def _round(self) -> bool:
        """Scan all marks, and repair the ledgers that the backlog selects. Return True if it selected any. Raises
        MetadataError."""
        await self._release_all()
        self._is_enabled = await self._settings.is_enabled()
        if not self._is_enabled:
            return False
        self._backlog.begin()
        async for ledger in self._marks.marked_ledgers(self._report_unreadable):
            self._backlog.see(ledger, self._env.clock.now())
        waiting = deque(self._backlog.drawn())
        tasks = [self._nursery.spawn(self._work(waiting), name="repair") for _ in range(min(AT_ONCE_MAX, len(waiting)))]
        for task in tasks:
            await task
        if self._backlog.has_more:
            self.poll()
        return bool(tasks)

    # docs/protocol.md P34
    def _report_unreadable(self, path: str, error: UndecodableNode) -> None:
        """Report a directory of marks that cannot be read, once."""
        if path not in self._unreadable:
            self._unreadable.add(path)
            log.warning("marked ledgers not repaired, their directory is unreadable path=%s error=%s", path, error)

    async def _work(self, waiting: deque[LedgerId]) -> None:
        while waiting and self._is_enabled:
            ledger = waiting.popleft()
            past = self._backlog.begun(ledger)
            try:
                with suppress(MetadataError):
                    # a round may take hours, and nobody else can have these ledgers meanwhile
                    await self._release_all()
                self._is_enabled = await self._settings.is_enabled()
                if self._is_enabled:
                    await self._take(ledger, past)
            except StoreError as error:
                log.info("ledger not repaired now ledger=%d error=%r", ledger, error)
                self._put_off(ledger, HELD_S)
            # the contents of one ledger, perhaps of a foreign client, must not end one node after the other
            except Exception:
                log.exception("ledger cannot be repaired because of a bug ledger=%d", ledger)
                self._failed += 1
                self._put_off(ledger, AGAIN_S_MAX)

    async def _take(self, ledger: LedgerId, past: AttemptHistory) -> None:
        lock = await self._marks.lock(ledger, self._name)
        if lock is None:
            self._put_off(ledger, HELD_S)
            return
        self._repairing.add(ledger)
        self._unreleased.append(lock)
        try:
            await self._repair(lock, past)
        finally:
            self._repairing.discard(ledger)
        await self._release(lock)

    # docs/protocol.md A3, A10
    async def _repair(self, lock: MarkLock, past: AttemptHistory) -> None:
        """Repair the ledger, and remove its mark unless the mark has grown since the lock was taken."""
        ledger = lock.mark.ledger
        outcome = await self._repairer.repair(
            ledger, lock.mark.replicas, past, is_held=lambda: lock.is_held and self._is_enabled
        )
        self._copied += outcome.copied
        self._copied_bytes += outcome.copied_bytes
        if not outcome.is_complete:
            self._failed += 1
            self._put_off(ledger, outcome.again_s, is_unreadable=bool(outcome.unreadable))
            return
        self._backlog.done(ledger)
        if lock.is_held and await self._marks.mark_replicated(lock, lock.mark.version):
            self._repaired += 1
            log.info("ledger repaired ledger=%d copies=%d", ledger, outcome.copied)
        else:
            self.poll()

    def _put_off(self, ledger: LedgerId, again_s: float, *, is_unreadable: bool = False) -> None:
        self._backlog.later(ledger, self._env.clock.now(), again_s, is_unreadable=is_unreadable)

    async def _release(self, lock: MarkLock) -> None:
        """Release the lock. If this raises MetadataError, the lock is released later or ends with the session."""
        await lock.release()
        if lock in self._unreleased:
            self._unreleased.remove(lock)

    async def _release_all(self) -> None:
        """Release the locks of ledgers that are no longer being repaired."""
        for lock in list(self._unreleased):
            if lock.mark.ledger not in self._repairing:
                await self._release(lock)
