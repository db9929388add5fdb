"""Operations of one Redis command that take effect together.

Keys with one hash tag are always in one partition, and a batch of their operations is atomic. Keys with several tags
may be in several partitions. By default, such a command is refused with CROSSSLOT, as clients of Redis Cluster expect.
With `[redis] transactions_across_slots` it is one transaction (docs/protocol.md Tx1 to Tx14). Another transaction that
holds one of the keys makes it fail with Conflict, which means that nothing was done. It is then tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from kvstore import backoff
from kvstore.errors import Conflict, InvalidRequest, Unavailable
from kvstore.partition.state.commands import Batch, Op, Transact
from kvstore.partition.state.traits import home_key
from kvstore.ring.hashing import hash_tag
from kvstore.server.redis.plans import OwnerOf, check_one_owner

Ask = Callable[[Op], Awaitable[Any]]
"""Submits an operation and returns its result. Raises StoreError."""

CONFLICTS_S = 5.0
"""Seconds, from the first attempt of a command, during which it is tried again after a Conflict."""
FIRST_PAUSE_S, PAUSE_MAX_S = 0.005, 0.25
"""Bounds of the random pause in seconds after the first conflict of a command, and after later ones."""


class Atomic:
    """Executes the operations of one command together. Create one for each command: its attempts share one deadline."""

    __slots__ = ("_ask", "_deadline", "_is_gone", "_now", "_owner_of", "_pauses", "spans_slots")

    def __init__(
        self,
        ask: Ask,
        owner_of: OwnerOf,
        *,
        spans_slots: bool = False,
        now: Callable[[], float] = lambda: 0.0,
        random: Random | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """`spans_slots` allows keys of several partitions. `now` is the clock in seconds. `is_gone` returns True once
        the client has disconnected, so that nothing is tried again for it."""
        self._ask, self._owner_of, self._now, self._is_gone = ask, owner_of, now, is_gone
        self.spans_slots = spans_slots
        self._pauses = backoff.delays(random or Random(0), first_s=FIRST_PAUSE_S, cap_s=PAUSE_MAX_S)
        self._deadline: float | None = None

    def may_span(self, ops: Sequence[Op]) -> bool:
        """Return True if the operations may form a transaction over several partitions, now or after a move of keys."""
        return self.spans_slots and len({hash_tag(op.key) for op in ops}) > 1

    def operation(self, ops: tuple[Op, ...], flags: int = 0) -> Batch | Transact:
        """Return the operation that executes `ops` together. `flags` are those of a batch. Raises CommandError if their
        keys are in several partitions and may not be, and InvalidRequest if the operations exceed a limit."""
        if not self.spans_slots:
            check_one_owner([op.key for op in ops], self._owner_of)
            return Batch(ops[0].key, ops, flags)
        if len({self._owner_of(op.key) for op in ops}) == 1:
            return Batch(ops[0].key, ops, flags)
        return Transact(home_key(ops), ops, flags)

    async def __call__(self, ops: tuple[Op, ...], flags: int = 0) -> list[Any]:
        """Execute `ops` together and return their results. Raises CommandError and StoreError: Conflict if other
        transactions held the keys for CONFLICTS_S seconds."""
        if self._deadline is None:
            self._deadline = self._now() + CONFLICTS_S
        while True:
            op = self.operation(ops, flags)
            try:
                result = await self._ask(op)
            except Conflict as conflict:
                await self._pause(conflict)
            except InvalidRequest:
                # A batch also fails if its keys were divided among partitions before it reached them.
                if isinstance(op, Transact) or not self.may_span(ops) or isinstance(self.operation(ops), Batch):
                    raise
            else:
                results: list[Any] = result[0] if isinstance(op, Transact) else result
                return results

    async def _pause(self, conflict: Conflict) -> None:
        """Wait before the next attempt. Raises `conflict` if no time is left."""
        assert self._deadline is not None
        pause_s = next(self._pauses)
        if self._now() + pause_s >= self._deadline:
            raise conflict
        await asyncio.sleep(pause_s)
        if self._is_gone():
            raise Unavailable("the client is gone")
