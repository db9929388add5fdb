"""The reads of one connection that are repeated because their replies did not fit. Decides only.

If a reply does not fit, it is dropped, and so are the replies of all later reads that have begun. Repeated in their
turn, each read sees at least the state of the read before it, as the client may expect. Until then no other command
begins.
"""

from __future__ import annotations

from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state.commands import Get, Meta
from kvstore.server.redis.plans import Several, Single, value_bytes

KEPT_MAX = 4096
"""Number of reads that are remembered before answered ones are dropped."""

Read = bytes | Single | Several
"""The key of a plain GET, or the plan of another read."""


class Rereads:
    """The reads of one connection that may be repeated. Numbers count the commands of the connection."""

    __slots__ = ("below", "current", "numbers", "reads", "size")

    def __init__(self) -> None:
        self.reads: dict[int, Read] = {}
        """Reads that can be repeated, by number: those in flight and some answered ones."""
        self.numbers: set[int] = set()
        """Numbers of reads that must be repeated and have not begun again."""
        self.below = 0
        """Replies of reads before this number are dropped as they arrive, unless it is their turn."""
        self.current = -1
        """Number of the last read that was repeated."""
        self.size = 0
        """Maximum number of bytes that this read may take."""

    def note(self, found: Single | Several, number: int) -> None:
        """Note that command `number` has begun."""
        op = found.op if isinstance(found, Single) else found.ops[0]
        if isinstance(op, (Get, Meta)):
            self.reads[number] = found

    def put_off(self, number: int, issued: int, early: dict[int, bytes]) -> None:
        """Repeat read `number` and every read after it. `early` holds the replies that arrived before their turn."""
        self.below = issued
        self.numbers.add(number)
        for each in [each for each in early if each > number and each in self.reads]:
            del early[each]
            self.numbers.add(each)

    def answered(self, issued: int, answered: int) -> None:
        """Forget reads that have been answered."""
        if issued == answered:
            self.reads.clear()
        elif len(self.reads) > KEPT_MAX:
            for number in [number for number in self.reads if number < answered]:
                del self.reads[number]


def bytes_of(read: Read, most: int) -> int:
    """Return the maximum number of bytes that a read may take: its values, and the reply that is made of them."""
    return value_bytes((read,), most) if isinstance(read, Several) else VALUE_BYTES_MAX
