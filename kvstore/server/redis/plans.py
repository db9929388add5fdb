"""Plans of Redis commands, and the checks that all of them make. Decides only.

A plan is one of three: an operation and the format of its reply, several operations and a function that combines their
results into one reply, or a reply. A command that needs more than operations on keys (a transaction, a scan, the state
of its connection) has no plan: its row in commands/ has a handler of the kind `Alone`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvstore.errors import OutcomeUnknown, Refused, StoreError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import Batch, Flag, Get, Level, Op
from kvstore.server.redis import replies
from kvstore.server.redis.replies import Fmt
from kvstore.types import PartitionId

REPLY_BYTES_MAX = 32 << 20
"""Maximum number of bytes of the values in one reply."""
PATTERN_BYTES_MAX = 1024
"""Maximum length of a pattern in bytes. To compile a longer pattern, or to search a long key for it, takes
milliseconds."""
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
_KEY_TOO_LONG = f"ERR expected a key of at most {KEY_BYTES_MAX} bytes, got more"


class CommandError(Exception):
    """The command cannot be executed. The text is the error reply, including the code at its beginning."""


class Context(NamedTuple):
    """The state, other than the words of a command, on which the plan of the command may depend."""

    protocol: int = 2
    level: int = Level.LINEARIZABLE
    clock: Callable[[], int] = lambda: 0
    publish: Callable[[list[bytes]], bytes] = lambda words: b""
    """Executes a PUBLISH and returns its reply."""
    is_subscriber: bool = False
    """True if the client may send only the commands of a subscriber."""

    @property
    def now_ms(self) -> int:
        """The current time, not the time at which the command arrived: a command in a transaction may wait for EXEC,
        and a read may wait for its leader."""
        return self.clock()


class Single(NamedTuple):
    """A plan of one operation, with the number of the format for its reply."""

    op: Op
    format: int


class Several(NamedTuple):
    """A plan of several operations, whose results are combined into one reply."""

    ops: Sequence[Op]
    combine: Callable[[list[Any]], bytes]
    is_atomic: bool = False
    """True if the operations are on one key and are applied as one."""


class Reply(NamedTuple):
    """A plan that consists of a reply and needs no operation."""

    data: bytes


class Effect(NamedTuple):
    """A plan that does something at this node and needs no operation. It begins when all earlier commands are answered,
    and in a transaction when its operations have taken effect."""

    act: Callable[[], bytes]
    """Does it, and returns the reply."""


Plan = Single | Several | Reply | Effect

Build = Callable[[list[bytes], Context], Plan]


OwnerOf = Callable[[bytes], PartitionId]
"""Returns the partition that owns a key."""


def check_key(key: bytes) -> bytes:
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise CommandError(_KEY_TOO_LONG if key else "ERR expected a key of at least 1 byte, got an empty key")
    return key


def check_value(value: bytes) -> bytes:
    if len(value) > VALUE_BYTES_MAX:
        raise CommandError(f"ERR expected a value of at most {VALUE_BYTES_MAX} bytes, got more")
    return value


def check_pattern(pattern: bytes) -> bytes:
    if len(pattern) > PATTERN_BYTES_MAX:
        raise CommandError(f"ERR expected a pattern of at most {PATTERN_BYTES_MAX} bytes, got more")
    return pattern


def check_one_owner(keys: Sequence[bytes], owner_of: OwnerOf) -> None:
    """Raise CommandError unless one partition owns all keys."""
    owners = sorted({owner_of(key) for key in keys})
    if len(owners) > 1:
        raise CommandError(
            f"CROSSSLOT Keys in request don't hash to the same slot: they are in partitions {', '.join(owners)}; put "
            "the same {tag} into the keys"
        )


def integer(word: bytes) -> int:
    """Return a signed 64-bit number in the form that Redis accepts: no blanks, plus sign or leading zeros. Raises
    CommandError."""
    digits = word[1:] if word[:1] == b"-" else word
    plain = digits.isdigit() and len(digits) <= 19 and (digits[:1] != b"0" or word == b"0")
    if not plain or not INT64_MIN <= int(word) <= INT64_MAX:
        raise CommandError("ERR value is not an integer or out of range")
    return int(word)


def value_bytes(plans: Iterable[Plan], most: int) -> int:
    """Return the maximum number of bytes for the values that `plans` read together with the replies made from these
    values. The result is at most twice `most`."""
    values = 0
    for each in plans:
        match each:
            case Single(_, format_):
                values += format_ in (Fmt.VALUE, Fmt.OLD_VALUE)
            case Several(ops, _):
                values += sum(1 for op in ops if op.__class__ is Get)
            case Reply() | Effect():
                pass
    return 2 * min(values * VALUE_BYTES_MAX, most)


def together(found: Several) -> Several:
    """Return an equivalent plan with a single batch."""
    batch = Batch(found.ops[0].key, tuple(found.ops), int(Flag.INDEPENDENT), None)

    def combine(results: list[Any]) -> bytes:
        (outcome,) = results
        return first_failure(results) or found.combine(outcome)

    return Several([batch], combine)


def first_failure(results: Sequence[Any]) -> bytes:
    """Return the reply for the most severe failure, or an empty reply if no result failed. An unknown outcome is
    more severe than any other failure."""
    failures = [result for result in results if isinstance(result, StoreError)]
    return replies.failure(min(failures, key=_gravity)) if failures else b""


def part_failed(results: Sequence[Any]) -> bytes:
    """Return the reply for the failures among writes, or an empty reply if none failed. A refusal tells the client
    that nothing was written. So if some writes succeeded, the reply says that the outcome is unknown."""
    failures = [result for result in results if isinstance(result, StoreError)]
    if 0 < len(failures) < len(results) and all(isinstance(failure, Refused) for failure in failures):
        done = len(results) - len(failures)
        return replies.failure(
            OutcomeUnknown(f"{done} of {len(results)} keys were written, the others were not: {failures[0]}")
        )
    return first_failure(results)


def _gravity(failure: StoreError) -> int:
    return int(isinstance(failure, Refused))
