"""Notices that a leader's entries find no ack quorum any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import NotEnoughBookies, StoreError
from kvstore.wal.choice import BookieChoice
from kvstore.wal.handle import LedgerHandle

STALL_MAX_S = 6.0
"""A leader whose entries have found no ack quorum for so long gives up its log: another may reach the bookies. Clients
have been refused by then."""


async def end_at_a_standstill(
    handle_or_none: Callable[[], LedgerHandle | None],
    choice: BookieChoice,
    check_every_s: float,
    lose: Callable[[StoreError], None],
) -> None:
    """Call `lose` when nothing of the open ledger was confirmed for STALL_MAX_S; end when there is no open ledger.

    It looks also during a roll, which waits for the former ledger. It goes by looks, not by the clock: what has come
    while this process stood still is read first.
    """
    stalled_s, seen_at = 0.0, 0.0
    while True:
        await asyncio.sleep(check_every_s)
        handle = handle_or_none()
        if handle is None:
            return
        handle.look_for_spares()
        is_stalled = handle.writer.unconfirmed > 0 and handle.progress_at == seen_at
        # Where the disks are full nobody else could lead either, and only a leader trims, which makes room.
        is_full = choice.is_full(handle.writer.metadata.quorum.ack)
        stalled_s = stalled_s + check_every_s if is_stalled and not is_full else 0.0
        seen_at = handle.progress_at
        if stalled_s >= STALL_MAX_S:
            lose(NotEnoughBookies(f"ledger {handle.ledger}: no ack quorum for {STALL_MAX_S} s"))
