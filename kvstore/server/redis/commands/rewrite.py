"""Read a key, decide, and write if the key is unchanged: the engine of the commands that read before they write.

A command does all of its work, or none. Its keys must be in one partition, because only there is a batch atomic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from kvstore.errors import ConditionFailed, Overloaded
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Op, Record

Ask = Callable[[Op], Awaitable[Any]]
"""Returns the result of an operation. Raises StoreError."""

ATTEMPTS_MAX = 64
"""Maximum number of attempts when other clients write the key between read and write."""
ABSENT = Record(b"", 0, 0, 0, 0)


class KeyState(NamedTuple):
    """The key as it was read. Version 0: it is absent."""

    value: bytes
    version: int
    expires_ms: int
    is_other_there: bool
    """True if the other key of the command is there, read at the same moment."""


class Rewrite(NamedTuple):
    """Operations that are done if the conditions of all hold, and the reply to the client if so."""

    ops: tuple[Op, ...]
    reply: bytes


async def rewrite(ask: Ask, key: bytes, decide: Callable[[KeyState], Rewrite | bytes], other: bytes = b"") -> bytes:
    """Read the key, decide, and write the decision if the key is unchanged, else start again. If `decide` returns
    bytes, these are the reply, and nothing is written. Raises CommandError, StoreError, and Overloaded if other clients
    change the key each time."""
    look = commands.batch(key, (commands.get(key), commands.meta(other or key)))
    for _ in range(ATTEMPTS_MAX):
        record, about_other = await ask(look)
        value, version, _, _, expires_ms = record or ABSENT
        decided = decide(KeyState(value, version, expires_ms, about_other is not None))
        if isinstance(decided, bytes):
            return decided
        try:
            await ask(commands.batch(key, decided.ops))
        except ConditionFailed:
            continue
        return decided.reply
    raise Overloaded(f"others have written the key {ATTEMPTS_MAX} times meanwhile")
