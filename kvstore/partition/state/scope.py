"""Limits operations without a key, such as scans and counts, to the tokens that the ring gave the partition when the
operation arrived. Decides only.

A caller that asks each partition for its part uses one version of the ring. A partition answers for exactly the tokens
that this version gives it, provided that it owns all of them. Every key is then found exactly once. Otherwise, the
partition answers Moved, and the caller starts again with the next version (docs/protocol.md M14).
"""

from __future__ import annotations

from copy import copy

from kvstore.errors import Moved
from kvstore.partition.state.commands import Count, Op
from kvstore.partition.state.tokens import Tokens

ELSEWHERE = Moved("", 0)


def bound(op: Op, assigned: Tokens) -> Op:
    """Return the keyless operation, limited to the tokens in `assigned`. The caller may have submitted `op` to other
    partitions too, so it stays as it is."""
    found = copy(op)
    vars(found)["assigned"] = assigned
    return found


def scope(op: Op, readable: Tokens) -> Tokens | None:
    """Return the tokens for which to answer `op`. Returns None if the operation needs tokens that may not be read."""
    assigned = op.assigned
    if assigned is None:
        return readable
    if op.__class__ is Count:  # a count always counts everything that is owned
        return readable if readable.spans == assigned.spans else None
    return assigned if readable.covers_all(assigned) else None
