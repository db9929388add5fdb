"""The Redis commands by which tools look at a server and its keys: redis-cli's own modes, exporters of metrics,
browsers of keys. What is not known here is not made up: it is empty where Redis too may have nothing, else an error
that says where to look. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.env.slow_log import KEPT, Slow
from kvstore.errors import StoreError
from kvstore.partition.state.commands import Code
from kvstore.server.redis import replies
from kvstore.server.redis.plans import Build, CommandError, Context, Plan, Reply, Several, check_key, integer

EMBEDDED_BYTES_MAX = 44
"""Redis holds so much beside the key."""
SLOW_COUNT = 10
"""Entries that SLOWLOG GET shows, unless it is told how many."""
_GET, _META = int(Code.GET), int(Code.META)
_EMPTY = replies.array([])

_Words = Sequence[bytes]
_Subcommand = tuple[int, int, Build]
"""The least and the most words of it, the command's own included, and how it is planned."""


def family(name: str, known: dict[str, _Subcommand], hint: str = "") -> Build:
    """Plan a command that is one of several by its second word. HELP, which all have, tells of them. `hint`: where to
    look for what Redis has beside them."""
    told = f"{name} has {', '.join(sorted(known))} here{hint}"

    def build(words: list[bytes], context: Context) -> Plan:
        second = words[1].upper().decode("utf-8", "replace")
        if second == "HELP" and len(words) == 2:
            return Reply(replies.array([replies.status(told)]))
        if second not in known:
            raise CommandError(f"ERR unknown subcommand. {told}")
        least, most, plan = known[second]
        if not least <= len(words) <= most:
            raise CommandError(f"ERR wrong number of arguments for '{name.lower()}|{second.lower()}' command")
        return plan(words, context)

    return build


def _about_key(code: int, show: Callable[[bytes, Any, Context], bytes]) -> Build:
    """Answer by what is known of the key in the third word; nothing, if it is absent."""

    def build(words: list[bytes], context: Context) -> Plan:
        key = check_key(words[2])

        def combine(results: list[Any]) -> bytes:
            (found,) = results
            if isinstance(found, StoreError):
                return replies.failure(found)
            return replies.NULL[context.protocol] if found is None else show(key, found, context)

        return Several([(code, key, context.level, 0)], combine)

    return build


def _says(reply: Callable[[Context], bytes]) -> Build:
    return lambda words, context: Reply(reply(context))


# ── OBJECT, MEMORY ────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """MEMORY USAGE: the bytes of key and value, one copy. SAMPLES is for values of several parts."""
    if len(words) > 3 and (len(words) != 5 or words[3].upper() != b"SAMPLES" or integer(words[4]) < 0):
        raise CommandError("ERR syntax error")
    return _about_key(_META, lambda key, found, _: replies.number(len(key) + found[0]))(words, context)


object_ = family(
    "OBJECT",
    {
        "ENCODING": (3, 3, _about_key(_GET, _encoding)),
        "IDLETIME": (3, 3, _about_key(_META, _idle_s)),
        "REFCOUNT": (3, 3, _about_key(_META, lambda key, found, context: replies.ONE)),
    },
    "; access frequency is not tracked",
)
memory = family("MEMORY", {"USAGE": (3, 5, _usage)}, "; the metrics of the HTTP port tell what a node takes")


# ── LATENCY, MODULE, ROLE ─────────────────────────────────────────────────────────────────────────────────────────────

latency = family(
    "LATENCY",
    {
        # As of a Redis whose latency-monitor-threshold is 0 and which does not track latencies.
        "LATEST": (2, 2, _says(lambda context: _EMPTY)),
        "HISTORY": (3, 3, _says(lambda context: _EMPTY)),
        "RESET": (2, 32, _says(lambda context: replies.ZERO)),
        "HISTOGRAM": (2, 32, _says(lambda context: replies.mapping({}, context.protocol))),
    },
    ", which are empty; SLOWLOG and the metrics of the HTTP port tell of latencies",
)
module = family("MODULE", {"LIST": (2, 2, _says(lambda context: _EMPTY))})


def role(words: list[bytes], context: Context) -> Plan:
    """ROLE: any node takes any command, and copies are not made by a stream that has an offset."""
    return Reply(replies.array([replies.bulk(b"master"), replies.ZERO, _EMPTY]))


# ── SLOWLOG ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_count(words: _Words) -> int:
    """How many entries SLOWLOG GET wants. Raises CommandError."""
    if len(words) == 2:
        return SLOW_COUNT
    count = integer(words[2])
    if count < -1:
        raise CommandError("ERR count should be greater than or equal to -1")
    return KEPT if count == -1 else count


def slow_entry(number: int, slow: Slow) -> bytes:
    """An entry as Redis has it: its number, date, microseconds, words, and a client, who is not known here. Of a key
    its hash stands there, as in `kvstore node slow-log`."""
    said = [slow.operation, f"at={slow.at}"]
    said += [f"{name}={value}" for name, value in (("key", slow.key), ("partition", slow.partition)) if value]
    said += [f"operations={slow.operations}"] if slow.operations > 1 else []
    words = replies.bulks(word.encode() for word in said)
    times = [replies.number(slow.date_ms // 1000), replies.number(round(slow.took_s * 1e6))]
    return replies.array([replies.number(number), *times, words, replies.bulk(b""), replies.bulk(b"")])
