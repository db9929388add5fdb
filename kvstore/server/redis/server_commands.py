"""The Redis commands about more than keys: what each does with its connection. Nothing else of the connection is in
flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvstore.errors import StoreError, Unavailable
from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state.commands import Level, Op
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.ring.hashing import TOKENS
from kvstore.server.redis import replies, session
from kvstore.server.redis.commands import FROM_BROWSERS, CommandError, check_pattern, integer
from kvstore.server.redis.gather import REPLY_BYTES_MAX
from kvstore.server.redis.rereads import transaction_bytes
from kvstore.server.routing import keys

if TYPE_CHECKING:
    from kvstore.server.redis.connection import RespConnection
    from kvstore.types import PartitionId

log = logging.getLogger(__name__)

WITHIN_MULTI = frozenset({b"EXEC", b"DISCARD", b"MULTI", b"QUIT", b"RESET"})
"""What is not queued in a transaction."""
KEYS_MAX = 100_000
"""KEYS of a larger store is refused: it would hold all of them in memory at once."""
SCAN_COUNT_MAX = 10_000
_CURSOR_MAX = (1 << 64) - 1

Words = list[bytes]


def reply_bytes(connection: RespConnection, name: str, words: Words) -> int:
    """What a Special may take for its reply, keys or values and what is made of them. Raises CommandError."""
    match name:
        case "EXEC":
            return transaction_bytes(connection.session.queued or (), BATCH_RESULT_BYTES_MAX)
        case "KEYS":
            return 2 * REPLY_BYTES_MAX
        case "SCAN":
            _cursor(words)
            return 2 * min(_scan_options(words[2:])[0] * KEY_BYTES_MAX, keys.SCAN_BYTES_MAX)
        case _:
            return 0


def do(connection: RespConnection, name: str, words: Words) -> None:
    """Carry out a Special. Raises CommandError."""
    _SPECIALS[name](connection, words)


async def reply_of(work: Coroutine[Any, Any, bytes], client: str) -> bytes:
    """What a command's work returns, or its error as a reply."""
    try:
        return await work
    except CommandError as error:
        return replies.error(str(error))
    except StoreError as error:
        return replies.failure(error)
    except Exception:  # the root of a task: a client's command must not end the server
        log.exception("a command of %s failed", client)
        return replies.error("ERR internal error; see the server's log")


def _replying(make: Callable[[RespConnection, Words], bytes]) -> Callable[[RespConnection, Words], None]:
    return lambda connection, words: connection.reply(make(connection, words))


def _hello(connection: RespConnection, words: Words) -> None:
    reply = connection.session.hello(words)
    connection.use_protocol()
    connection.reply(reply)


def _reset(connection: RespConnection, words: Words) -> None:
    connection.session.reset()
    connection.use_protocol()
    connection.reply(replies.status("RESET"))


def _client(connection: RespConnection, words: Words) -> None:
    if words[1].upper() == b"LIST" and len(words) == 2:
        connection.run_alone(connection.server.clients.take())
    else:
        connection.reply(connection.session.client(words, connection.address))


def _info(connection: RespConnection, words: Words) -> None:
    async def work() -> bytes:
        return session.info(words, await connection.server.info.take())

    connection.run_alone(work())


def _in_turn(make: Callable[[RespConnection, Words], bytes]) -> Callable[[RespConnection, Words], None]:
    """A reply so much larger than its command that one turn of the event loop makes only one for a connection."""

    def do(connection: RespConnection, words: Words) -> None:
        async def work() -> bytes:
            return make(connection, words)

        connection.run_alone(work())

    return do


def _exec(connection: RespConnection, words: Words) -> None:
    connection.perform(connection.session.execute(connection.server.owner_of))


def _readonly(level: Level) -> Callable[[RespConnection, Words], bytes]:
    def make(connection: RespConnection, words: Words) -> bytes:
        connection.session.level = int(level)
        return replies.OK

    return make


def _asking(connection: RespConnection) -> keys.Ask:
    """Asks on behalf of a client for as long as that is there: a walk is long, and what it holds is no more counted
    when the client is gone."""

    async def ask(op: Op, partition: PartitionId) -> Any:
        if connection.is_gone:
            raise Unavailable("the client is gone")
        return await connection.server.ask(op, partition)

    return ask


def _dbsize(connection: RespConnection, words: Words) -> None:
    async def work() -> bytes:
        server = connection.server
        return replies.number(await keys.count_keys(server.ask, lambda: server.ring, connection.session.level))

    connection.run_alone(work())


def _keys(connection: RespConnection, words: Words) -> None:
    pattern = check_pattern(words[1])

    async def work() -> bytes:
        server, level = connection.server, connection.session.level
        there = await keys.count_keys(server.ask, lambda: server.ring, level)
        if there > KEYS_MAX:
            raise CommandError(f"ERR KEYS is refused with {there} keys (at most {KEYS_MAX}): use SCAN")
        matches = keys.matcher(pattern)
        ask = _asking(connection)
        found = await keys.all_keys(ask, lambda: server.ring, level, matches=matches, bytes_max=REPLY_BYTES_MAX)
        return replies.bulks(found)

    connection.run_alone(work())


def _scan(connection: RespConnection, words: Words) -> None:
    cursor = _cursor(words)
    count, pattern, wants_strings = _scan_options(words[2:])

    async def work() -> bytes:
        server, matches = connection.server, keys.matcher(pattern)
        ask, after, found = _asking(connection), 0, list[bytes]()
        if cursor < TOKENS and wants_strings:
            after, found = await keys.scan(ask, lambda: server.ring, cursor, count, connection.session.level)
        matching = await keys.matching(found, matches)
        return replies.array([replies.bulk(b"%d" % after), replies.bulks(matching)])

    connection.run_alone(work())


def _cursor(words: Words) -> int:
    if not words[1].isdigit() or len(words[1]) > 20 or int(words[1]) > _CURSOR_MAX:
        raise CommandError("ERR invalid cursor")
    return int(words[1])


def _scan_options(words: Words) -> tuple[int, bytes, bool]:
    count, pattern, wants_strings = 10, b"*", True
    for option, value in zip_longest(words[::2], words[1::2]):
        match option.upper() if value is not None else b"":
            case b"COUNT":
                count = min(integer(value), SCAN_COUNT_MAX)
                if count < 1:
                    raise CommandError("ERR syntax error")
            case b"MATCH":
                pattern = check_pattern(value)
            case b"TYPE":
                wants_strings = value.lower() == b"string"
            case _:
                raise CommandError("ERR syntax error")
    return count, pattern, wants_strings


def _hang_up(connection: RespConnection, words: Words) -> None:
    connection.server.note_browser(connection.address)
    connection.quit(b"")


_SPECIALS: dict[str, Callable[[RespConnection, Words], None]] = {
    "HELLO": _hello,
    "RESET": _reset,
    "QUIT": lambda connection, words: connection.quit(),
    **dict.fromkeys((name.decode() for name in FROM_BROWSERS), _hang_up),
    "AUTH": _replying(lambda connection, words: session.auth(words)),
    "CLIENT": _client,
    "COMMAND": _in_turn(lambda connection, words: session.command(words, connection.session.protocol)),
    "CONFIG": _in_turn(lambda connection, words: session.config(words, connection.session.protocol)),
    "INFO": _info,
    "WAIT": _replying(lambda connection, words: session.wait(words)),
    "MULTI": _replying(lambda connection, words: connection.session.multi()),
    "DISCARD": _replying(lambda connection, words: connection.session.discard()),
    "READONLY": _replying(_readonly(Level.STALE)),
    "READWRITE": _replying(_readonly(Level.LINEARIZABLE)),
    "EXEC": _exec,
    "DBSIZE": _dbsize,
    "KEYS": _keys,
    "SCAN": _scan,
    "KVSTORE.PEER": lambda connection, words: connection.become_peer(words),
}
