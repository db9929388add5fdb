"""Notices that a leader's entries find no ack quorum any more, or that one bookie answers no adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kvstore.errors import NotEnoughBookies, StoreError
from kvstore.types import BookieId, EntryId, LedgerId
from kvstore.wal.choice import BookieChoice
from kvstore.wal.handle import LedgerHandle

STALL_MAX_S = 6.0
"""A leader whose entries have found no ack quorum for so long gives up its log: another may reach the bookies. Clients
have been refused by then."""
SILENCE_S = 3.0
"""A bookie that has not stored, in so long, the entry that has been owed to it longest answers no adds. A connection is
given up earlier, by all that is sent over it; this is for what no connection shows: the node's own bookie, which has
none, and a directory of several whose disk hangs while others answer."""
LOOKS_MIN = 2


class SilentBookies:
    """Decides which bookies of the open ledger are silent. It goes by looks, not by the clock: what has come while this
    process stood still is read first."""

    def __init__(self) -> None:
        self._seen: dict[BookieId, tuple[LedgerId, EntryId, int]] = {}

    def look(self, ledger: LedgerId, owed: Mapping[BookieId, EntryId], every_s: float) -> list[BookieId]:
        """Those to whom the same entry is owed for too many looks. `owed`: the first that each has not stored;
        `every_s`: between two looks."""
        before, self._seen = self._seen, {}
        for bookie, entry in owed.items():
            *same, looks = before.get(bookie, (ledger, entry, -1))
            self._seen[bookie] = ledger, entry, looks + 1 if same == [ledger, entry] else 0
        silent = (bookie for bookie, (_, _, looks) in self._seen.items() if looks * every_s >= SILENCE_S)
        return sorted(bookie for bookie in silent if self._seen[bookie][2] >= LOOKS_MIN)


async def lose_stalled_log(
    handle_or_none: Callable[[], LedgerHandle | None],
    choice: BookieChoice,
    check_every_s: float,
    lose: Callable[[StoreError], None],
) -> None:
    """Call `lose` when nothing of the open ledger was confirmed for STALL_MAX_S; end when there is no open ledger. Give
    up on bookies that are silent meanwhile.

    It looks also during a roll, which waits for the former ledger. It goes by looks, not by the clock: what has come
    while this process stood still is read first.
    """
    stalled_s, seen_at, silences = 0.0, 0.0, SilentBookies()
    while True:
        await asyncio.sleep(check_every_s)
        handle = handle_or_none()
        if handle is None:
            return
        handle.look_for_spares()
        for bookie in silences.look(handle.ledger, handle.writer.owed_longest(), check_every_s):
            handle.give_up_on(bookie, "no add of the ledger was answered")
        is_stalled = handle.writer.unconfirmed > 0 and handle.progress_at == seen_at
        # Where the disks are full nobody else could lead either, and only a leader trims, which makes room.
        is_full = choice.is_full(handle.writer.metadata.quorum.ack)
        stalled_s = stalled_s + check_every_s if is_stalled and not is_full else 0.0
        seen_at = handle.progress_at
        if stalled_s >= STALL_MAX_S:
            lose(NotEnoughBookies(f"ledger {handle.ledger}: no ack quorum for {STALL_MAX_S} s"))
