"""Operations on all that a partition holds: bound to what the ring gave it when they came. Decides only.

Who asks all partitions, each for its part, has one version of the ring in mind. A partition answers for the tokens that
this version gives it, if it owns them all, and for no others: so no key is missed, and none is found twice. Else it
answers Moved, and whoever asked begins anew with the next version (docs/protocol.md M14).
"""

from __future__ import annotations

from typing import Any

from kvstore.errors import Moved
from kvstore.partition.state.commands import Code, Op
from kvstore.partition.state.tokens import Tokens

_COUNT = int(Code.COUNT)
ELSEWHERE = Moved("", 0)


class Bound(tuple[Any, ...]):
    """An operation as its plain tuple, and the tokens that it is about."""

    assigned: Tokens


def bound(op: Op, assigned: Tokens) -> Op:
    found = Bound(op)
    found.assigned = assigned
    return found


def scope(op: Op, readable: Tokens) -> Tokens | None:
    """The tokens that `op` is to be answered for, of those that may be read; None if some that it is about may not."""
    assigned = getattr(op, "assigned", None)
    if assigned is None:
        return readable
    if op[0] == _COUNT:  # what is owned is counted, and nothing else
        return readable if readable.spans == assigned.spans else None
    return assigned if readable.covers_all(assigned) else None
