"""String commands: reading, writing, counting."""

from __future__ import annotations

import re
from decimal import Context as Digits
from decimal import Decimal, InvalidOperation
from typing import Any

from kvstore.errors import ConditionFailed, InvalidRequest, StoreError
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Append, Delete, Expire, Flag, Get, Increment, Level, Meta, Op, Put
from kvstore.partition.state.operations import EXPIRES_MS_MAX
from kvstore.partition.state.traits import check_options
from kvstore.server.redis import replies
from kvstore.server.redis.commands.asking import rewriting
from kvstore.server.redis.commands.atomic import Atomic
from kvstore.server.redis.commands.rewrite import KeyState, Rewrite, rewrite
from kvstore.server.redis.commands.row import (
    ALL_KEYS,
    NOT_ATOMIC,
    ONE_PARTITION,
    OPTIONS_MAX,
    PAIRS,
    READS_FIRST,
    Family,
    reads,
    writes,
)
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import (
    INT64_MAX,
    Build,
    CommandError,
    Context,
    Plan,
    Several,
    Single,
    check_key,
    check_value,
    first_failure,
    integer,
    part_failed,
)
from kvstore.server.redis.replies import FORMATS, Fmt

_IF_ABSENT, _IF_VERSION, _KEEP_TTL = int(Flag.IF_ABSENT), int(Flag.IF_VERSION), int(Flag.KEEP_TTL)
FLOAT_BYTES_MAX = 400
FLOAT_DIGITS_MAX = 308
"""Maximum number of digits before the decimal point, as in a double."""
FLOAT_DECIMALS = 17
_FLOAT = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_NOT_A_FLOAT = "ERR value is not a valid float"
_NOT_FINITE = "ERR increment would produce NaN or Infinity"
_DIGITS = Digits(prec=FLOAT_DIGITS_MAX + FLOAT_DECIMALS + 2)


def _get(words: list[bytes], context: Context) -> Plan:
    return Single(Get(check_key(words[1]), context.level), Fmt.VALUE)


def _set(words: list[bytes], context: Context) -> Plan:
    key, value = check_key(words[1]), check_value(words[2])
    if len(words) == 3:
        return Single(Put(key, value), Fmt.OK)
    expires_ms, flags = _set_options(words[3:], context.now_ms)
    if flags & Flag.RETURN_OLD:
        return Single(Put(key, value, expires_ms, flags), Fmt.OLD_VALUE)
    conditional = flags & (Flag.IF_ABSENT | Flag.IF_PRESENT)
    return Single(Put(key, value, expires_ms, flags), Fmt.OK_OR_NULL if conditional else Fmt.OK)


_SET_FLAGS = {b"NX": Flag.IF_ABSENT, b"XX": Flag.IF_PRESENT, b"GET": Flag.RETURN_OLD, b"KEEPTTL": Flag.KEEP_TTL}
_SET_EXPIRY = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}


def _set_options(words: list[bytes], now_ms: int) -> tuple[int, int]:
    flags = 0
    expiry = time = b""
    at = 0
    while at < len(words):
        option = words[at].upper()
        if option in _SET_FLAGS:
            flags |= _SET_FLAGS[option]
        elif option in _SET_EXPIRY and at + 1 < len(words) and expiry in (b"", option):
            at += 1
            expiry, time = option, words[at]
        else:
            raise CommandError("ERR syntax error")
        at += 1
    try:
        check_options(Put.code, int(flags), expires_ms=len(expiry))  # the number itself is checked below, as in Redis
    except InvalidRequest:
        raise CommandError("ERR syntax error") from None
    if not expiry:
        return 0, int(flags)
    unit_ms, relative = _SET_EXPIRY[expiry]
    return _expiry("set", time, unit_ms, relative, now_ms), int(flags | (Flag.RELATIVE_TTL if relative else 0))


def _expiry(command: str, word: bytes, unit_ms: int, relative: bool, now_ms: int) -> int:
    """Return the expiry that an argument sets, in milliseconds: a time to live or a point in time. Raises
    CommandError."""
    value = integer(word) * unit_ms
    if not 0 < value <= EXPIRES_MS_MAX - (now_ms if relative else 0):
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return value


def _setnx(words: list[bytes], context: Context) -> Plan:
    op = Put(check_key(words[1]), check_value(words[2]), 0, int(Flag.IF_ABSENT))
    return Single(op, Fmt.APPLIED)


def _setex(unit_ms: int, command: str) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        expires_ms, flags = _expiry(command, words[2], unit_ms, True, context.now_ms), int(Flag.RELATIVE_TTL)
        return Single(Put(check_key(words[1]), check_value(words[3]), expires_ms, flags), Fmt.OK)

    return build


def _getset(words: list[bytes], context: Context) -> Plan:
    op = Put(check_key(words[1]), check_value(words[2]), 0, int(Flag.RETURN_OLD))
    return Single(op, Fmt.OLD_VALUE)


def _getdel(words: list[bytes], context: Context) -> Plan:
    return Single(Delete(check_key(words[1]), int(Flag.RETURN_OLD)), Fmt.OLD_VALUE)


def _getex(words: list[bytes], context: Context) -> Plan:
    key, options = check_key(words[1]), [word.upper() for word in words[2:]]
    if not options:
        return _get(words, context)
    if options == [b"PERSIST"]:
        expires_ms, flags = 0, 0
    elif len(options) == 2 and options[0] in _SET_EXPIRY:
        unit_ms, relative = _SET_EXPIRY[options[0]]
        expires_ms = _expiry("getex", words[3], unit_ms, relative, context.now_ms)
        flags = int(Flag.RELATIVE_TTL) if relative else 0
    else:
        raise CommandError("ERR syntax error")
    ops = (Get(key, int(Level.LINEARIZABLE)), Expire(key, expires_ms, flags))
    format_value = FORMATS[context.protocol][Fmt.VALUE]
    return Several(ops, lambda results: first_failure(results) or format_value(results[0]), is_atomic=True)


def _getrange(words: list[bytes], context: Context) -> Plan:
    first, last = integer(words[2]), integer(words[3])

    def combine(results: list[Any]) -> bytes:
        (found,) = results
        if isinstance(found, StoreError):
            return replies.failure(found)
        value = found[0] if found else b""
        start = max(0, first + len(value)) if first < 0 else first
        end = max(0, last + len(value)) if last < 0 else last
        is_empty = start > end or last < first < 0
        return replies.bulk(b"" if is_empty else value[start : end + 1])

    return Several([Get(check_key(words[1]), context.level)], combine)


def _mget(words: list[bytes], context: Context) -> Plan:
    format_value = FORMATS[context.protocol][Fmt.VALUE]
    ops = [Get(check_key(key), context.level) for key in words[1:]]
    return Several(ops, lambda results: first_failure(results) or replies.array(map(format_value, results)))


def _mset(words: list[bytes], context: Context) -> Plan:
    if len(words) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'mset' command")
    pairs = zip(words[1::2], words[2::2], strict=True)
    ops = [Put(check_key(key), check_value(value)) for key, value in pairs]
    return Several(ops, lambda results: part_failed(results) or replies.OK)


def _strlen(words: list[bytes], context: Context) -> Plan:
    return Single(Meta(check_key(words[1]), context.level), Fmt.LENGTH)


def _append(words: list[bytes], context: Context) -> Plan:
    return Single(Append(check_key(words[1]), check_value(words[2])), Fmt.NUMBER)


def _increment(sign: int) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        delta = sign * integer(words[2]) if len(words) == 3 else sign
        if delta > INT64_MAX:
            raise CommandError("ERR decrement would overflow")
        return Single(Increment(check_key(words[1]), delta), Fmt.NUMBER)

    return build


async def set_range(atomic: Atomic, words: Words) -> bytes:
    """SETRANGE key offset value."""
    key, offset, part = check_key(words[1]), integer(words[2]), words[3]
    if offset < 0:
        raise CommandError("ERR offset is out of range")
    if part and offset + len(part) > VALUE_BYTES_MAX:
        raise CommandError(f"ERR expected a value of at most {VALUE_BYTES_MAX} bytes, got more")

    def decide(found: KeyState) -> Rewrite | bytes:
        if not part:
            return replies.number(len(found.value))
        value = found.value[:offset].ljust(offset, b"\0") + part + found.value[offset + len(part) :]
        return Rewrite(_kept(key, value, found.version), replies.number(len(value)))

    return await rewrite(atomic, key, decide)


async def increment_by_float(atomic: Atomic, words: Words) -> bytes:
    """INCRBYFLOAT key increment. It calculates in decimal, so the sum of 0.1 and 0.2 is exactly 0.3."""
    key, increment = check_key(words[1]), _float(words[2])

    def decide(found: KeyState) -> Rewrite | bytes:
        total = _DIGITS.add(_float(found.value) if found.version else Decimal(0), increment)
        if total.adjusted() > FLOAT_DIGITS_MAX:
            raise CommandError(_NOT_FINITE)
        value = _shown(total)
        return Rewrite(_kept(key, value, found.version), replies.bulk(value))

    return await rewrite(atomic, key, decide)


def _float(word: bytes) -> Decimal:
    """Parse a decimal number with a limited number of digits. Raises CommandError."""
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
    """Return the number without an exponent and without trailing zeros."""
    text = f"{number:.{FLOAT_DECIMALS}f}".rstrip("0").rstrip(".")
    return b"0" if text in ("-0", "") else text.encode()


def _kept(key: bytes, value: bytes, version: int) -> tuple[Op, ...]:
    """Return the operation that writes the value if the key still has the version that was read. The expiry of the
    key is kept."""
    return (commands.Put(key, value, 0, _IF_VERSION | _KEEP_TTL, version),)


async def set_if_none(atomic: Atomic, words: Words) -> bytes:
    """MSETNX key value [key value …]."""
    if len(words) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'msetnx' command")
    pairs = dict(zip(map(check_key, words[1::2]), map(check_value, words[2::2]), strict=True))
    ops = tuple(commands.Put(key, value, 0, _IF_ABSENT) for key, value in pairs.items())
    try:
        await atomic(ops)
    except ConditionFailed:
        return replies.ZERO
    return replies.ONE


FAMILY = Family(
    "Strings",
    "string",
    (
        reads("GET", "Return the value of a key.", _get, 2, 2),
        writes("SET", "Set the value of a key, with options for conditions and expiry.", _set, 3, OPTIONS_MAX),
        writes("SETNX", "Set the value of a key if the key is absent.", _setnx, 3, 3),
        writes("SETEX", "Set the value of a key and its time to live in seconds.", _setex(1000, "setex"), 4, 4),
        writes("PSETEX", "Set the value of a key and its time to live in milliseconds.", _setex(1, "psetex"), 4, 4),
        writes("GETSET", "Set the value of a key and return the previous value.", _getset, 3, 3),
        writes("GETDEL", "Return the value of a key and delete the key.", _getdel, 2, 2),
        writes("GETEX", "Return the value of a key and change its expiry.", _getex, 2, OPTIONS_MAX),
        reads("GETRANGE", "Return part of a value.", _getrange, 4, 4),
        reads("SUBSTR", "Return part of a value, as GETRANGE does.", _getrange, 4, 4),
        reads(
            "MGET",
            "Return the values of several keys.",
            _mget,
            2,
            0,
            ALL_KEYS,
            f"{NOT_ATOMIC} A reply has at most 32 MiB of values.",
        ),
        writes(
            "MSET",
            "Set the values of several keys.",
            _mset,
            3,
            0,
            PAIRS,
            f"{NOT_ATOMIC} A failed MSET may have set some of its keys.",
        ),
        writes(
            "MSETNX",
            "Set several keys if all of them are absent.",
            rewriting(set_if_none, 0),
            3,
            0,
            PAIRS,
            ONE_PARTITION,
        ),
        reads("STRLEN", "Return the length of a value.", _strlen, 2, 2),
        writes("APPEND", "Append to the value of a key.", _append, 3, 3),
        writes("INCR", "Increment the number at a key by one.", _increment(1), 2, 2),
        writes("DECR", "Decrement the number at a key by one.", _increment(-1), 2, 2),
        writes("INCRBY", "Increment the number at a key.", _increment(1), 3, 3),
        writes("DECRBY", "Decrement the number at a key.", _increment(-1), 3, 3),
        writes(
            "INCRBYFLOAT",
            "Increment the decimal number at a key.",
            rewriting(increment_by_float),
            3,
            3,
            differs=f"Counts in decimals. {READS_FIRST}",
        ),
        writes(
            "SETRANGE",
            "Overwrite part of a value, starting at an offset.",
            rewriting(set_range),
            4,
            4,
            differs=READS_FIRST,
        ),
    ),
)
