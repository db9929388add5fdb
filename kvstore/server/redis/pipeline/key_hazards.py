"""Finds operations of one connection that must not be under way together: those on a key that one of them changes.

Decides only. Writes of one key may be: its leader does them in the order in which they come. Numbers are a
connection's own count of its commands; below `answered` all have been answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.partition.state.commands import Code, Op
from kvstore.partition.state.traits import POINT_READS

KEPT_MAX = 4096
"""Keys remembered before those of answered commands are looked for and dropped."""
_BATCH = int(Code.BATCH)


class KeyHazards:
    """Keys with the number of the last command in flight that changes or reads them. May also hold answered ones."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.writes: dict[bytes, int] = {}
        self.reads: dict[bytes, int] = {}

    def block(self, ops: Iterable[Op], answered: int) -> bool:
        """Whether one of `ops` has to wait until what is in flight is answered."""
        return any(
            (self.writes if op[0] in POINT_READS else self.reads).get(op[1], -1) >= answered for op in _parts(ops)
        )

    def note(self, ops: Iterable[Op], number: int) -> None:
        """Command `number` does `ops`."""
        for op in _parts(ops):
            (self.reads if op[0] in POINT_READS else self.writes)[op[1]] = number

    def answered(self, issued: int, answered: int) -> None:
        """Forget what needs no watching any more."""
        if issued == answered:
            if self.writes:
                self.writes.clear()
            if self.reads:
                self.reads.clear()
        elif len(self.writes) + len(self.reads) > KEPT_MAX:
            for keys in (self.writes, self.reads):
                kept = {key: number for key, number in keys.items() if number >= answered}
                keys.clear()
                keys.update(kept)


def _parts(ops: Iterable[Op]) -> Iterator[Op]:
    """The operations on single keys: of a batch, those in it."""
    for op in ops:
        if op[0] == _BATCH:
            yield from op[2]
        else:
            yield op
