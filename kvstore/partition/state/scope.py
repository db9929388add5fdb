"""Binds operations on everything that a partition holds to the tokens that the ring gave it when they arrived. Decides
only.

A caller that asks all partitions, each for its part, uses one version of the ring. A partition answers for the tokens
that this version gives it, if it owns all of them, and for no others. So no key is missed, and none is found twice.
Otherwise the partition answers Moved, and the caller starts again with the next version (docs/protocol.md M14).
"""

from __future__ import annotations

from typing import Any

from kvstore.errors import Moved
from kvstore.partition.state.commands import Code, Op
from kvstore.partition.state.tokens import Tokens

_COUNT = int(Code.COUNT)
ELSEWHERE = Moved("", 0)


class Bound(tuple[Any, ...]):
    """An operation as a plain tuple, with the tokens that it concerns."""

    assigned: Tokens


def bound(op: Op, assigned: Tokens) -> Op:
    found = Bound(op)
    found.assigned = assigned
    return found


def scope(op: Op, readable: Tokens) -> Tokens | None:
    """Return the readable tokens for which `op` is to be answered; None if some of its tokens may not be read."""
    assigned = getattr(op, "assigned", None)
    if assigned is None:
        return readable
    if op[0] == _COUNT:  # a count always counts everything that is owned
        return readable if readable.spans == assigned.spans else None
    return assigned if readable.covers_all(assigned) else None
