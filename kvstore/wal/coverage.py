"""Decides when enough bookies have given a definite answer. Decides only (docs/protocol.md L7): the same rule shows
that a ledger is fenced and that an entry does not exist."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import EntryId, Quorum


def write_set_indexes(entry: EntryId, quorum: Quorum) -> tuple[int, ...]:
    """Return the positions in its ensemble of the bookies that hold `entry`."""
    return tuple((entry + i) % quorum.ensemble for i in range(quorum.write))


def is_window_covered(window: Collection[int], definite: Collection[int], quorum: Quorum) -> bool:
    """Return True if so many bookies of one write set have answered that the others cannot form an ack quorum."""
    return sum(index in definite for index in window) >= quorum.coverage


def is_somewhere_short(lost: Collection[int], quorum: Quorum) -> bool:
    """Return True if some write set has lost so many bookies that no ack quorum is left."""
    firsts = map(EntryId, range(quorum.ensemble))
    return any(is_window_covered(write_set_indexes(first, quorum), lost, quorum) for first in firsts)


def is_covered(definite: Collection[int], quorum: Quorum) -> bool:
    """Return True if every write set that the ensemble can form is covered: the bookies that have not answered can
    confirm no entry, whatever its id."""
    return all(
        is_window_covered(write_set_indexes(EntryId(first), quorum), definite, quorum)
        for first in range(quorum.ensemble)
    )
