"""Find operations of one connection that must not be in flight together: a write of a key and any read of that key.

Decides only. Several writes of one key may be in flight together, because the leader applies them in the order of their
arrival. Numbers count the commands of a connection; all commands below `answered` have been answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.partition.state.commands import Op
from kvstore.partition.state.traits import POINT_READS

KEPT_MAX = 4096
"""Number of keys that are remembered before keys of answered commands are dropped."""


class KeyHazards:
    """Keys with the number of the last command that writes or reads them: commands in flight and some answered ones."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.writes: dict[bytes, int] = {}
        self.reads: dict[bytes, int] = {}

    def block(self, ops: Iterable[Op], answered: int) -> bool:
        """Return True if one of `ops` has to wait until the operations in flight are answered."""
        return any(
            (self.writes if op.code in POINT_READS else self.reads).get(op.key, -1) >= answered for op in parts_of(ops)
        )

    def note(self, ops: Iterable[Op], number: int) -> None:
        """Note that command `number` performs `ops`."""
        for op in parts_of(ops):
            (self.reads if op.code in POINT_READS else self.writes)[op.key] = number

    def answered(self, issued: int, answered: int) -> None:
        """Forget commands that have been answered."""
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


def parts_of(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the operations on single keys, including those inside a batch."""
    for op in ops:
        if op.ops:
            yield from op.ops
        else:
            yield op
