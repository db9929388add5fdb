"""The Lua scripts of lock, cache and rate-limit libraries. The server recognises them by their text and does not
interpret Lua.

A lock is a key with an expiry, and only its holder knows its value. To release or extend the lock, a client compares
the value first. Redis has no command for that, so libraries send a script. The known scripts are those of redis-py's
`Lock`, the one in the Redis documentation, with `del` or `pexpire`, and those in `_BY_GIST`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from kvstore.errors import ConditionFailed, OutcomeUnknown, Overloaded, Refused
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Op
from kvstore.partition.state.operations import EXPIRES_MS_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.commands.atomic import Atomic
from kvstore.server.redis.commands.rewrite import ABSENT, ATTEMPTS_MAX, KeyState, Rewrite, rewrite
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, check_value, integer


class Call(NamedTuple):
    """One execution of a script."""

    atomic: Atomic
    """Executes operations together."""
    key: bytes
    arguments: Words
    now_ms: Callable[[], int]
    """Returns the server's time in milliseconds since 1970."""

    def arguments_of(self, count: int) -> Words:
        """Return the arguments. Raises CommandError unless there are `count`."""
        if len(self.arguments) != count:
            raise CommandError(f"ERR expected {count} arguments for this script, got {len(self.arguments)}")
        return self.arguments


Action = Callable[[Call], Coroutine[Any, Any, bytes]]
"""Executes a script and returns its reply."""

TEXT_BYTES_MAX = 4096
LOADED_MAX = 64
"""Maximum number of loaded script texts that differ only in whitespace. The oldest is forgotten first."""
_IF_VERSION, _RELATIVE_TTL = int(Flag.IF_VERSION), int(Flag.RELATIVE_TTL)
_NOT_RUN = "ERR only the scripts of some libraries are supported: see docs/reference/redis.md"


async def release(call: Call) -> bytes:
    """Delete the key if its value equals the first argument. Return the reply 1 if the key was deleted, otherwise 0."""
    (token,) = call.arguments_of(1)
    return await _if_holder(call, token, lambda found: commands.Delete(call.key, _IF_VERSION, found.version))


async def renew(call: Call) -> bytes:
    """If the value of the key equals the first argument, set the time to live to the second argument, in
    milliseconds. Return the reply 1 if the time to live was set, otherwise 0."""
    token, ms = call.arguments_of(2)
    return await _renew(call, token, _milliseconds(ms))


async def extend(call: Call) -> bytes:
    """If the key has an expiry and its value equals the first argument, add the second argument, in milliseconds, to
    the time to live. If the third argument is not 0, the time to live is set to the second argument instead. Return
    the reply 1 if the time to live was changed, otherwise 0."""
    token, ms, from_now = call.arguments_of(3)
    more_ms = _milliseconds(ms)
    if from_now != b"0":
        return await _renew(call, token, more_ms, is_ending=True)

    def later(found: KeyState) -> Op | None:
        return _again(call.key, found, found.expires_ms + more_ms, 0) if found.expires_ms else None

    return await _if_holder(call, token, later)


async def _renew(call: Call, token: bytes, ms: int, *, is_ending: bool = False) -> bytes:
    def renewed(found: KeyState) -> Op | None:
        return None if is_ending and not found.expires_ms else _again(call.key, found, ms, _RELATIVE_TTL)

    return await _if_holder(call, token, renewed)


def _again(key: bytes, found: KeyState, expires_ms: int, flags: int) -> Op:
    return commands.Put(key, found.value, expires_ms, _IF_VERSION | flags, found.version)


async def _if_holder(
    call: Call, token: bytes, make: Callable[[KeyState], Op | None], *, done: bytes = replies.ONE
) -> bytes:
    def decide(found: KeyState) -> Rewrite | bytes:
        op = make(found) if found.version and found.value == token else None
        return replies.ZERO if op is None else Rewrite((op,), done)

    return await rewrite(call.atomic, call.key, decide)


def _milliseconds(word: bytes, unit_ms: int = 1) -> int:
    value = integer(word) * unit_ms
    if not 0 < value < EXPIRES_MS_MAX >> 1:
        raise CommandError("ERR invalid expire time in 'pexpire' command")
    return value


# ── what a library's script does ──────────────────────────────────────────────────────────────────────────────────────


async def remaining(call: Call) -> bytes:
    """Return the time to live in milliseconds if the value of the key equals the first argument, otherwise 0. Of
    pottery's `Redlock`."""
    (token,) = call.arguments_of(1)
    (found,) = await call.atomic((commands.Get(call.key),))
    value, _, _, _, expires_ms = found or ABSENT
    left_ms = max(0, expires_ms - call.now_ms()) if value == token else 0
    return replies.number(left_ms)


async def acquire(call: Call) -> bytes:
    """Set the key to the first argument for as many milliseconds as the second argument says, if the key is absent.
    Return 1 if it was set, otherwise 0. Of redlock for Node.js."""
    token, ms = call.arguments_of(2)
    flags = int(Flag.IF_ABSENT) | _RELATIVE_TTL
    try:
        await call.atomic((commands.Put(call.key, check_value(token), _milliseconds(ms), flags),))
    except ConditionFailed:
        return replies.ZERO
    return replies.ONE


async def release_or_absent(call: Call) -> bytes:
    """Delete the key if its value equals the first argument. Return 1 if it was deleted, 0 if the value differs, and -1
    if the key is absent. Of redsync."""
    (token,) = call.arguments_of(1)

    def decide(found: KeyState) -> Rewrite | bytes:
        if not found.version:
            return replies.number(-1)
        if found.value != token:
            return replies.ZERO
        return Rewrite((commands.Delete(call.key, _IF_VERSION, found.version),), replies.ONE)

    return await rewrite(call.atomic, call.key, decide)


async def renew_or_acquire(call: Call) -> bytes:
    """Set the time to live as `renew` does, or else set the key as `acquire` does. Of redsync."""
    renewed = await renew(call)
    return renewed if renewed != replies.ZERO else await acquire(call)


async def swap(call: Call) -> bytes:
    """Set the key to the first argument if its value equals the second, with the time to live that the others may
    name. Return OK, or 0 if the value differs. Of aiocache."""
    if len(call.arguments) not in (2, 4):
        raise CommandError(f"ERR expected 2 or 4 arguments for this script, got {len(call.arguments)}")
    value, token, *ttl = call.arguments
    ms = 0
    if ttl:
        unit_ms = {b"EX": 1000, b"PX": 1}.get(ttl[0].upper())
        if unit_ms is None:
            raise CommandError("ERR syntax error")
        ms = _milliseconds(ttl[1], unit_ms)
    flags = _IF_VERSION | (_RELATIVE_TTL if ms else 0)
    check_value(value)
    return await _if_holder(
        call, token, lambda found: commands.Put(call.key, value, ms, flags, found.version), done=replies.OK
    )


async def count(call: Call) -> bytes:
    """Add the second argument to the number at the key, and return the sum. A new key gets a time to live of as many
    seconds as the first argument says. A number that was 0 gets it too, in a second step. Of limits' fixed window."""
    seconds, amount = call.arguments_of(2)
    ms, delta, key = _milliseconds(seconds, 1000), integer(amount), call.key
    for _ in range(ATTEMPTS_MAX):
        with suppress(ConditionFailed):
            _, added = await call.atomic((commands.Check(key, int(Flag.IF_PRESENT)), commands.Increment(key, delta)))
            if added[0] == delta:
                try:
                    await call.atomic((commands.Expire(key, ms, _RELATIVE_TTL),))
                except Refused as error:
                    raise OutcomeUnknown(
                        f"the amount was counted, but the time to live was not set: {error}"
                    ) from error
            return replies.number(added[0])
        with suppress(ConditionFailed):
            flags = int(Flag.IF_ABSENT) | _RELATIVE_TTL
            await call.atomic((commands.Put(key, b"%d" % delta, ms, flags),))
            return replies.number(delta)
    raise Overloaded("the key was created and expired in turn; try again")


# ── finding the script ────────────────────────────────────────────────────────────────────────────────────────────────

_BY_DIGEST: dict[bytes, Action] = {
    b"c3f8721cbb97f72bc19e972846bd7aaf91901658": release,
    b"a4e8783852e6b949f9ef3a97212805108459a890": extend,
    b"1cac51482acf5858da00f6d685d68f886cd6b6b2": renew,
}
"""The scripts of redis-py, by SHA-1."""
_BY_GIST: dict[bytes, Action] = {
    b"436c6eb9061c0fd6bb5eb9f0ccd80873a070bd03": release,  # the Redis documentation
    b"176c4cdf6099774baa754c4892167064ec752ab7": renew,  # the Redis documentation, with pexpire
    b"07fb666ba80ab17d44c5c03a26fc8702dd81c053": count,  # limits 5: incr_expire.lua
    b"7c0dae436a2663692b7ebdb923900a580250bbef": swap,  # aiocache 0.12: CAS_SCRIPT
    b"3f251da8099c0decaf32f347e407a2728de809db": remaining,  # pottery 3: Redlock.locked
    b"f14c4d39c6b54ea9c8eaf1a2b46e290282b7ba79": acquire,  # redlock 4 for Node.js: lock
    b"fc85e1c73468e80dd838916e38400e59d4687047": release,  # redlock 4: unlock
    b"436aef7398e1893f2610b38d7ecb472d92f1fdd8": renew,  # redlock 4: extend
    b"08e2de7fbde503fa8f7733707d5ece3d6d804efd": release_or_absent,  # redsync 4: delete
    b"e68009d59ef1782faa826083ed0624a7831b120c": renew_or_acquire,  # redsync 4: touch with SETNX
}
"""The scripts of other libraries, by the SHA-1 of their gist. tests/server/redis/golden/redis_scripts.txt has their
texts."""
_COMMENT = re.compile(rb"--[^\n]*")


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


def gist(text: bytes) -> bytes:
    """Return the text of a script without comments and whitespace, in lower case and with one kind of quotes."""
    plain = b"".join(_COMMENT.sub(b"", text).split())
    return plain.replace(b"'", b'"').replace(b";", b"").lower()


def _recognised(text: bytes) -> Action:
    found = None
    if len(text) <= TEXT_BYTES_MAX:
        found = _BY_GIST.get(hashlib.sha1(gist(text), usedforsecurity=False).hexdigest().encode())
    if found is None:
        raise CommandError(_NOT_RUN)
    return found
