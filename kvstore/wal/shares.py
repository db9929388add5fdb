"""Chooses which bookie gives which entries of a batched read. Decides only (docs/protocol.md T12)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvstore.types import BookieId, EntryId
from kvstore.wal.reader import in_order


class ReadShare(NamedTuple):
    """Entries that one bookie is asked for in one batch."""

    bookie: BookieId
    entries: Sequence[EntryId]
    """In rising order. The bookie should have each of them, and perhaps others between them."""


def shares_of(
    entries: Sequence[EntryId],
    write_set: Callable[[EntryId], Sequence[BookieId]],
    own: BookieId | None,
    avoided: Collection[BookieId],
    *,
    gap_max: int,
) -> list[ReadShare]:
    """Divide rising entries among bookies of their write sets, as few bookies as possible. Three kinds of entries get
    no share: entries that only `avoided` bookies have, entries that would be alone in their share, and entries after a
    gap of more than `gap_max`, because a bookie also gives the entries in the gap."""
    shares: list[ReadShare] = []
    left = list(entries)
    nearest = own if own is not None and own not in avoided else None
    while left:
        if nearest is None:
            nearest = in_order(write_set(left[0]), own, avoided)[0]
        mine = [entry for entry in left if nearest in write_set(entry)]
        if mine and nearest not in avoided:
            shares.append(ReadShare(nearest, _close_together(mine, gap_max)))
            left = [entry for entry in left if nearest not in write_set(entry)]
        elif mine:
            del left[0]
        nearest = None
    return [share for share in shares if len(share.entries) > 1]


def _close_together(entries: Sequence[EntryId], gap_max: int) -> Sequence[EntryId]:
    """Return the entries up to the first gap that is too wide."""
    ends = (at for at, (each, following) in enumerate(pairwise(entries), 1) if following - each > gap_max)
    return entries[: next(ends, len(entries))]
