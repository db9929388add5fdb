"""The Redis commands about more than keys: what each does with its connection. Nothing else of that is in
flight."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Protocol

from kvstore.access import Right
from kvstore.env.networks import network_of
from kvstore.env.slow_log import SlowLog
from kvstore.errors import AccessUnfounded, NotAuthenticated, StoreError, Unavailable
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.namespaces.rates import Rates
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Level, Op
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.ring.hashing import TOKENS
from kvstore.ring.ring import Ring
from kvstore.server.access.audit import Caller
from kvstore.server.access.changes import Changes
from kvstore.server.access.identities import Access, Identity
from kvstore.server.access.logins import Logins
from kvstore.server.redis import replies, scan_words, session, tools
from kvstore.server.redis.cluster import cluster
from kvstore.server.redis.commands import FROM_BROWSERS
from kvstore.server.redis.fresh import Fresh
from kvstore.server.redis.gate import NOAUTH_HELLO, Gate
from kvstore.server.redis.gather import REPLY_BYTES_MAX
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, Plan, check_key, check_pattern
from kvstore.server.redis.reply_queue import ReplyQueue
from kvstore.server.redis.rereads import transaction_bytes
from kvstore.server.redis.rewrites import REWRITES, Ask
from kvstore.server.redis.scripts import Scripts, key_and_arguments
from kvstore.server.routing import keys
from kvstore.server.routing.ask import ask
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

WITHIN_MULTI = frozenset({b"EXEC", b"DISCARD", b"MULTI", b"QUIT", b"RESET", b"WATCH"})
"""What is not queued in a transaction."""
KEYS_MAX = 100_000
"""KEYS of a larger store is refused: it would hold all of them in memory at once."""
_SLOW_LOG = "SLOWLOG has GET [count], LEN and RESET here: `kvstore node slow-log` has more of each"


class Server(Protocol):
    """The server, as far as commands ask about it or of it: kvstore.server.redis.door.RespServer."""

    clients: Fresh[bytes]
    info: Fresh[session.Facts]
    access: Access
    logins: Logins
    scripts: Scripts
    id: ServerId
    random: Random
    backend: Backend
    allows_flush: bool
    slow: SlowLog
    changes: Changes
    scans: ScanSlots
    rates: Callable[[], Rates | None]

    @property
    def ring(self) -> Ring: ...
    def owner_of(self, key: bytes) -> PartitionId: ...
    def ask(self, op: Op, partition: PartitionId) -> Awaitable[Any]: ...
    def note_browser(self, address: str) -> None: ...


class Client(Protocol):
    """The connection that they came on: kvstore.server.redis.connection.RespConnection."""

    @property
    def address(self) -> str: ...
    @property
    def host(self) -> str:
        """The same without its port."""
        ...

    def identity_of_certificate(self) -> Identity | None:
        """The user whom its certificate names."""
        ...

    def entered(self) -> None:
        """Its user has logged in."""
        ...

    def become_peer(self, words: Words) -> None:
        """Give the connection to another server's link. Raises CommandError."""
        ...


class Performer(Protocol):
    """Carries out a client's commands, one after the other: kvstore.server.redis.pipeline.Pipeline."""

    session: session.Session
    replies: ReplyQueue
    gate: Gate | None

    @property
    def server(self) -> Server: ...
    @property
    def client(self) -> Client: ...
    def perform(self, found: Plan) -> bool: ...
    def guard(self, identity: Identity | None) -> None:
        """Let this user do what he may from now on."""
        ...

    def run_alone(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Answer with what `work` returns; nothing else is begun meanwhile."""
        ...

    def quit(self, farewell: bytes = ...) -> None:
        """Say goodbye; what came after is not read."""
        ...


def reply_bytes(pipeline: Performer, name: str, words: Words) -> int:
    """Return the bytes that a Special may take for its reply, keys or values and what is made of them. Raises
    CommandError."""
    match name:
        case "EXEC":
            return transaction_bytes(pipeline.session.queued or (), BATCH_RESULT_BYTES_MAX)
        case "KEYS":
            return 2 * REPLY_BYTES_MAX
        case "SETRANGE" | "INCRBYFLOAT" | "RENAME" | "RENAMENX" | "COPY" | "EVAL" | "EVALSHA":
            return VALUE_BYTES_MAX
        case "SCAN":
            scan_words.cursor_of(words)
            return 2 * min(scan_words.options_of(words[2:])[0] * KEY_BYTES_MAX, keys.SCAN_BYTES_MAX)
        case _:
            return 0


def do(pipeline: Performer, name: str, words: Words) -> None:
    """Carry out a Special. Raises CommandError."""
    _SPECIALS[name](pipeline, words)


async def reply_of(work: Coroutine[Any, Any, bytes], client: str) -> bytes:
    """Return the result of a command's work, or its error as a reply."""
    try:
        return await work
    except CommandError as error:
        return replies.error(str(error))
    except StoreError as error:
        return replies.failure(error)
    except Exception:  # the root of a task: a client's command must not end the server
        log.exception("a command of %s failed", client)
        return replies.error("ERR internal error; see the server's log")


def _replying(make: Callable[[Performer, Words], bytes]) -> Callable[[Performer, Words], None]:
    return lambda pipeline, words: pipeline.replies.reply(make(pipeline, words))


def _hello(pipeline: Performer, words: Words) -> None:
    if not pipeline.server.access.is_on:
        return _greet(pipeline, words, is_checked=False)
    credentials = session.credentials_of_hello(words)
    if credentials is not None:
        pipeline.run_alone(_log_in(pipeline, credentials, words))
    elif pipeline.session.identity is None:
        access = pipeline.server.access
        raise CommandError(f"NOAUTH {access.nobody.why_unknown}" if access.is_unfounded else NOAUTH_HELLO)
    else:
        _greet(pipeline, words, is_checked=True)
    return None


def _greet(pipeline: Performer, words: Words, *, is_checked: bool) -> None:
    reply = pipeline.session.hello(words, is_checked=is_checked)
    pipeline.replies.use_protocol(pipeline.session.protocol)
    pipeline.replies.reply(reply)


async def _log_in(pipeline: Performer, credentials: tuple[str, bytes], hello: Words | None = None) -> bytes:
    """Log in, and answer AUTH or HELLO. Raises CommandError, Overloaded."""
    server, address = pipeline.server, network_of(pipeline.client.host)
    try:
        identity = await server.logins.login(*credentials, address)
    except NotAuthenticated as error:
        word = "NOAUTH" if isinstance(error, AccessUnfounded) else "WRONGPASS"
        raise CommandError(f"{word} {error}") from None
    reply = replies.OK if hello is None else pipeline.session.hello(hello, is_checked=True)
    pipeline.guard(identity)
    pipeline.client.entered()
    if hello is not None:
        pipeline.replies.use_protocol(pipeline.session.protocol)
    return reply


def _auth(pipeline: Performer, words: Words) -> None:
    if pipeline.server.access.is_on:
        pipeline.run_alone(_log_in(pipeline, session.credentials_of_auth(words)))
    else:
        pipeline.replies.reply(session.auth(words))


def _acl(pipeline: Performer, words: Words) -> bytes:
    identity = pipeline.session.identity if pipeline.server.access.is_on else None
    return session.acl(words, session.DEFAULT_USER if identity is None else identity.name)


def _reset(pipeline: Performer, words: Words) -> None:
    pipeline.session.reset()
    pipeline.guard(pipeline.client.identity_of_certificate())
    pipeline.replies.use_protocol(pipeline.session.protocol)
    pipeline.replies.reply(replies.status("RESET"))


def _shown(pipeline: Performer, found: list[bytes]) -> list[bytes]:
    """Return those of the keys that the user may read."""
    if pipeline.gate is None:
        return found
    prefixes = pipeline.gate.identity.permissions.read
    return [key for key in found if key.startswith(prefixes)]


def _is_shown(pipeline: Performer, key: bytes) -> bool:
    return bool(_shown(pipeline, [key]))


def _may_count(pipeline: Performer) -> bool:
    """Whether the user may hear how many keys there are: users may that may read all of them."""
    return pipeline.gate is None or pipeline.gate.identity.permissions.may_all(Right.READ, b"", b"")


def _client(pipeline: Performer, words: Words) -> None:
    if words[1].upper() == b"LIST" and len(words) == 2:
        pipeline.run_alone(pipeline.server.clients.take())
    else:
        pipeline.replies.reply(pipeline.session.client(words, pipeline.client.address))


def _info(pipeline: Performer, words: Words) -> None:
    async def work() -> bytes:
        server, told = pipeline.server, await pipeline.server.info.take()
        if session.wants_section(words, "Keyspace") and _may_count(pipeline):
            with suppress(StoreError):  # what has no replica that answers keeps nobody from the rest
                there = await keys.count_keys(server.ask, lambda: server.ring, Level.STALE)
                if _may_count(pipeline):  # still
                    told = {**told, "Keyspace": {"db0": f"keys={there}"}}
        return session.info(words, told)

    pipeline.run_alone(work())


def _in_turn(make: Callable[[Performer, Words], bytes]) -> Callable[[Performer, Words], None]:
    """A reply so much larger than its command that one turn of the event loop makes only one for a pipeline."""

    def do(pipeline: Performer, words: Words) -> None:
        async def work() -> bytes:
            return make(pipeline, words)

        pipeline.run_alone(work())

    return do


def _slow_log(pipeline: Performer, words: Words) -> None:
    async def reset() -> bytes:
        pipeline.server.slow.clear()
        return replies.OK

    if len(words) == 2 and words[1].upper() == b"RESET":
        return _change(pipeline, "SLOWLOG RESET", reset)
    return _in_turn(_shown_slow_log)(pipeline, words)


def _shown_slow_log(pipeline: Performer, words: Words) -> bytes:
    slow, second = pipeline.server.slow, words[1].upper()
    match second, len(words):
        case b"GET", _:
            found = slow.latest(tools.slow_count(words))
            return replies.array(tools.slow_entry(slow.noted - number, each) for number, each in enumerate(found, 1))
        case b"LEN", 2:
            return replies.number(slow.kept)
        case b"HELP", 2:
            return replies.array([replies.status(_SLOW_LOG)])
        case _:
            raise CommandError(f"ERR unknown subcommand or wrong arguments. {_SLOW_LOG}")


def _config(pipeline: Performer, words: Words) -> bytes:
    slow_us = pipeline.server.slow.slow_ms * 1000 or -1
    return session.config(words, pipeline.session.protocol, {b"slowlog-log-slower-than": b"%d" % slow_us})


def _exec(pipeline: Performer, words: Words) -> None:
    pipeline.perform(pipeline.session.execute(pipeline.server.owner_of))


def _readonly(level: Level) -> Callable[[Performer, Words], bytes]:
    def make(pipeline: Performer, words: Words) -> bytes:
        pipeline.session.choose_level(level)
        return replies.OK

    return make


def _asking(pipeline: Performer, words: Words, *, as_user: bool = False) -> keys.Ask:
    """Asks on behalf of a client for as long as that is there and may do the command: a walk is long, and a right that
    is taken away ends it. `as_user`: each operation by what its user may do then."""

    async def asking(op: Op, partition: PartitionId) -> Any:
        if pipeline.replies.is_gone:
            raise Unavailable("the client is gone")
        if as_user:
            return await ask(pipeline.replies.backend, op, partition)
        _check_again(pipeline, words)
        return await pipeline.server.ask(op, partition)

    return asking


def _check_again(pipeline: Performer, words: Words) -> None:
    """Raise CommandError if the user may not ask any more: what was found is told only to users that may ask for it."""
    if pipeline.gate is not None:
        pipeline.gate.check(words)


def _traverse(pipeline: Performer, work: Callable[[], Awaitable[bytes]]) -> None:
    """Reply with what `work` finds in all partitions: one of few at once in all and of one user, as scans of the other
    endpoints, and charged to the rates of the namespaces in which the user's keys begin."""
    gate, server = pipeline.gate, pipeline.server

    async def admitted() -> bytes:
        async with server.scans.place("" if gate is None else gate.identity.name):
            rates, starts = server.rates(), [start for start, _ in _spans(pipeline)]
            if rates is not None and (refusal := rates.refusal_or_none(starts)) is not None:
                raise refusal
            return await work()

    pipeline.run_alone(admitted())


def _spans(pipeline: Performer) -> keys.Spans:
    """Return the ranges of keys that the user may read."""
    return keys.ALL_KEYS if pipeline.gate is None else pipeline.gate.identity.permissions.ranges[Right.READ].spans


def _dbsize(pipeline: Performer, words: Words) -> None:
    async def work() -> bytes:
        server, ask = pipeline.server, _asking(pipeline, words)
        found = await keys.count_keys(ask, lambda: server.ring, pipeline.session.level)
        _check_again(pipeline, words)
        return replies.number(found)

    _traverse(pipeline, work)


def _keys(pipeline: Performer, words: Words) -> None:
    pattern = check_pattern(words[1])
    fits, prefix = keys.matcher(pattern), keys.literal_prefix(pattern)

    async def some(ask: keys.Ask, spans: keys.Spans) -> list[bytes]:
        """By their prefixes: keys of others are not looked at, and do not count."""
        server, level = pipeline.server, pipeline.session.level
        found, is_complete = await keys.keys_in(
            *(ask, lambda: server.ring, spans, level), keys_max=KEYS_MAX, bytes_max=REPLY_BYTES_MAX, matches=fits
        )
        if not is_complete and sum(map(len, found)) > REPLY_BYTES_MAX:
            raise CommandError(f"ERR the reply would be larger than {REPLY_BYTES_MAX} bytes: use SCAN")
        if not is_complete:
            raise CommandError(f"ERR KEYS is refused with more than {KEYS_MAX} keys of this prefix: use SCAN")
        return found

    async def work() -> bytes:
        server, level, ask = pipeline.server, pipeline.session.level, _asking(pipeline, words)
        spans = keys.within(_spans(pipeline), prefix)
        if tuple(spans) != tuple(keys.ALL_KEYS):
            found = await some(ask, spans)
        else:
            there = await keys.count_keys(ask, lambda: server.ring, level)
            if there > KEYS_MAX:
                raise CommandError(f"ERR KEYS is refused with {there} keys (at most {KEYS_MAX}): use SCAN")
            found = await keys.all_keys(ask, lambda: server.ring, level, matches=fits, bytes_max=REPLY_BYTES_MAX)
        _check_again(pipeline, words)
        return replies.bulks(_shown(pipeline, found))

    _traverse(pipeline, work)


def _scan(pipeline: Performer, words: Words) -> None:
    cursor = scan_words.cursor_of(words)
    count, pattern, wants_strings = scan_words.options_of(words[2:])

    async def work() -> bytes:
        server, matches = pipeline.server, keys.matcher(pattern)
        ask, after, found = _asking(pipeline, words), 0, list[bytes]()
        if cursor < TOKENS and wants_strings:
            level = pipeline.session.level
            if _may_count(pipeline):
                after, found = await keys.scan(ask, lambda: server.ring, cursor, count, level)
            else:
                is_shown, spans = partial(_is_shown, pipeline), _spans(pipeline)
                after, found = await keys.scan_shown(
                    ask, lambda: server.ring, cursor, count, level, shown=is_shown, spans=spans
                )
        matching = await keys.matching(_shown(pipeline, found), matches)
        _check_again(pipeline, words)
        return replies.array([replies.bulk(b"%d" % after), replies.bulks(_shown(pipeline, matching))])

    _traverse(pipeline, work)


def _random_key(pipeline: Performer, words: Words) -> None:
    """The first key behind a random place of the ring, so a key is the likelier the larger the gap before it. If none
    of the next keys is the user's, one of his own, found by its prefix: the keys of others cost nothing."""
    start, protocol = pipeline.server.random.randrange(TOKENS), pipeline.session.protocol

    async def near(ask: keys.Ask) -> list[bytes]:
        server, level = pipeline.server, pipeline.session.level
        count = 1 if _may_count(pipeline) else keys.FIRST_PAGE_KEYS
        after, found = await keys.scan(ask, lambda: server.ring, start, count, level)
        if not found and not after:
            _, found = await keys.scan(ask, lambda: server.ring, 0, count, level)
        _check_again(pipeline, words)
        return _shown(pipeline, found)

    async def own(ask: keys.Ask) -> list[bytes]:
        server, spans = pipeline.server, _spans(pipeline)
        for span in server.random.sample(spans, len(spans)):
            found, _ = await keys.keys_in(
                *(ask, lambda: server.ring, (span,), pipeline.session.level),
                keys_max=keys.SEEK_KEYS_MAX,
                bytes_max=keys.SCAN_BYTES_MAX,
            )
            _check_again(pipeline, words)
            if shown := _shown(pipeline, found):
                return shown
        return []

    async def work() -> bytes:
        ask = _asking(pipeline, words)
        if shown := await near(ask):
            return replies.bulk(shown[0])
        if shown := await own(ask):
            return replies.bulk(pipeline.server.random.choice(shown))
        return replies.NULL[protocol]

    _traverse(pipeline, work)


def _flush(pipeline: Performer, words: Words) -> None:
    """FLUSHDB, FLUSHALL: a delete of everything in each partition, one after the other."""
    if not pipeline.server.allows_flush:
        raise CommandError(f"ERR {words[0].upper().decode()} is refused here; [server] redis_flush = true allows it")
    if len(words) == 2 and words[1].upper() not in (b"SYNC", b"ASYNC"):
        raise CommandError("ERR syntax error")

    async def work() -> bytes:
        await keys.delete_all(_asking(pipeline, words, as_user=True), lambda: pipeline.server.ring)
        return replies.OK

    _change(pipeline, words[0].upper().decode(), work)


def _change(pipeline: Performer, call: str, work: Callable[[], Awaitable[bytes]]) -> None:
    """Carry out an administrative change; `work` returns the reply."""
    identity = pipeline.session.identity
    by = Caller("" if identity is None else identity.who, pipeline.client.address)
    pipeline.run_alone(pipeline.server.changes.make(by, call, work))


def _ask(pipeline: Performer) -> Ask:
    """Asks what the user may ask then: a command may ask more than once, and wait in between."""

    async def asking(op: Op, partition: PartitionId | None = None) -> Any:
        return await ask(pipeline.replies.backend, op, partition)

    return asking


def _rewrite(pipeline: Performer, words: Words) -> None:
    command = REWRITES[words[0].upper().decode()]
    pipeline.run_alone(command(_ask(pipeline), words, pipeline.server.owner_of))


def _watch(pipeline: Performer, words: Words) -> None:
    named = list(dict.fromkeys(map(check_key, words[1:])))
    pipeline.session.check_watch(named)

    async def work() -> bytes:
        for key in named:
            found = await _ask(pipeline)(commands.meta(key))
            pipeline.session.watch(key, 0 if found is None else found[1])
        return replies.OK

    pipeline.run_alone(work())


def _unwatch(pipeline: Performer, words: Words) -> bytes:
    pipeline.session.unwatch()
    return replies.OK


def _eval(pipeline: Performer, words: Words) -> None:
    scripts = pipeline.server.scripts
    action = scripts.find(words[1]) if words[0].upper() == b"EVALSHA" else scripts.load(words[1])[1]
    pipeline.run_alone(action(_ask(pipeline), *key_and_arguments(words)))


def _cluster(pipeline: Performer, words: Words) -> bytes:
    server = pipeline.server
    return cluster(words, server.backend.topology.servers, server.id, pipeline.session.protocol)


def _hang_up(pipeline: Performer, words: Words) -> None:
    pipeline.server.note_browser(pipeline.client.address)
    pipeline.quit(b"")


_SPECIALS: dict[str, Callable[[Performer, Words], None]] = {
    "HELLO": _hello,
    "RESET": _reset,
    "QUIT": lambda pipeline, words: pipeline.quit(),
    **dict.fromkeys((name.decode() for name in FROM_BROWSERS), _hang_up),
    "AUTH": _auth,
    "ACL": _replying(_acl),
    "CLIENT": _client,
    "COMMAND": _in_turn(lambda pipeline, words: session.command(words, pipeline.session.protocol)),
    "CONFIG": _in_turn(_config),
    "SLOWLOG": _slow_log,
    "INFO": _info,
    "WAIT": _replying(lambda pipeline, words: session.wait(words)),
    "MULTI": _replying(lambda pipeline, words: pipeline.session.multi()),
    "DISCARD": _replying(lambda pipeline, words: pipeline.session.discard()),
    "READONLY": _replying(_readonly(Level.STALE)),
    "READWRITE": _replying(_readonly(Level.LINEARIZABLE)),
    "EXEC": _exec,
    "DBSIZE": _dbsize,
    "KEYS": _keys,
    "FLUSHDB": _flush,
    "FLUSHALL": _flush,
    "SCAN": _scan,
    "RANDOMKEY": _random_key,
    **dict.fromkeys(REWRITES, _rewrite),
    "WATCH": _watch,
    "UNWATCH": _replying(_unwatch),
    "EVAL": _eval,
    "EVALSHA": _eval,
    "SCRIPT": _replying(lambda pipeline, words: pipeline.server.scripts.script(words)),
    "CLUSTER": _in_turn(_cluster),
    "KVSTORE.PEER": lambda pipeline, words: pipeline.client.become_peer(words),
}
