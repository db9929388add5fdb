"""Detects that a leader's entries no longer reach an ack quorum, or that one bookie no longer answers adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kvstore.errors import NotEnoughBookies, StoreError
from kvstore.types import BookieId, EntryId, LedgerId
from kvstore.wal.choice import BookieChoice
from kvstore.wal.handle import LedgerHandle

STALL_MAX_S = 6.0
"""Seconds without an ack quorum after which a leader abandons its log, because another leader may still reach the
bookies. By then the leader refuses clients."""
SILENCE_S = 3.0
"""Seconds after which a bookie counts as silent because it has not stored its oldest outstanding entry. A silent
connection is aborted earlier. This limit covers failures that no connection shows: those of the node's own bookie, and
of one directory whose disk hangs while the others answer."""
CHECKS_MIN = 2


class SilentBookies:
    """Decides which bookies of the open ledger are silent. It counts checks instead of measuring time, because events
    that arrived while this process was stopped must be processed first."""

    def __init__(self) -> None:
        self._seen: dict[BookieId, tuple[LedgerId, EntryId, int]] = {}

    def poll(self, ledger: LedgerId, owed: Mapping[BookieId, EntryId], every_s: float) -> list[BookieId]:
        """Record one check, and return the bookies that are silent. `owed` is the first entry that each bookie has not
        stored; `every_s` is the number of seconds between two checks."""
        before, self._seen = self._seen, {}
        for bookie, entry in owed.items():
            *same, checks = before.get(bookie, (ledger, entry, -1))
            self._seen[bookie] = ledger, entry, checks + 1 if same == [ledger, entry] else 0
        silent = (bookie for bookie, (_, _, checks) in self._seen.items() if checks * every_s >= SILENCE_S)
        return sorted(bookie for bookie in silent if self._seen[bookie][2] >= CHECKS_MIN)


async def lose_stalled_log(
    handle_or_none: Callable[[], LedgerHandle | None],
    choice: BookieChoice,
    check_every_s: float,
    lose: Callable[[StoreError], None],
) -> None:
    """Call `lose` if no entry of the open ledger is confirmed for STALL_MAX_S seconds. Until then, treat silent bookies
    as failed. Returns when there is no open ledger.

    The check also runs during a roll, which waits for the former ledger. It counts checks instead of measuring time,
    because events that arrived while this process was stopped must be processed first.
    """
    stalled_s, seen_at, silences = 0.0, 0.0, SilentBookies()
    while True:
        await asyncio.sleep(check_every_s)
        handle = handle_or_none()
        if handle is None:
            return
        handle.update_spares()
        for bookie in silences.poll(handle.ledger, handle.writer.oldest_outstanding(), check_every_s):
            handle.fail_silent(bookie, "no add of the ledger was answered")
        is_stalled = handle.writer.unconfirmed > 0 and handle.progress_at == seen_at
        # If the disks are full, no other leader could append either, and only a leader trims, which frees space.
        is_full = choice.is_full(handle.writer.metadata.quorum.ack)
        stalled_s = stalled_s + check_every_s if is_stalled and not is_full else 0.0
        seen_at = handle.progress_at
        if stalled_s >= STALL_MAX_S:
            lose(NotEnoughBookies(f"ledger {handle.ledger}: no ack quorum for {STALL_MAX_S} s"))
