"""Optimistic read-modify-write of a key, for commands that read before they write.

A command does all of its work or none. Its keys must be in one partition, because a batch is atomic only within a
partition.
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
    """The state of the key when it was read. Version 0: the key is absent."""

    value: bytes
    version: int
    expires_ms: int
    is_other_there: bool
    """True if the command's other key exists, read at the same moment."""


class Rewrite(NamedTuple):
    """Operations that are applied if all their conditions hold, and the reply to the client in that case."""

    ops: tuple[Op, ...]
    reply: bytes


async def rewrite(ask: Ask, key: bytes, decide: Callable[[KeyState], Rewrite | bytes], other: bytes = b"") -> bytes:
    """Read the key, decide, and write the decision if the key is unchanged; otherwise start again. If `decide` returns
    bytes, they are the reply and nothing is written.

    Raises CommandError, StoreError, and Overloaded if other clients change the key in every attempt.
    """
    read = commands.batch(key, (commands.get(key), commands.meta(other or key)))
    for _ in range(ATTEMPTS_MAX):
        record, about_other = await ask(read)
        value, version, _, _, expires_ms = record or ABSENT
        decided = decide(KeyState(value, version, expires_ms, about_other is not None))
        if isinstance(decided, bytes):
            return decided
        try:
            await ask(commands.batch(key, decided.ops))
        except ConditionFailed:
            continue
        return decided.reply
    raise Overloaded(f"other clients changed the key during each of {ATTEMPTS_MAX} attempts; try again")
