"""Optimistic read-modify-write of a key, for commands that must read before they write.

A command takes effect completely or not at all (atomic.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.errors import ConditionFailed, Overloaded
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Op, Record
from kvstore.server.redis.commands.atomic import Atomic

ATTEMPTS_MAX = 64
"""Maximum number of attempts when other clients write the key between read and write."""
ABSENT = Record(b"", 0, 0, 0, 0)


class KeyState(NamedTuple):
    """The state of a key when it was read. The version is 0 if the key does not exist."""

    value: bytes
    version: int
    expires_ms: int
    is_other_there: bool
    """True if the command's other key exists, read at the same moment."""


class Rewrite(NamedTuple):
    """The operations with which a command writes, and its reply if they are applied. They are applied only if all of
    their conditions are met."""

    ops: tuple[Op, ...]
    reply: bytes


async def rewrite(
    atomic: Atomic, key: bytes, decide: Callable[[KeyState], Rewrite | bytes], other: bytes = b""
) -> bytes:
    """Read the key, call `decide` with its state, and write what `decide` returns if the key is still unchanged. If
    another client has changed the key, start again. If `decide` returns bytes, they are the reply and nothing is
    written.

    `other` is a second key whose existence `decide` needs to know. Raises CommandError, StoreError, and Overloaded if
    other clients changed the key in each of ATTEMPTS_MAX attempts.
    """
    reads = (commands.Get(key), commands.Meta(other or key))
    for _ in range(ATTEMPTS_MAX):
        record, about_other = await atomic(reads)
        value, version, _, _, expires_ms = record or ABSENT
        decided = decide(KeyState(value, version, expires_ms, about_other is not None))
        if isinstance(decided, bytes):
            return decided
        try:
            await atomic(decided.ops)
        except ConditionFailed:
            continue
        return decided.reply
    raise Overloaded(f"other clients changed the key during each of {ATTEMPTS_MAX} attempts; try again")
