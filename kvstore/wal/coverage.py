"""Decides when enough bookies have given a definite answer. Decides only (docs/protocol.md L7). The same rule proves
that a ledger is fenced and that an entry does not exist."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import EntryId, Quorum


def write_set_indexes(entry: EntryId, quorum: Quorum) -> tuple[int, ...]:
    """Return the places in the ensemble of the bookies that hold `entry`."""
    return tuple((entry + i) % quorum.ensemble for i in range(quorum.write))


def is_window_covered(window: Collection[int], definite: Collection[int], quorum: Quorum) -> bool:
    """Return True if so many bookies of the write set `window` are in `definite` that the remaining ones cannot form an
    ack quorum."""
    return sum(index in definite for index in window) >= quorum.coverage


def is_somewhere_short(lost: Collection[int], quorum: Quorum) -> bool:
    """Return True if some write set of the ensemble has too few bookies left for an ack quorum. `lost` are places in
    the ensemble."""
    firsts = map(EntryId, range(quorum.ensemble))
    return any(is_window_covered(write_set_indexes(first, quorum), lost, quorum) for first in firsts)


def is_covered(definite: Collection[int], quorum: Quorum) -> bool:
    """Return True if every write set of the ensemble is covered. The bookies that have not answered can then confirm no
    entry, whatever its id."""
    return all(
        is_window_covered(write_set_indexes(EntryId(first), quorum), definite, quorum)
        for first in range(quorum.ensemble)
    )
