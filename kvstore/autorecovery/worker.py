"""Repairs marked ledgers, one after the other and a few at a time: takes the lock of each, mends it, takes the mark
away (docs/protocol.md, A10).

There may be any number of workers: in every node with a bookie, and in processes of their own. A worker that dies loses
its locks with its session; what it has copied stays, and the next one finds it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress

from kvstore.autorecovery.backlog import Backlog
from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.repair_machine import AGAIN_S_MAX
from kvstore.autorecovery.repairer import LedgerRepairer
from kvstore.env.events import wait_within
from kvstore.env.ports import Env
from kvstore.errors import LedgerError, MetadataError, StoreError
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import MarkLock, Underreplication
from kvstore.types import LedgerId
from kvstore.wal.copies.pace import CopyPace, GuardedCopyPace
from kvstore.wal.handle import LedgerPorts

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Between two looks at the marks: a watch tells of the first one only."""
REST_S = 1.0
"""The least between two of them, unless somebody calls."""
AT_ONCE_MAX = 4
"""Ledgers outcome at once: small ones wait for the metadata store and not for bookies."""
HELD_S = 5.0
"""Until a ledger that another worker has is looked at again."""


class Worker:
    """The worker of one process. `name` is what others see in its locks."""

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
        self._copied = self._copied_bytes = self._repaired = self._failed = 0

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="worker")
        self._nursery.spawn(self._follow_switch(), name="follow the switch")
        self.look()

    async def close(self) -> None:
        """Stop at once. The locks go with the session; a session that goes on gives them back first."""
        await self._nursery.close()
        for lock in self._unreleased:
            with suppress(MetadataError):
                await lock.release()

    def look(self) -> None:
        """Look at the marks soon: there is a new one."""
        self._wake.set()

    def statistics(self) -> dict[str, float]:
        """Numbers for operators."""
        return {
            "enabled": int(self._is_enabled),
            "ledgers_marked": self._backlog.marked,
            "ledgers_mending": len(self._repairing),
            "ledgers_unreadable": self._backlog.unreadable,
            "ledgers_mended": self._repaired,
            "attempts_failed": self._failed,
            "copies_made": self._copied,
            "copied_bytes": self._copied_bytes,
            "paced_bytes": self._pace.spent_bytes,
            "paced_seconds": round(self._pace.busy_s, 3),
        }

    async def _run(self) -> None:
        watches = [self._marks.watch_marks(self.look), self._settings.watch_enabled(self._switch.set)]
        self._ports.choice.listen(self, self._bookies_changed)
        try:
            while True:
                wait_s = self._backlog.next_due_s(self._env.clock.now(), LOOK_S) if self._is_enabled else LOOK_S
                await wait_within(self._wake, max(REST_S, wait_s))
                self._wake.clear()
                try:
                    await self._round()
                except StoreError as error:
                    log.info("the look at marked ledgers stopped: %r", error)
                    await asyncio.sleep(HELD_S)
        finally:
            self._ports.choice.forget(self)
            for watch in watches:
                watch.close()

    async def _follow_switch(self) -> None:
        """Also in the middle of a large ledger: an operator who switches auto-recovery off waits for no copies."""
        while True:
            await self._switch.wait()
            self._switch.clear()
            with suppress(MetadataError):
                self._is_enabled = await self._settings.is_enabled()
            self.look()

    def _ensure_enabled(self) -> None:
        if not self._is_enabled:
            raise LedgerError("auto-recovery is switched off")

    def _bookies_changed(self) -> None:
        self._backlog.all_due()
        self.look()

    async def _round(self) -> None:
        """See every mark, and take some. Raises MetadataError."""
        await self._release_all()
        self._is_enabled = await self._settings.is_enabled()
        if not self._is_enabled:
            return
        self._backlog.begin()
        async for ledger in self._marks.marked_ledgers():
            self._backlog.see(ledger, self._env.clock.now())
        waiting = deque(self._backlog.drawn())
        tasks = [self._nursery.spawn(self._work(waiting), name="repair") for _ in range(min(AT_ONCE_MAX, len(waiting)))]
        for task in tasks:
            await task
        if self._backlog.has_more:
            self.look()

    async def _work(self, waiting: deque[LedgerId]) -> None:
        while waiting and self._is_enabled:
            ledger = waiting.popleft()
            try:
                with suppress(MetadataError):
                    await self._release_all()  # a round may take hours, and nobody else can have those
                self._is_enabled = await self._settings.is_enabled()
                if self._is_enabled:
                    await self._take(ledger)
            except StoreError as error:
                log.info("ledger=%d not repaired now: %r", ledger, error)
                self._put_off(ledger, HELD_S)
            except Exception:  # what one ledger holds, a stranger's perhaps, must not end one node after the other
                log.exception("ledger=%d cannot be repaired: a fault of this program", ledger)
                self._failed += 1
                self._put_off(ledger, AGAIN_S_MAX)

    async def _take(self, ledger: LedgerId) -> None:
        lock = await self._marks.lock(ledger, self._name)
        if lock is None:
            self._put_off(ledger, HELD_S)
            return
        self._repairing.add(ledger)
        self._unreleased.append(lock)
        try:
            await self._repair(lock)
        finally:
            self._repairing.discard(ledger)
        await self._release(lock)

    # docs/protocol.md A3, A10
    async def _repair(self, lock: MarkLock) -> None:
        """The mark goes only as it was when the lock was taken: one that has grown since stays."""
        ledger, past = lock.mark.ledger, self._backlog.past(lock.mark.ledger)
        outcome = await self._repairer.repair(
            ledger, lock.mark.replicas, past, is_held=lambda: lock.is_held and self._is_enabled
        )
        self._copied += outcome.copied
        self._copied_bytes += outcome.copied_bytes
        if not outcome.is_whole:
            self._failed += 1
            self._put_off(ledger, outcome.again_s, is_unreadable=bool(outcome.unreadable))
            return
        self._backlog.done(ledger)
        if lock.is_held and await self._marks.mark_replicated(lock, lock.mark.version):
            self._repaired += 1
            log.info("ledger=%d is whole, %d copies made", ledger, outcome.copied)
        else:
            self.look()

    def _put_off(self, ledger: LedgerId, again_s: float, *, is_unreadable: bool = False) -> None:
        self._backlog.later(ledger, self._env.clock.now(), again_s, is_unreadable=is_unreadable)

    async def _release(self, lock: MarkLock) -> None:
        """Raises MetadataError; then it is tried again later, or the session ends."""
        await lock.release()
        if lock in self._unreleased:
            self._unreleased.remove(lock)

    async def _release_all(self) -> None:
        """Those of ledgers that nobody works on any more."""
        for lock in list(self._unreleased):
            if lock.mark.ledger not in self._repairing:
                await self._release(lock)
