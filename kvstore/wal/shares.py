"""Divides the entries of a batched read among bookies. Decides only (docs/protocol.md T12)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvstore.types import BookieId, EntryId
from kvstore.wal.reader import in_order


class ReadShare(NamedTuple):
    """The entries that one bookie is asked for in one batch."""

    bookie: BookieId
    entries: Sequence[EntryId]
    """In ascending order. The bookie should have all of them, and may also have entries between them."""


def shares_of(
    entries: Sequence[EntryId],
    write_set: Callable[[EntryId], Sequence[BookieId]],
    own: BookieId | None,
    avoided: Collection[BookieId],
    *,
    gap_max: int,
) -> list[ReadShare]:
    """Divide `entries`, which are in ascending order, among as few bookies of their write sets as possible. Three kinds
    of entries get no share: entries that only `avoided` bookies have, entries that would be alone in their share, and
    entries after a gap of more than `gap_max`. The last rule exists because a bookie also returns the entries in the
    gap."""
    shares: list[ReadShare] = []
    left = list(entries)
    nearest = own if own is not None and own not in avoided else None
    while left:
        if nearest is None:
            nearest = in_order(write_set(left[0]), own, avoided)[0]
        mine = [entry for entry in left if nearest in write_set(entry)]
        if mine and nearest not in avoided:
            shares.append(ReadShare(nearest, _before_gap(mine, gap_max)))
            left = [entry for entry in left if nearest not in write_set(entry)]
        elif mine:
            del left[0]
        nearest = None
    return [share for share in shares if len(share.entries) > 1]


def _before_gap(entries: Sequence[EntryId], gap_max: int) -> Sequence[EntryId]:
    """Return the entries before the first gap that is wider than `gap_max`."""
    ends = (at for at, (each, following) in enumerate(pairwise(entries), 1) if following - each > gap_max)
    return entries[: next(ends, len(entries))]
