"""Server commands: information that tools query, settings and counters.

If the server does not know something, a reply never invents it. The reply is empty where a Redis reply may be empty
too. Otherwise it is an error that says where to find the information.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kvstore.env.slow_log import KEPT, Slow
from kvstore.errors import StoreError
from kvstore.partition.state.commands import Level
from kvstore.server.redis import replies
from kvstore.server.redis.commands.asking import change, may_count
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import OPTIONS_MAX, Alone, Command, Family, in_turn, replying, subcommands
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import Build, CommandError, Context, Plan, Reply, check_pattern, integer
from kvstore.server.redis.session import Facts
from kvstore.server.routing import keys
from kvstore.server.routing.keys import matcher

ACKNOWLEDGED_REPLICAS = 1
"""Number of replicas that have an acknowledged write. The write is on disk on at least two machines, and Redis does not
count the master."""
SLOW_COUNT = 10
"""Default number of entries in the reply to SLOWLOG GET."""
_SLOW_LOG = "SLOWLOG supports GET [count], LEN and RESET here; `kvstore node slow-log` shows more of each entry"
_SETTINGS: dict[bytes, bytes] = {
    b"save": b"",
    b"appendonly": b"yes",
    b"appendfsync": b"always",
    b"maxmemory": b"0",
    b"databases": b"1",
    b"slowlog-max-len": b"%d" % KEPT,
    b"latency-monitor-threshold": b"0",
    b"latency-tracking": b"no",
}
_EMPTY = replies.array([])


def _time(words: Words, context: Context) -> Plan:
    seconds, ms = divmod(context.now_ms, 1000)
    return Reply(replies.bulks([b"%d" % seconds, b"%d" % (ms * 1000)]))


def _role(words: Words, context: Context) -> Plan:
    return Reply(replies.array([replies.bulk(b"master"), replies.ZERO, _EMPTY]))


def _wait(performer: Performer, words: Words) -> bytes:
    integer(words[1])
    try:
        timeout = integer(words[2])
    except CommandError:
        raise CommandError("ERR timeout is not an integer or out of range") from None
    if timeout < 0:
        raise CommandError("ERR timeout is negative")
    return replies.number(ACKNOWLEDGED_REPLICAS)


# ── INFO, CONFIG ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _info(performer: Performer, words: Words) -> None:
    wanted = {word.decode("utf-8", "replace").lower() for word in words[1:]}
    is_all = not wanted - {"default", "all", "everything"}

    async def work() -> bytes:
        server = performer.server
        facts = await server.info.take()
        if (is_all or "keyspace" in wanted) and may_count(performer):
            with suppress(StoreError):  # a partition without a replica that answers must not fail the other sections
                found = await keys.count_keys(server.ask, lambda: server.ring, Level.STALE)
                if may_count(performer):  # permissions may have changed meanwhile
                    facts = {**facts, "Keyspace": {"db0": f"keys={found}"}}
        return _sections({name: of for name, of in facts.items() if is_all or name.lower() in wanted})

    performer.run_alone(work())


def _sections(facts: Facts) -> bytes:
    lines: list[str] = []
    for section, values in facts.items():
        lines += [f"# {section}", *(f"{name}:{value}" for name, value in values.items()), ""]
    return replies.bulk("\r\n".join(lines).encode())


def _config(performer: Performer, words: Words) -> bytes:
    if words[1].upper() != b"GET" or len(words) < 3:
        raise CommandError("ERR CONFIG supports only GET here; change settings in the node's TOML file")
    slow_us = performer.server.slow.slow_ms * 1000 or -1
    settings = _SETTINGS | {b"slowlog-log-slower-than": b"%d" % slow_us}
    wanted = [matcher(check_pattern(word.lower())) for word in words[2:]]
    found = {key: replies.bulk(value) for key, value in settings.items() if any(matches(key) for matches in wanted)}
    return replies.mapping(found, performer.session.protocol)


# ── SLOWLOG, LATENCY, MODULE ──────────────────────────────────────────────────────────────────────────────────────────


def _slow_log(performer: Performer, words: Words) -> None:
    async def reset() -> bytes:
        performer.server.slow.clear()
        return replies.OK

    if len(words) == 2 and words[1].upper() == b"RESET":
        return change(performer, "SLOWLOG RESET", reset)
    return in_turn(_shown_slow_log).act(performer, words)


def _shown_slow_log(performer: Performer, words: Words) -> bytes:
    slow, second = performer.server.slow, words[1].upper()
    match second, len(words):
        case b"GET", _:
            found = slow.latest(slow_count(words))
            return replies.array(slow_entry(slow.noted - number, each) for number, each in enumerate(found, 1))
        case b"LEN", 2:
            return replies.number(slow.kept)
        case b"HELP", 2:
            return replies.array([replies.status(_SLOW_LOG)])
        case _:
            raise CommandError(f"ERR unknown subcommand or wrong number of arguments. {_SLOW_LOG}")


def slow_count(words: Words) -> int:
    """Return the number of entries that SLOWLOG GET shows. Raises CommandError."""
    if len(words) == 2:
        return SLOW_COUNT
    count = integer(words[2])
    if count < -1:
        raise CommandError("ERR count should be greater than or equal to -1")
    return KEPT if count == -1 else count


def slow_entry(number: int, slow: Slow) -> bytes:
    """Return an entry of the slow log in the form of Redis: number, date, microseconds, words and client. The client
    is not known here. A key appears as its hash, as in `kvstore node slow-log`."""
    fields = [slow.operation, f"at={slow.at}"]
    fields += [f"{name}={value}" for name, value in (("key", slow.key), ("partition", slow.partition)) if value]
    fields += [f"operations={slow.operations}"] if slow.operations > 1 else []
    words = replies.bulks(word.encode() for word in fields)
    times = [replies.number(slow.date_ms // 1000), replies.number(round(slow.took_s * 1e6))]
    return replies.array([replies.number(number), *times, words, replies.bulk(b""), replies.bulk(b"")])


def _replying(reply: Callable[[Context], bytes]) -> Build:
    return lambda words, context: Reply(reply(context))


_latency = subcommands(
    "LATENCY",
    {
        # As in a Redis whose latency-monitor-threshold is 0 and which does not track latencies.
        "LATEST": (2, 2, _replying(lambda context: _EMPTY)),
        "HISTORY": (3, 3, _replying(lambda context: _EMPTY)),
        "RESET": (2, 32, _replying(lambda context: replies.ZERO)),
        "HISTOGRAM": (2, 32, _replying(lambda context: replies.mapping({}, context.protocol))),
    },
    ", which are empty; see SLOWLOG and the metrics of the HTTP port for latencies",
)
_module = subcommands("MODULE", {"LIST": (2, 2, _replying(lambda context: _EMPTY))})


FAMILY = Family(
    "Server",
    "server",
    (
        Command(
            "INFO",
            "Show information about the server.",
            Alone(_info),
            1,
            OPTIONS_MAX,
            Need.LOGIN,
            differs="Describes the contacted node, except for `db0` of Keyspace: the keys of all partitions, as "
            "replicas know them, if the user may read all keys. Does not count keys with an expiry.",
        ),
        Command(
            "CONFIG",
            "Show settings (GET).",
            in_turn(_config),
            2,
            OPTIONS_MAX,
            Need.LOGIN,
            differs="SET is not supported: the node's TOML file holds the settings.",
        ),
        Command(
            "SLOWLOG",
            "Show or clear the log of slow operations.",
            Alone(_slow_log),
            2,
            3,
            Need.ADMIN,
            differs="Supports GET, LEN, RESET. Shows the log of the contacted node, with hashes in place of keys "
            "(`kvstore node slow-log` shows more), and requires the right `admin`. RESET clears the log for every "
            "reader.",
        ),
        Command(
            "TIME",
            "Return the server's time.",
            _time,
            1,
            1,
            Need.LOGIN,
            differs="In a transaction, returns the time at which TIME was queued.",
        ),
        Command(
            "ROLE",
            "Return the role of the server.",
            _role,
            1,
            1,
            Need.LOGIN,
            differs="Every node reports itself as a master without replicas.",
        ),
        Command(
            "LATENCY",
            "Show latencies.",
            _latency,
            2,
            OPTIONS_MAX,
            Need.LOGIN,
            differs="Supports HISTOGRAM, HISTORY, LATEST, RESET. All are empty, because latencies are not tracked.",
        ),
        Command(
            "MODULE",
            "List the modules.",
            _module,
            2,
            OPTIONS_MAX,
            Need.LOGIN,
            differs="Supports LIST, which is empty: there are no modules.",
        ),
        Command(
            "WAIT",
            "Return the number of replicas that have the writes.",
            replying(_wait),
            3,
            3,
            Need.LOGIN,
            differs="Returns 1 at once, because every acknowledged write is on two disks.",
        ),
    ),
)
