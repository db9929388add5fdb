"""The Redis commands we know: words → a plan (plans.py). Decides only: no connection, no clock, no cluster in here."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

from kvstore.errors import InvalidRequest, StoreError
from kvstore.partition.state.commands import Code, Flag, Level
from kvstore.partition.state.operations import EXPIRES_MS_MAX
from kvstore.partition.state.traits import check_options
from kvstore.server.redis import replies, tools
from kvstore.server.redis.plans import (
    INT64_MAX,
    INT64_MIN,
    Build,
    CommandError,
    Context,
    Plan,
    Reply,
    Several,
    Single,
    Special,
    check_key,
    check_value,
    first_failure,
    integer,
    part_failed,
)
from kvstore.server.redis.replies import FORMATS, Fmt
from kvstore.server.redis.unsupported import why_not

GET, META, PUT, DELETE = int(Code.GET), int(Code.META), int(Code.PUT), int(Code.DELETE)
INCREMENT, APPEND, EXPIRE = int(Code.INCREMENT), int(Code.APPEND), int(Code.EXPIRE)
OPTIONS_MAX = 32
"""Words of a command that has options, or names of what it is asked about."""
FROM_BROWSERS = (b"POST", b"HOST:")
"""How lines of HTTP begin. A web page may have a browser send anything to a port of its own machine, and among what it
sends could be our commands; so none is read after these."""


class Need(Enum):
    """Requirements of a command, where the cluster asks who its clients are (docs/design/0014)."""

    NOTHING = auto()
    """Not even a name: by these he says who he is, or leaves; or proves himself in another way."""
    LOGIN = auto()
    """To have said who he is. It tells nothing of keys, nor of others."""
    OPERATIONS = auto()
    """What each of its operations needs on its key."""
    READ_SOME = auto()
    """The right to read some keys: it shows those alone."""
    READ_ALL = auto()
    """The right to read every key."""
    WRITE_ALL = auto()
    """The right to write every key."""
    ADMIN = auto()


class Keys(NamedTuple):
    """Places of a command's keys among its words: the first, the last (negative: from the end) and the step between
    them. All 0: it has none."""

    first: int = 0
    last: int = 0
    step: int = 0


class Command(NamedTuple):
    """A command's row. `least` and `most` count its words, the name included; `most` 0: any number."""

    build: Build
    least: int
    most: int
    need: Need | Callable[[list[bytes]], Need]
    """Of the command, or of its subcommands."""
    keys: Keys = Keys()
    flag: bytes = b""
    """What clients that choose among nodes want to know: `readonly` or `write`."""

    def need_of(self, words: list[bytes]) -> Need:
        return self.need if isinstance(self.need, Need) else self.need(words)


GET_WORDS, SET_WORDS = frozenset((b"GET", b"get")), frozenset((b"SET", b"set"))
"""How clients write the two commands that have short ways (docs/design/0008): go-redis and ioredis in small letters,
most in capitals. Whatever is written otherwise goes the long way, as all other commands do."""


def plan(words: list[bytes], context: Context) -> Plan:
    """Plan a command. Raises CommandError."""
    return known(words).build(words, context)


def known(words: list[bytes]) -> Command:
    """The command, which takes so many words. Raises CommandError."""
    name = words[0].upper()
    command = COMMANDS.get(name)
    if command is None and name in FROM_BROWSERS:
        return Command(_special, 1, 0, Need.NOTHING)
    if command is None:
        arguments = "".join(f"'{word[:32].decode('utf-8', 'replace')}' " for word in words[1:9])
        shown = words[0][:64].decode("utf-8", "replace")
        raise CommandError(f"ERR unknown command '{shown}', with args beginning with: {arguments}{why_not(name)}")
    if len(words) < command.least or (command.most and len(words) > command.most):
        raise CommandError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
    return command


def _get(words: list[bytes], context: Context) -> Plan:
    return Single((GET, check_key(words[1]), context.level, 0), Fmt.VALUE)


def _meta(format_: int) -> Build:
    return lambda words, context: Single((META, check_key(words[1]), context.level, 0), format_)


def _set(words: list[bytes], context: Context) -> Plan:
    key, value = check_key(words[1]), check_value(words[2])
    if len(words) == 3:
        return Single((PUT, key, value, 0, 0, 0, None), Fmt.OK)
    expires_ms, flags = _set_options(words[3:], context.now_ms)
    if flags & Flag.RETURN_OLD:
        return Single((PUT, key, value, expires_ms, flags, 0, None), Fmt.OLD_VALUE)
    conditional = flags & (Flag.IF_ABSENT | Flag.IF_PRESENT)
    return Single((PUT, key, value, expires_ms, flags, 0, None), Fmt.OK_OR_NULL if conditional else Fmt.OK)


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
        check_options(PUT, int(flags), expires_ms=len(expiry))  # the number itself is checked below, as Redis does
    except InvalidRequest:
        raise CommandError("ERR syntax error") from None
    if not expiry:
        return 0, int(flags)
    unit_ms, relative = _SET_EXPIRY[expiry]
    return _expiry("set", time, unit_ms, relative, now_ms), int(flags | (Flag.RELATIVE_TTL if relative else 0))


def _expiry(command: str, word: bytes, unit_ms: int, relative: bool, now_ms: int) -> int:
    """A time to live or a time, in milliseconds."""
    value = integer(word) * unit_ms
    if not 0 < value <= EXPIRES_MS_MAX - (now_ms if relative else 0):
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return value


def _setnx(words: list[bytes], context: Context) -> Plan:
    op = (PUT, check_key(words[1]), check_value(words[2]), 0, int(Flag.IF_ABSENT), 0, None)
    return Single(op, Fmt.APPLIED)


def _setex(unit_ms: int, command: str) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        expires_ms, flags = _expiry(command, words[2], unit_ms, True, context.now_ms), int(Flag.RELATIVE_TTL)
        return Single((PUT, check_key(words[1]), check_value(words[3]), expires_ms, flags, 0, None), Fmt.OK)

    return build


def _getset(words: list[bytes], context: Context) -> Plan:
    op = (PUT, check_key(words[1]), check_value(words[2]), 0, int(Flag.RETURN_OLD), 0, None)
    return Single(op, Fmt.OLD_VALUE)


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
    ops = ((GET, key, int(Level.LINEARIZABLE), 0), (EXPIRE, key, expires_ms, flags, None))
    format_value = FORMATS[context.protocol][Fmt.VALUE]
    return Several(ops, lambda results: first_failure(results) or format_value(results[0]), is_atomic=True)


def _getdel(words: list[bytes], context: Context) -> Plan:
    return Single((DELETE, check_key(words[1]), int(Flag.RETURN_OLD), 0, None), Fmt.OLD_VALUE)


def _append(words: list[bytes], context: Context) -> Plan:
    return Single((APPEND, check_key(words[1]), check_value(words[2]), None), Fmt.NUMBER)


def _increment(sign: int) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        delta = sign * integer(words[2]) if len(words) == 3 else sign
        if delta > INT64_MAX:
            raise CommandError("ERR decrement would overflow")
        return Single((INCREMENT, check_key(words[1]), delta, None), Fmt.NUMBER)

    return build


_EXPIRE_FLAGS = {b"NX": Flag.IF_NO_TTL, b"XX": Flag.IF_TTL, b"GT": Flag.IF_LONGER, b"LT": Flag.IF_SHORTER}


def _expire(unit_ms: int, relative: bool) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        flags = int(Flag.RELATIVE_TTL) if relative else 0
        for word in words[3:]:
            if word.upper() not in _EXPIRE_FLAGS:
                raise CommandError(f"ERR Unsupported option {word[:32].decode('utf-8', 'replace')}")
            flags |= _EXPIRE_FLAGS[word.upper()]
        try:
            check_options(EXPIRE, flags, expires_ms=1)  # the number itself is checked below, as Redis does
        except InvalidRequest:
            first = "NX and XX, GT or LT" if flags & Flag.IF_NO_TTL else "GT and LT"
            raise CommandError(f"ERR {first} options at the same time are not compatible") from None
        value = integer(words[2]) * unit_ms
        if not INT64_MIN <= value <= EXPIRES_MS_MAX - (context.now_ms if relative else 0):
            name = words[0].decode("utf-8", "replace").lower()
            raise CommandError(f"ERR invalid expire time in '{name}' command")
        # 0 would remove the expiry; what is past already deletes the key, however long ago it was.
        if value <= 0:
            value, flags = 1, flags & ~int(Flag.RELATIVE_TTL)
        return Single((EXPIRE, check_key(words[1]), value, flags, None), Fmt.CHANGED)

    return build


def _persist(words: list[bytes], context: Context) -> Plan:
    return Single((EXPIRE, check_key(words[1]), 0, 0, None), Fmt.CHANGED)


def _expires_at(unit_ms: int) -> Build:
    def build(words: list[bytes], context: Context) -> Plan:
        def combine(results: list[Any]) -> bytes:
            (found,) = results
            if isinstance(found, StoreError):
                return replies.failure(found)
            return replies.number(-2 if found is None else found[4] // unit_ms if found[4] else -1)

        return Several([(META, check_key(words[1]), context.level, 0)], combine)

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

        return Several([(META, check_key(words[1]), context.level, 0)], combine)

    return build


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

    return Several([(GET, check_key(words[1]), context.level, 0)], combine)


def _mget(words: list[bytes], context: Context) -> Plan:
    format_value = FORMATS[context.protocol][Fmt.VALUE]
    ops = [(GET, check_key(key), context.level, 0) for key in words[1:]]
    return Several(ops, lambda results: first_failure(results) or replies.array(map(format_value, results)))


def _mset(words: list[bytes], context: Context) -> Plan:
    if len(words) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'mset' command")
    pairs = zip(words[1::2], words[2::2], strict=True)
    ops = [(PUT, check_key(key), check_value(value), 0, 0, 0, None) for key, value in pairs]
    return Several(ops, lambda results: part_failed(results) or replies.OK)


def _delete(words: list[bytes], context: Context) -> Plan:
    ops = [(DELETE, check_key(key), 0, 0, None) for key in words[1:]]
    if len(ops) == 1:
        return Single(ops[0], Fmt.DELETED)
    return Several(ops, lambda results: part_failed(results) or replies.number(sum(map(bool, results))))


def _exists(words: list[bytes], context: Context) -> Plan:
    ops = [(META, check_key(key), context.level, 0) for key in words[1:]]
    if len(ops) == 1:
        return Single(ops[0], Fmt.EXISTS)
    return Several(ops, lambda results: first_failure(results) or replies.number(len(results) - results.count(None)))


def _ping(words: list[bytes], context: Context) -> Plan:
    return Reply(replies.bulk(words[1]) if len(words) == 2 else b"+PONG\r\n")


def _echo(words: list[bytes], context: Context) -> Plan:
    return Reply(replies.bulk(words[1]))


def _select(words: list[bytes], context: Context) -> Plan:
    if integer(words[1]) != 0:
        raise CommandError("ERR DB index is out of range")
    return Reply(replies.OK)


def _time(words: list[bytes], context: Context) -> Plan:
    seconds, ms = divmod(context.now_ms, 1000)
    return Reply(replies.bulks([b"%d" % seconds, b"%d" % (ms * 1000)]))


def _special(words: list[bytes], context: Context) -> Plan:
    return Special(words[0].upper().decode(), words)


def _client_need(words: list[bytes]) -> Need:
    return Need.ADMIN if words[1].upper() == b"LIST" else Need.LOGIN


_ONE_KEY, _TWO_KEYS, _ALL_KEYS, _PAIRS = Keys(1, 1, 1), Keys(1, 2, 1), Keys(1, -1, 1), Keys(1, -1, 2)


def _reads(build: Build, least: int, most: int, keys: Keys = _ONE_KEY) -> Command:
    return Command(build, least, most, Need.OPERATIONS, keys, b"readonly")


def _writes(build: Build, least: int, most: int, keys: Keys = _ONE_KEY) -> Command:
    return Command(build, least, most, Need.OPERATIONS, keys, b"write")


COMMANDS: dict[bytes, Command] = {
    b"PING": Command(_ping, 1, 2, Need.LOGIN),
    b"ECHO": Command(_echo, 2, 2, Need.LOGIN),
    b"SELECT": Command(_select, 2, 2, Need.LOGIN),
    b"TIME": Command(_time, 1, 1, Need.LOGIN),
    b"GET": _reads(_get, 2, 2),
    b"SET": _writes(_set, 3, OPTIONS_MAX),
    b"SETNX": _writes(_setnx, 3, 3),
    b"SETEX": _writes(_setex(1000, "setex"), 4, 4),
    b"PSETEX": _writes(_setex(1, "psetex"), 4, 4),
    b"GETSET": _writes(_getset, 3, 3),
    b"GETDEL": _writes(_getdel, 2, 2),
    b"GETEX": _writes(_getex, 2, OPTIONS_MAX),
    b"GETRANGE": _reads(_getrange, 4, 4),
    b"SUBSTR": _reads(_getrange, 4, 4),
    b"MGET": _reads(_mget, 2, 0, _ALL_KEYS),
    b"MSET": _writes(_mset, 3, 0, _PAIRS),
    b"DEL": _writes(_delete, 2, 0, _ALL_KEYS),
    b"UNLINK": _writes(_delete, 2, 0, _ALL_KEYS),
    b"EXISTS": _reads(_exists, 2, 0, _ALL_KEYS),
    b"TOUCH": _reads(_exists, 2, 0, _ALL_KEYS),
    b"STRLEN": _reads(_meta(Fmt.LENGTH), 2, 2),
    b"TYPE": _reads(_meta(Fmt.TYPE), 2, 2),
    b"OBJECT": _reads(tools.object_, 2, 3, Keys(2, 2, 1)),
    b"MEMORY": _reads(tools.memory, 2, 5, Keys(2, 2, 1)),
    b"APPEND": _writes(_append, 3, 3),
    b"INCR": _writes(_increment(1), 2, 2),
    b"DECR": _writes(_increment(-1), 2, 2),
    b"INCRBY": _writes(_increment(1), 3, 3),
    b"DECRBY": _writes(_increment(-1), 3, 3),
    b"EXPIRE": _writes(_expire(1000, True), 3, OPTIONS_MAX),
    b"PEXPIRE": _writes(_expire(1, True), 3, OPTIONS_MAX),
    b"EXPIREAT": _writes(_expire(1000, False), 3, OPTIONS_MAX),
    b"PEXPIREAT": _writes(_expire(1, False), 3, OPTIONS_MAX),
    b"PERSIST": _writes(_persist, 2, 2),
    b"TTL": _reads(_ttl(1000), 2, 2),
    b"PTTL": _reads(_ttl(1), 2, 2),
    b"EXPIRETIME": _reads(_expires_at(1000), 2, 2),
    b"PEXPIRETIME": _reads(_expires_at(1), 2, 2),
    b"SETRANGE": _writes(_special, 4, 4),
    b"INCRBYFLOAT": _writes(_special, 3, 3),
    b"RENAME": _writes(_special, 3, 3, _TWO_KEYS),
    b"RENAMENX": _writes(_special, 3, 3, _TWO_KEYS),
    b"COPY": _writes(_special, 3, 6, _TWO_KEYS),
    b"MSETNX": _writes(_special, 3, 0, _PAIRS),
    b"SCAN": Command(_special, 2, OPTIONS_MAX, Need.READ_SOME),
    b"KEYS": Command(_special, 2, 2, Need.READ_SOME),
    b"RANDOMKEY": Command(_special, 1, 1, Need.READ_SOME),
    b"DBSIZE": Command(_special, 1, 1, Need.READ_ALL),
    b"FLUSHDB": Command(_special, 1, 2, Need.WRITE_ALL, Keys(), b"write"),
    b"FLUSHALL": Command(_special, 1, 2, Need.WRITE_ALL, Keys(), b"write"),
    b"WATCH": _reads(_special, 2, 0, _ALL_KEYS),
    b"UNWATCH": Command(_special, 1, 1, Need.LOGIN),
    b"EVAL": _writes(_special, 3, OPTIONS_MAX, Keys()),
    b"EVALSHA": _writes(_special, 3, OPTIONS_MAX, Keys()),
    b"SCRIPT": Command(_special, 2, OPTIONS_MAX, Need.LOGIN),
    b"CLUSTER": Command(_special, 2, OPTIONS_MAX, Need.LOGIN),
    b"MULTI": Command(_special, 1, 1, Need.LOGIN),
    b"EXEC": Command(_special, 1, 1, Need.LOGIN),
    b"DISCARD": Command(_special, 1, 1, Need.LOGIN),
    b"HELLO": Command(_special, 1, OPTIONS_MAX, Need.NOTHING),
    b"AUTH": Command(_special, 2, 0, Need.NOTHING),
    b"ACL": Command(_special, 2, OPTIONS_MAX, Need.LOGIN),
    b"CLIENT": Command(_special, 2, OPTIONS_MAX, _client_need),
    b"COMMAND": Command(_special, 1, 8 * OPTIONS_MAX, Need.LOGIN),
    b"CONFIG": Command(_special, 2, OPTIONS_MAX, Need.LOGIN),
    b"INFO": Command(_special, 1, OPTIONS_MAX, Need.LOGIN),
    b"ROLE": Command(tools.role, 1, 1, Need.LOGIN),
    b"LATENCY": Command(tools.latency, 2, OPTIONS_MAX, Need.LOGIN),
    b"MODULE": Command(tools.module, 2, OPTIONS_MAX, Need.LOGIN),
    b"SLOWLOG": Command(_special, 2, 3, Need.ADMIN),
    b"READONLY": Command(_special, 1, 1, Need.LOGIN),
    b"READWRITE": Command(_special, 1, 1, Need.LOGIN),
    b"WAIT": Command(_special, 3, 3, Need.LOGIN),
    b"RESET": Command(_special, 1, 1, Need.NOTHING),
    b"QUIT": Command(_special, 1, 0, Need.NOTHING),
    b"KVSTORE.PEER": Command(_special, 4, 6, Need.NOTHING),
}
