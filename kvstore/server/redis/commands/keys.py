"""Key commands, for values of any kind: deletion, renaming, expiry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import InvalidRequest, StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Delete, Expire, Flag, Get, Meta, Op
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
    READS_FIRST,
    TWO_KEYS,
    Family,
    KeyPositions,
    reads,
    subcommands,
    writes,
)
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import (
    INT64_MIN,
    Build,
    CommandError,
    Context,
    Plan,
    Several,
    Single,
    check_key,
    first_failure,
    integer,
    part_failed,
)
from kvstore.server.redis.replies import Fmt

EMBEDDED_BYTES_MAX = 44
"""Maximum size in bytes of a value that Redis stores beside its key."""
_IF_ABSENT, _IF_VERSION = int(Flag.IF_ABSENT), int(Flag.IF_VERSION)


def _delete(words: list[bytes], context: Context) -> Plan:
    ops = [Delete(check_key(key)) for key in words[1:]]
    if len(ops) == 1:
        return Single(ops[0], Fmt.DELETED)
    return Several(ops, lambda results: part_failed(results) or replies.number(sum(map(bool, results))))


def _exists(words: list[bytes], context: Context) -> Plan:
    ops = [Meta(check_key(key), context.level) for key in words[1:]]
    if len(ops) == 1:
        return Single(ops[0], Fmt.EXISTS)
    return Several(ops, lambda results: first_failure(results) or replies.number(len(results) - results.count(None)))


def _type(words: list[bytes], context: Context) -> Plan:
    return Single(Meta(check_key(words[1]), context.level), Fmt.TYPE)


_EXPIRE_FLAGS = {b"NX": Flag.IF_NO_TTL, b"XX": Flag.IF_TTL, b"GT": Flag.IF_LONGER, b"LT": Flag.IF_SHORTER}


def _expire(unit_ms: int, relative: bool) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        flags = int(Flag.RELATIVE_TTL) if relative else 0
        for word in words[3:]:
            if word.upper() not in _EXPIRE_FLAGS:
                raise CommandError(f"ERR Unsupported option {word[:32].decode('utf-8', 'replace')}")
            flags |= _EXPIRE_FLAGS[word.upper()]
        try:
            check_options(Expire.code, flags, expires_ms=1)  # the number itself is checked below, as in Redis
        except InvalidRequest:
            first = "NX and XX, GT or LT" if flags & Flag.IF_NO_TTL else "GT and LT"
            raise CommandError(f"ERR {first} options at the same time are not compatible") from None
        value = integer(words[2]) * unit_ms
        if not INT64_MIN <= value <= EXPIRES_MS_MAX - (context.now_ms if relative else 0):
            name = words[0].decode("utf-8", "replace").lower()
            raise CommandError(f"ERR invalid expire time in '{name}' command")
        # An expiry of 0 would be removed. A time in the past deletes the key, however long ago it is.
        if value <= 0:
            value, flags = 1, flags & ~int(Flag.RELATIVE_TTL)
        return Single(Expire(check_key(words[1]), value, flags), Fmt.CHANGED)

    return build


def _persist(words: list[bytes], context: Context) -> Plan:
    return Single(Expire(check_key(words[1]), 0), Fmt.CHANGED)


def _expires_at(unit_ms: int) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        def combine(results: list[Any]) -> bytes:
            (found,) = results
            if isinstance(found, StoreError):
                return replies.failure(found)
            return replies.number(-2 if found is None else found[4] // unit_ms if found[4] else -1)

        return Several([Meta(check_key(words[1]), context.level)], combine)

    return build


def _ttl(unit_ms: int) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        def combine(results: list[Any]) -> bytes:
            (found,) = results
            if isinstance(found, StoreError):
                return replies.failure(found)
            if found is None:
                return replies.number(-2)
            if not found[4]:
                return replies.number(-1)
            return replies.number((max(0, found[4] - context.now_ms) + unit_ms // 2) // unit_ms)

        return Several([Meta(check_key(words[1]), context.level)], combine)

    return build


def _about_key(kind: type[Get | Meta], show: Callable[[bytes, Any, Context], bytes]) -> Build:
    """Return a handler that replies with the stored metadata of the key in the command's third word, or nil if the
    key does not exist."""

    def build(words: list[bytes], context: Context) -> Plan:
        key = check_key(words[2])

        def combine(results: list[Any]) -> bytes:
            (found,) = results
            if isinstance(found, StoreError):
                return replies.failure(found)
            return replies.NULL[context.protocol] if found is None else show(key, found, context)

        return Several([kind(key, context.level)], combine)

    return build


def _encoding(key: bytes, found: Any, context: Context) -> bytes:
    value: bytes = found[0]
    try:
        integer(value)
    except CommandError:
        return replies.bulk(b"embstr" if len(value) <= EMBEDDED_BYTES_MAX else b"raw")
    return replies.bulk(b"int")


def _idle_s(key: bytes, found: Any, context: Context) -> bytes:
    return replies.number(max(0, context.now_ms - found[3]) // 1000)


def _usage(words: list[bytes], context: Context) -> Plan:
    """MEMORY USAGE. SAMPLES applies to values with several elements, and no value here has any."""
    if len(words) > 3 and (len(words) != 5 or words[3].upper() != b"SAMPLES" or integer(words[4]) < 0):
        raise CommandError("ERR syntax error")
    return _about_key(Meta, lambda key, found, _: replies.number(len(key) + found[0]))(words, context)


_object = subcommands(
    "OBJECT",
    {
        "ENCODING": (3, 3, _about_key(Get, _encoding)),
        "IDLETIME": (3, 3, _about_key(Meta, _idle_s)),
        "REFCOUNT": (3, 3, _about_key(Meta, lambda key, found, context: replies.ONE)),
    },
    "; access frequency is not tracked",
)
_memory = subcommands("MEMORY", {"USAGE": (3, 5, _usage)}, "; the metrics of the HTTP port show the memory of a node")


async def rename(atomic: Atomic, words: Words) -> bytes:
    """RENAME key newkey, RENAMENX key newkey."""
    source, target, only_new = check_key(words[1]), check_key(words[2]), words[0].upper() == b"RENAMENX"

    def decide(found: KeyState) -> Rewrite | bytes:
        if not found.version:
            raise CommandError("ERR no such key")
        if source == target:
            return replies.ZERO if only_new else replies.OK
        if only_new and found.is_other_there:
            return replies.ZERO
        flags = _IF_ABSENT if only_new else 0
        ops = (commands.Delete(source, _IF_VERSION, found.version), *_moved(found, target, flags))
        return Rewrite(ops, replies.ONE if only_new else replies.OK)

    return await rewrite(atomic, source, decide, target)


async def copy(atomic: Atomic, words: Words) -> bytes:
    """COPY source destination [DB 0] [REPLACE]."""
    source, target, options = check_key(words[1]), check_key(words[2]), [word.upper() for word in words[3:]]
    replaces = b"REPLACE" in options
    if replaces:
        options.remove(b"REPLACE")
    if options not in ([], [b"DB", b"0"]):
        raise CommandError("ERR DB index is out of range" if options[:1] == [b"DB"] else "ERR syntax error")
    if source == target:
        raise CommandError("ERR source and destination objects are the same")

    def decide(found: KeyState) -> Rewrite | bytes:
        if not found.version or (found.is_other_there and not replaces):
            return replies.ZERO
        check = commands.Check(source, _IF_VERSION, found.version)
        ops = (check, *_moved(found, target, 0 if replaces else _IF_ABSENT))
        return Rewrite(ops, replies.ONE)

    return await rewrite(atomic, source, decide, target)


# docs/protocol.md N4
def _moved(found: KeyState, target: bytes, flags: int) -> tuple[Op, ...]:
    """Return the operations that write the value under another key with the same expiry. If the value has no expiry,
    neither does the copy, whatever default expiry the namespace gives to new keys."""
    put = commands.Put(target, found.value, found.expires_ms, flags)
    return (put,) if found.expires_ms else (put, commands.Expire(target, 0))


_SECOND = KeyPositions(2, 2, 1)
_BOTH_KEYS = f"{ONE_PARTITION} {READS_FIRST}"
_RECORD_TIME = "Expiry follows the [record time](../how-to/keep-clocks-right.md)."
_SERVER_TIME = "Computed with the clock of the node that replies."

FAMILY = Family(
    "Keys and expiry",
    "generic",
    (
        writes("DEL", "Delete keys.", _delete, 2, 0, ALL_KEYS, NOT_ATOMIC),
        writes("UNLINK", "Delete keys, as DEL does.", _delete, 2, 0, ALL_KEYS, NOT_ATOMIC),
        reads("EXISTS", "Return the number of keys that exist.", _exists, 2, 0, ALL_KEYS, NOT_ATOMIC),
        reads("TOUCH", "Return the number of keys that exist, as EXISTS does.", _exists, 2, 0, ALL_KEYS, NOT_ATOMIC),
        reads("TYPE", "Return the type of a value: string or none.", _type, 2, 2),
        reads(
            "OBJECT",
            "Show how a key is stored (ENCODING, IDLETIME, REFCOUNT).",
            _object,
            2,
            3,
            _SECOND,
            "ENCODING is what Redis would report, IDLETIME counts from the last write, REFCOUNT is 1.",
        ),
        reads(
            "MEMORY",
            "Return the memory usage of a key (USAGE).",
            _memory,
            2,
            5,
            _SECOND,
            "USAGE is the size in bytes of the key and its value, for one copy.",
        ),
        writes("EXPIRE", "Set the time to live in seconds.", _expire(1000, True), 3, OPTIONS_MAX, differs=_RECORD_TIME),
        writes(
            "PEXPIRE", "Set the time to live in milliseconds.", _expire(1, True), 3, OPTIONS_MAX, differs=_RECORD_TIME
        ),
        writes(
            "EXPIREAT",
            "Set the expiry as a Unix time in seconds.",
            _expire(1000, False),
            3,
            OPTIONS_MAX,
            differs=_RECORD_TIME,
        ),
        writes(
            "PEXPIREAT",
            "Set the expiry as a Unix time in milliseconds.",
            _expire(1, False),
            3,
            OPTIONS_MAX,
            differs=_RECORD_TIME,
        ),
        writes("PERSIST", "Remove the expiry of a key.", _persist, 2, 2),
        reads("TTL", "Return the time to live in seconds.", _ttl(1000), 2, 2, differs=_SERVER_TIME),
        reads("PTTL", "Return the time to live in milliseconds.", _ttl(1), 2, 2, differs=_SERVER_TIME),
        reads("EXPIRETIME", "Return the expiry as a Unix time in seconds.", _expires_at(1000), 2, 2),
        reads("PEXPIRETIME", "Return the expiry as a Unix time in milliseconds.", _expires_at(1), 2, 2),
        writes("RENAME", "Rename a key and keep its expiry.", rewriting(rename), 3, 3, TWO_KEYS, _BOTH_KEYS),
        writes(
            "RENAMENX", "Rename a key if the new name does not exist.", rewriting(rename), 3, 3, TWO_KEYS, _BOTH_KEYS
        ),
        writes("COPY", "Copy a value and its expiry to another key.", rewriting(copy), 3, 6, TWO_KEYS, _BOTH_KEYS),
    ),
)
