"""The Lua scripts of lock libraries. The server recognises them by their text and does not interpret Lua.

A lock is a key with an expiry, and only its holder knows its value. To release or extend the lock, a client compares
the value first. Redis has no command for that, so libraries send a script. The known scripts are those of redis-py's
`Lock`, and the one in the Redis documentation, with `del` or `pexpire`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Op
from kvstore.partition.state.operations import EXPIRES_MS_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.commands.atomic import Atomic
from kvstore.server.redis.commands.rewrite import KeyState, Rewrite, rewrite
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, integer

Action = Callable[[Atomic, bytes, Words], Coroutine[Any, Any, bytes]]
"""Executes a script: takes what executes operations, the key and the script's arguments, and returns the
reply."""

TEXT_BYTES_MAX = 4096
LOADED_MAX = 64
"""Maximum number of loaded script texts that differ only in whitespace. The oldest is forgotten first."""
_IF_VERSION, _RELATIVE_TTL = int(Flag.IF_VERSION), int(Flag.RELATIVE_TTL)
_NOT_RUN = "ERR only the scripts of lock libraries are supported: see docs/reference/redis.md"


async def release(atomic: Atomic, key: bytes, arguments: Words) -> bytes:
    """Delete the key if its value equals the first argument. Return the reply 1 if the key was deleted, otherwise 0."""
    (token,) = _expect(arguments, 1)
    return await _if_holder(atomic, key, token, lambda found: commands.Delete(key, _IF_VERSION, found.version))


async def renew(atomic: Atomic, key: bytes, arguments: Words) -> bytes:
    """If the value of the key equals the first argument, set the time to live to the second argument, in
    milliseconds. Return the reply 1 if the time to live was set, otherwise 0."""
    token, ms = _expect(arguments, 2)
    return await _renew(atomic, key, token, _milliseconds(ms))


async def extend(atomic: Atomic, key: bytes, arguments: Words) -> bytes:
    """If the key has an expiry and its value equals the first argument, add the second argument, in milliseconds, to
    the time to live. If the third argument is not 0, the time to live is set to the second argument instead. Return
    the reply 1 if the time to live was changed, otherwise 0."""
    token, ms, from_now = _expect(arguments, 3)
    more_ms = _milliseconds(ms)
    if from_now != b"0":
        return await _renew(atomic, key, token, more_ms, is_ending=True)

    def later(found: KeyState) -> Op | None:
        return _again(key, found, found.expires_ms + more_ms, 0) if found.expires_ms else None

    return await _if_holder(atomic, key, token, later)


async def _renew(atomic: Atomic, key: bytes, token: bytes, ms: int, *, is_ending: bool = False) -> bytes:
    def renewed(found: KeyState) -> Op | None:
        return None if is_ending and not found.expires_ms else _again(key, found, ms, _RELATIVE_TTL)

    return await _if_holder(atomic, key, token, renewed)


def _again(key: bytes, found: KeyState, expires_ms: int, flags: int) -> Op:
    return commands.Put(key, found.value, expires_ms, _IF_VERSION | flags, found.version)


async def _if_holder(atomic: Atomic, key: bytes, token: bytes, make: Callable[[KeyState], Op | None]) -> bytes:
    def decide(found: KeyState) -> Rewrite | bytes:
        op = make(found) if found.version and found.value == token else None
        return replies.ZERO if op is None else Rewrite((op,), replies.ONE)

    return await rewrite(atomic, key, decide)


def _expect(arguments: Words, count: int) -> Words:
    if len(arguments) != count:
        raise CommandError(f"ERR expected {count} arguments for this script, got {len(arguments)}")
    return arguments


def _milliseconds(word: bytes) -> int:
    value = integer(word)
    if not 0 < value < EXPIRES_MS_MAX >> 1:
        raise CommandError("ERR invalid expire time in 'pexpire' command")
    return value


_BY_DIGEST: dict[bytes, Action] = {
    b"c3f8721cbb97f72bc19e972846bd7aaf91901658": release,
    b"a4e8783852e6b949f9ef3a97212805108459a890": extend,
    b"1cac51482acf5858da00f6d685d68f886cd6b6b2": renew,
}
"""The scripts of redis-py, by SHA-1."""
_IF_EQUAL = re.compile(
    rb'ifredis\.call\("get",keys\[1\]\)==argv\[1\]then'
    rb'returnredis\.call\("(?:(del)",keys\[1\]|pexpire",keys\[1\],argv\[2\])\)elsereturn0end'
)
"""The script of the Redis documentation, without whitespace."""


class Scripts:
    """One server's cache of the scripts that it recognises, keyed by SHA-1 digest."""

    def __init__(self) -> None:
        self._loaded: dict[bytes, Action] = {}

    def find(self, digest: bytes) -> Action:
        """Return the action of the script with this digest. Raises CommandError if the script is unknown; clients
        then send its text."""
        action = self.find_or_none(digest)
        if action is None:
            raise CommandError("NOSCRIPT No matching script. Please use EVAL.")
        return action

    def find_or_none(self, digest: bytes) -> Action | None:
        digest = digest.lower()
        return _BY_DIGEST.get(digest) or self._loaded.get(digest)

    def load(self, text: bytes) -> tuple[bytes, Action]:
        """Recognise a script by its text and remember its digest. Return the digest and the action. Raises
        CommandError if the script is unknown."""
        digest = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
        action = self.find_or_none(digest)
        if action is None:
            action = self._loaded[digest] = _recognised(text)
            if len(self._loaded) > LOADED_MAX:
                del self._loaded[next(iter(self._loaded))]
        return digest, action

    def clear(self) -> None:
        """Forget the loaded scripts. The built-in scripts remain known."""
        self._loaded.clear()


def _recognised(text: bytes) -> Action:
    found = None
    if len(text) <= TEXT_BYTES_MAX:
        found = _IF_EQUAL.fullmatch(b"".join(text.split()).replace(b"'", b'"').rstrip(b";").lower())
    if found is None:
        raise CommandError(_NOT_RUN)
    return release if found[1] else renew
