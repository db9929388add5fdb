"""When enough bookies have given a definite answer. Decides only (docs/protocol.md L7): the same rule tells that a
ledger is fenced and that an entry does not exist."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import EntryId, Quorum


def write_set_indexes(entry: EntryId, quorum: Quorum) -> tuple[int, ...]:
    """Where in its ensemble the bookies of `entry` stand."""
    return tuple((entry + i) % quorum.ensemble for i in range(quorum.write))


def is_window_covered(window: Collection[int], definite: Collection[int], quorum: Quorum) -> bool:
    """Whether so many of one write set have answered that those left cannot make an ack quorum."""
    return sum(index in definite for index in window) >= quorum.coverage


def is_somewhere_short(lost: Collection[int], quorum: Quorum) -> bool:
    """Whether some write set has lost so many that no ack quorum is left of it."""
    firsts = map(EntryId, range(quorum.ensemble))
    return any(is_window_covered(write_set_indexes(first, quorum), lost, quorum) for first in firsts)


def is_covered(definite: Collection[int], quorum: Quorum) -> bool:
    """Whether every write set that the ensemble can form is covered: those that have not answered can confirm no entry,
    whatever its id."""
    return all(
        is_window_covered(write_set_indexes(EntryId(first), quorum), definite, quorum)
        for first in range(quorum.ensemble)
    )
