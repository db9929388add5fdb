"""Remembers the reads of one connection that are done again because there was no room for their replies. Decides only.

A reply that does not fit is forgotten, and with it those of all later reads that have begun: done again in their turn,
each of them sees no less than the one before it, as its client may expect. Until then nothing new is begun.
"""

from __future__ import annotations

from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state.commands import Code
from kvstore.server.redis.plans import Several, Single, value_bytes

KEPT_MAX = 4096
"""Reads remembered before those that are answered are looked for and dropped."""
_GET, _META = int(Code.GET), int(Code.META)

Read = bytes | Single | Several
"""The key of a plain GET, or what else reads."""


class Rereads:
    """The reads of one connection that may be done again. Numbers are the connection's own count of its commands."""

    __slots__ = ("below", "current", "numbers", "reads", "size")

    def __init__(self) -> None:
        self.reads: dict[int, Read] = {}
        """Reads that can be done again, by number. May also hold answered ones."""
        self.numbers: set[int] = set()
        """Numbers of reads that are to be done again and have not been begun."""
        self.below = 0
        """Reads before this number are put off as they come, unless it is their turn."""
        self.current = -1
        """The last read that was begun again."""
        self.size = 0
        """Bytes that it may take at most."""

    def note(self, found: Single | Several, number: int) -> None:
        """Command `number` has begun."""
        op = found.op if isinstance(found, Single) else found.ops[0]
        if op[0] in (_GET, _META):
            self.reads[number] = found

    def put_off(self, number: int, issued: int, early: dict[int, bytes]) -> None:
        """Do `number` again, and every read after it; `early` holds the replies that came before their turn."""
        self.below = issued
        self.numbers.add(number)
        for each in [each for each in early if each > number and each in self.reads]:
            del early[each]
            self.numbers.add(each)

    def answered(self, issued: int, answered: int) -> None:
        """Forget what is answered."""
        if issued == answered:
            self.reads.clear()
        elif len(self.reads) > KEPT_MAX:
            for number in [number for number in self.reads if number < answered]:
                del self.reads[number]


def bytes_of(read: Read, most: int) -> int:
    """Return the bytes that a read may take at most: its values, and the reply that is made of them."""
    return value_bytes((read,), most) if isinstance(read, Several) else VALUE_BYTES_MAX
