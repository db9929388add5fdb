"""The Redis commands that read before they write: what a key shall hold follows from what it holds, and is written if
nobody has written it meanwhile; else it is read again. Nothing of a command is done, or all of it.

Keys of one command are in one partition, or it is refused with CROSSSLOT: only there a batch is atomic.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from decimal import Context as Digits
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from kvstore.errors import ConditionFailed, Overloaded
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Op, Record
from kvstore.server.redis import replies
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, OwnerOf, check_key, check_one_owner, check_value, integer

Ask = Callable[[Op], Awaitable[Any]]
"""The result of an operation. Raises StoreError."""

ATTEMPTS_MAX = 64
"""Others may write the key between the look and the write; not for ever."""
FLOAT_BYTES_MAX = 400
FLOAT_DIGITS_MAX = 308
"""Before the point: as a double has them."""
FLOAT_DECIMALS = 17
_FLOAT = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_NOT_A_FLOAT = "ERR value is not a valid float"
_NOT_FINITE = "ERR increment would produce NaN or Infinity"
_DIGITS = Digits(prec=FLOAT_DIGITS_MAX + FLOAT_DECIMALS + 2)

_IF_ABSENT, _IF_VERSION, _KEEP_TTL = int(Flag.IF_ABSENT), int(Flag.IF_VERSION), int(Flag.KEEP_TTL)
NO_SUCH_KEY = "ERR no such key"
ABSENT = Record(b"", 0, 0, 0, 0)


class Found(NamedTuple):
    """Keys as they were read, at one moment; version 0: the key is absent."""

    value: bytes
    version: int
    expires_ms: int
    is_other_there: bool
    """The other key, of a command that names two."""


class Rewrite(NamedTuple):
    """Operations to be done if the conditions of all are met, and the reply of that."""

    ops: tuple[Op, ...]
    reply: bytes


async def rewrite(ask: Ask, key: bytes, decide: Callable[[Found], Rewrite | bytes], other: bytes = b"") -> bytes:
    """Look at the key, decide, and write what was decided if it is still as it was. Bytes are a reply: nothing is
    written. Raises CommandError, StoreError, and Overloaded if others write the key all the time."""
    look = commands.batch(key, (commands.get(key), commands.meta(other or key)))
    for _ in range(ATTEMPTS_MAX):
        record, about_other = await ask(look)
        value, version, _, _, expires_ms = record or ABSENT
        decided = decide(Found(value, version, expires_ms, about_other is not None))
        if isinstance(decided, bytes):
            return decided
        try:
            await ask(commands.batch(key, decided.ops))
        except ConditionFailed:
            continue
        return decided.reply
    raise Overloaded(f"others have written the key {ATTEMPTS_MAX} times meanwhile")


def _kept(key: bytes, value: bytes, version: int) -> tuple[Op, ...]:
    """Write a value over the version that was seen; the expiry stays."""
    return (commands.put(key, value, 0, _IF_VERSION | _KEEP_TTL, version),)


# ── one key ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def set_range(ask: Ask, words: Words, owner_of: OwnerOf) -> bytes:
    """SETRANGE key offset value."""
    key, offset, part = check_key(words[1]), integer(words[2]), words[3]
    if offset < 0:
        raise CommandError("ERR offset is out of range")
    if part and offset + len(part) > VALUE_BYTES_MAX:
        raise CommandError(f"ERR value is too large: at most {VALUE_BYTES_MAX} bytes")

    def decide(found: Found) -> Rewrite | bytes:
        if not part:
            return replies.number(len(found.value))
        value = found.value[:offset].ljust(offset, b"\0") + part + found.value[offset + len(part) :]
        return Rewrite(_kept(key, value, found.version), replies.number(len(value)))

    return await rewrite(ask, key, decide)


async def increment_by_float(ask: Ask, words: Words, owner_of: OwnerOf) -> bytes:
    """INCRBYFLOAT key increment. In decimals, so that 0.1 and 0.2 are 0.3."""
    key, increment = check_key(words[1]), _float(words[2])

    def decide(found: Found) -> Rewrite | bytes:
        total = _DIGITS.add(_float(found.value) if found.version else Decimal(0), increment)
        if total.adjusted() > FLOAT_DIGITS_MAX:
            raise CommandError(_NOT_FINITE)
        value = _shown(total)
        return Rewrite(_kept(key, value, found.version), replies.bulk(value))

    return await rewrite(ask, key, decide)


def _float(word: bytes) -> Decimal:
    """A number of a bounded length and size. Raises CommandError."""
    if word.lstrip(b"+-").lower() in (b"inf", b"infinity"):
        raise CommandError(_NOT_FINITE)
    if len(word) > FLOAT_BYTES_MAX or not _FLOAT.fullmatch(word):
        raise CommandError(_NOT_A_FLOAT)
    try:
        number = Decimal(word.decode())
    except InvalidOperation:
        raise CommandError(_NOT_A_FLOAT) from None
    if number.adjusted() > FLOAT_DIGITS_MAX:
        raise CommandError(_NOT_A_FLOAT)
    return number


def _shown(number: Decimal) -> bytes:
    """Without an exponent, and without zeros behind the last digit."""
    text = f"{number:.{FLOAT_DECIMALS}f}".rstrip("0").rstrip(".")
    return b"0" if text in ("-0", "") else text.encode()


# docs/protocol.md N4
def _moved(found: Found, target: bytes, flags: int) -> tuple[Op, ...]:
    """Write what was found under another key, with its expiry. Without one it stays without one, whatever a namespace
    gives to keys that are new."""
    put = commands.put(target, found.value, found.expires_ms, flags)
    return (put,) if found.expires_ms else (put, commands.expire(target, 0))


# ── two keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def rename(ask: Ask, words: Words, owner_of: OwnerOf) -> bytes:
    """RENAME key newkey, RENAMENX key newkey. The expiry goes along."""
    source, target, only_new = check_key(words[1]), check_key(words[2]), words[0].upper() == b"RENAMENX"
    check_one_owner((source, target), owner_of)

    def decide(found: Found) -> Rewrite | bytes:
        if not found.version:
            raise CommandError(NO_SUCH_KEY)
        if source == target:
            return replies.ZERO if only_new else replies.OK
        if only_new and found.is_other_there:
            return replies.ZERO
        flags = _IF_ABSENT if only_new else 0
        ops = (commands.delete(source, _IF_VERSION, found.version), *_moved(found, target, flags))
        return Rewrite(ops, replies.ONE if only_new else replies.OK)

    return await rewrite(ask, source, decide, target)


async def copy(ask: Ask, words: Words, owner_of: OwnerOf) -> bytes:
    """COPY source destination [DB 0] [REPLACE]."""
    source, target, options = check_key(words[1]), check_key(words[2]), [word.upper() for word in words[3:]]
    replaces = b"REPLACE" in options
    if replaces:
        options.remove(b"REPLACE")
    if options not in ([], [b"DB", b"0"]):
        raise CommandError("ERR DB index is out of range" if options[:1] == [b"DB"] else "ERR syntax error")
    if source == target:
        raise CommandError("ERR source and destination objects are the same")
    check_one_owner((source, target), owner_of)

    def decide(found: Found) -> Rewrite | bytes:
        if not found.version or (found.is_other_there and not replaces):
            return replies.ZERO
        check = commands.check(source, _IF_VERSION, found.version)
        ops = (check, *_moved(found, target, 0 if replaces else _IF_ABSENT))
        return Rewrite(ops, replies.ONE)

    return await rewrite(ask, source, decide, target)


async def set_if_none(ask: Ask, words: Words, owner_of: OwnerOf) -> bytes:
    """MSETNX key value [key value …]: all of them, or none."""
    if len(words) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'msetnx' command")
    pairs = dict(zip(map(check_key, words[1::2]), map(check_value, words[2::2]), strict=True))
    check_one_owner(list(pairs), owner_of)
    ops = tuple(commands.put(key, value, 0, _IF_ABSENT) for key, value in pairs.items())
    try:
        await ask(commands.batch(words[1], ops))
    except ConditionFailed:
        return replies.ZERO
    return replies.ONE


REWRITES: dict[str, Callable[[Ask, Words, OwnerOf], Coroutine[Any, Any, bytes]]] = {
    "SETRANGE": set_range,
    "INCRBYFLOAT": increment_by_float,
    "RENAME": rename,
    "RENAMENX": rename,
    "COPY": copy,
    "MSETNX": set_if_none,
}
