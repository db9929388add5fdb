"""Plain GETs that a Redis client sends together, answered before their turn where a look is enough."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state.rows import VALUE_AT
from kvstore.server.access.guard import all_begin_with
from kvstore.server.redis import replies
from kvstore.server.redis.commands import GET_WORDS
from kvstore.server.redis.parser import Words
from kvstore.server.redis.reply_queue import ReplyQueue
from kvstore.server.redis.session import Session
from kvstore.server.routing.backend import Backend


def answer_gets(
    commands: Sequence[Words],
    queue: ReplyQueue,
    session: Session,
    backend: Backend,
    readable: tuple[bytes, ...] | None,
) -> int:
    """Answer the first commands at once, as many as may be in flight; their replies are due then. Returns how many: all
    of these, or none, unless all are plain GETs of keys that the user may read, the client waits for nothing else, and
    a look at one partition is enough. `readable`: prefixes of the keys that the user may read; None: all of them."""
    number = queue.issued
    if number != queue.answered or session.level:
        return 0
    try:
        names, found = zip(*islice(commands, queue.in_flight_max), strict=True)
    except ValueError:  # of different lengths
        return 0
    keys = list(found)
    lengths = set(map(len, keys))
    if not GET_WORDS.issuperset(names) or 0 in lengths or max(lengths) > KEY_BYTES_MAX:
        return 0
    if readable is not None and not all_begin_with(readable, keys):
        return 0
    rows = backend.read_now(keys)
    if not isinstance(rows, list):
        return 0
    null = replies.NULL[session.protocol]
    values = [None if row is None else row[VALUE_AT[row[0]] :] for row in rows]
    queue.due += [null if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    queue.issued = queue.answered = number + len(rows)
    return len(rows)
