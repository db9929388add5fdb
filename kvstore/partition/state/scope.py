"""Limits operations without a key, such as scans and counts, to the tokens that the ring gave the partition when the
operation arrived. Decides only.

A caller that asks each partition for its part uses one version of the ring. A partition answers for exactly the tokens
that this version gives it, provided that it owns all of them. Every key is then found exactly once. Otherwise, the
partition answers Moved, and the caller starts again with the next version (docs/protocol.md M14).
"""

from __future__ import annotations

from typing import Any

from kvstore.errors import Moved
from kvstore.partition.state.commands import Code, Op
from kvstore.partition.state.tokens import Tokens

_COUNT = int(Code.COUNT)
ELSEWHERE = Moved("", 0)


class Bound(tuple[Any, ...]):
    """An operation as a plain tuple, together with the tokens to which it is limited."""

    assigned: Tokens


def bound(op: Op, assigned: Tokens) -> Op:
    """Return the operation, limited to the tokens in `assigned`."""
    found = Bound(op)
    found.assigned = assigned
    return found


def scope(op: Op, readable: Tokens) -> Tokens | None:
    """Return the tokens for which to answer `op`. Returns None if the operation needs tokens that may not be read."""
    assigned = getattr(op, "assigned", None)
    if assigned is None:
        return readable
    if op[0] == _COUNT:  # a count always counts everything that is owned
        return readable if readable.spans == assigned.spans else None
    return assigned if readable.covers_all(assigned) else None
