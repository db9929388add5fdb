"""Fast paths for plain GET and SET (docs/design/0008). They avoid a row lookup, a plan and several function calls for
each command.

A fast path has exactly the effect of the slow path, or none. In the latter case, the slow path executes the command.
Tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import NOT_NOW, Get, Op, Put
from kvstore.partition.state.rows import VALUE_AT
from kvstore.server.access.guard import all_begin_with
from kvstore.server.redis import replies
from kvstore.server.redis.parser import Words
from kvstore.server.redis.pipeline.in_flight import InFlight
from kvstore.server.redis.pipeline.reply_queue import FORMAT_BITS, PipelineServer, ReplyQueue
from kvstore.server.redis.replies import Fmt
from kvstore.server.redis.session import RespSession

GET_WORDS, SET_WORDS = frozenset((b"GET", b"get")), frozenset((b"SET", b"set"))
"""The spellings of the two commands that clients use: go-redis and ioredis send lower case, most others upper case. Any
other spelling takes the slow path, as all other commands do."""
PLAIN_WORDS = GET_WORDS | SET_WORDS
_VALUE_FORMAT, _OK_FORMAT = Fmt.VALUE, Fmt.OK


class FastPath:
    """The fast paths for the commands of one connection."""

    def __init__(self, server: PipelineServer, session: RespSession, sink: ReplyQueue, in_flight: InFlight) -> None:
        self._server, self._session, self._sink, self._in_flight = server, session, sink, in_flight
        self._unguarded, self._redirects = server.backend, server.redirects
        self.readable: tuple[bytes, ...] | None = None
        """Prefixes of the keys that the user may read; None: all keys. Other operations go through the sink's backend,
        which checks them."""

    def begin_single(self, words: Words) -> bool:
        """Begin a plain GET or SET of a client that has nothing else in flight, unless something blocks it. If the
        backend can look up the key of a GET at once, the GET is answered. Return False if the command has not begun."""
        sink, in_flight, session = self._sink, self._in_flight, self._session
        number = sink.issued
        if (
            number != sink.answered
            or number != in_flight.accounted
            or not session.is_plain
            or session.level
            or sink.due
            or sink.is_full
            or in_flight.limit.is_full
            or in_flight.timed is not None
        ):
            return False
        count, is_set = len(words), words[0] in SET_WORDS
        key = words[1] if count > 1 else b""
        if count != 2 + is_set or not (is_set or words[0] in GET_WORDS) or not 0 < len(key) <= KEY_BYTES_MAX:
            return False
        size = len(words[2]) if is_set else 0
        if size > VALUE_BYTES_MAX:
            return False
        if self._redirects is not None and self._redirects.moved_or_none((key,)) is not None:
            return False
        rounds = in_flight.rounds
        rounds.left -= 1
        timed = in_flight.timed = rounds.begin((words,), number) if rounds.left <= 0 else None
        if is_set:
            sink.issued = number + 1
            in_flight.hazards.writes[key] = number
            in_flight.value_bytes += size
            in_flight.limit.begin(1, size)
            op = Put(key, words[2])
            sink.backend.submit((op,), sink, (number << FORMAT_BITS | _OK_FORMAT,))
            return True
        readable = self.readable
        may_read = readable is None or key.startswith(readable)
        rows = self._unguarded.read_now([key]) if may_read else NOT_NOW
        if rows is NOT_NOW:
            sink.issued = number + 1
            in_flight.hazards.reads[key] = number
            sink.rereads.reads[number] = key
            in_flight.limit.begin(1, 0)
            begin = self._unguarded.submit if may_read else sink.backend.submit
            begin((Get(key),), sink, (number << FORMAT_BITS | _VALUE_FORMAT,))
            return True
        row = rows[0]
        if row is None:
            reply = replies.NULL[session.protocol]
        else:
            value = row[VALUE_AT[row[0]] :]
            reply = b"$%d\r\n%b\r\n" % (len(value), value)
        if timed is not None:
            rounds.end(timed)
            in_flight.timed = None
        sink.issued = sink.answered = in_flight.accounted = number + 1
        sink.stream.write(reply)
        if self._sink.is_full:  # the write may have filled the socket
            self._server.reply_memory.add(sink, len(reply))
        return True

    def answer_gets(self, commands: Sequence[Words]) -> int:
        """Answer the first commands, up to the limit of commands in flight, if the backend can look up all of their
        keys at once. All of them must be plain GETs of keys that the user may read, and the client must have nothing
        in flight. Return the number of answered commands: all of these, or 0. Their replies are then due."""
        sink, session = self._sink, self._session
        number = sink.issued
        if number != sink.answered or session.level:
            return 0
        try:
            names, found = zip(*islice(commands, sink.in_flight_max), strict=True)
        except ValueError:  # commands of different lengths
            return 0
        keys = list(found)
        lengths = set(map(len, keys))
        if not GET_WORDS.issuperset(names) or 0 in lengths or max(lengths) > KEY_BYTES_MAX:
            return 0
        if self.readable is not None and not all_begin_with(self.readable, keys):
            return 0
        rows = self._unguarded.read_now(keys)
        if not isinstance(rows, list):
            return 0
        null = replies.NULL[session.protocol]
        values = [None if row is None else row[VALUE_AT[row[0]] :] for row in rows]
        sink.due += [null if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
        sink.issued = sink.answered = number + len(rows)
        return len(rows)

    def begin_puts(self, commands: Sequence[Words]) -> int:
        """Begin the first commands, up to the limit of commands in flight, in one call. All of them must be plain
        SETs that may begin. Return the number of begun commands: all of these, or 0."""
        sink, hazards = self._sink, self._in_flight.hazards
        free = sink.in_flight_max - (sink.issued - sink.answered)
        try:
            names, keys, values = zip(*islice(commands, free), strict=True)
        except ValueError:  # commands of different lengths, or none with three words
            return 0
        count = len(names)
        if not SET_WORDS.issuperset(names) or (hazards.reads and not hazards.reads.keys().isdisjoint(keys)):
            return 0
        lengths = list(map(len, keys))
        if not min(lengths) or max(lengths) > KEY_BYTES_MAX or max(map(len, values)) > VALUE_BYTES_MAX:
            return 0
        if self._redirects is not None and any(self._redirects.moved_or_none((key,)) is not None for key in keys):
            return 0
        first = sink.issued
        sink.issued = end = first + count
        hazards.writes.update(zip(keys, range(first, end), strict=True))
        self._in_flight.value_bytes += sum(map(len, values))
        ops: list[Op] = list(map(Put, keys, values))
        tokens = range(first << FORMAT_BITS | _OK_FORMAT, end << FORMAT_BITS, 1 << FORMAT_BITS)
        sink.backend.submit(ops, sink, tokens)
        return count

    def begin_plain(self, waiting: Iterator[Words]) -> Words | None:
        """Begin plain GETs and SETs one by one. Stop at the first command that is neither or that may not begin now,
        and return it. Return None if all commands have begun."""
        sink, in_flight, session, readable = self._sink, self._in_flight, self._session, self.readable
        submit, read, rereads = sink.backend.submit, self._unguarded.submit, sink.rereads.reads
        writes, reads, redirects = in_flight.hazards.writes, in_flight.hazards.reads, self._redirects
        for words in waiting:
            name, count = words[0], len(words)
            key: bytes = words[1] if count > 1 else b""
            if not session.is_plain or not 0 < len(key) <= KEY_BYTES_MAX:
                return words
            if redirects is not None and not session.level and redirects.moved_or_none((key,)) is not None:
                return words
            if count == 2 and name in GET_WORDS:
                if (writes and writes.get(key, -1) >= sink.answered) or in_flight.must_wait():
                    return words
                number = sink.issued
                sink.issued = number + 1
                reads[key] = number
                rereads[number] = key
                begin = read if readable is None or key.startswith(readable) else submit
                begin((Get(key, session.level),), sink, (number << FORMAT_BITS | _VALUE_FORMAT,))
            elif count == 3 and name in SET_WORDS and len(words[2]) <= VALUE_BYTES_MAX:
                if (reads and reads.get(key, -1) >= sink.answered) or in_flight.must_wait():
                    return words
                number = sink.issued
                sink.issued = number + 1
                writes[key] = number
                in_flight.value_bytes += len(words[2])
                op = Put(key, words[2])
                submit((op,), sink, (number << FORMAT_BITS | _OK_FORMAT,))
            else:
                return words
        return None
