"""The commands of one Redis client: those under way, as many as may be together, and those that wait.

Commands are submitted as they arrive, many at once; reply_queue.py puts their replies in order. The token of a request
holds its place in that order and, in its low bits, the format of its reply. What a client may rely on from a server
that does one thing after the other is kept: an operation on a key that another one of this connection is changing, and
a command about more than keys, wait until all before are answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Protocol

from kvstore.env import Stream
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import NOT_NOW, Code, Op
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.partition.state.rows import VALUE_AT
from kvstore.server.access.guard import Guard
from kvstore.server.access.identities import Access, Identity
from kvstore.server.redis import replies, reply_queue
from kvstore.server.redis import server_commands as specials
from kvstore.server.redis.commands import GET_WORDS, SET_WORDS, plan
from kvstore.server.redis.gate import Gate
from kvstore.server.redis.gather import Gather
from kvstore.server.redis.gets import answer_gets
from kvstore.server.redis.inflight_limit import InflightLimit
from kvstore.server.redis.key_hazards import KeyHazards
from kvstore.server.redis.latency import CommandLatency, Timed
from kvstore.server.redis.parser import Unfit, Words
from kvstore.server.redis.plans import BATCH, CommandError, Context, Plan, Reply, Several, Single, Special, together
from kvstore.server.redis.replies import Fmt
from kvstore.server.redis.reply_queue import FORMAT_BITS, ReplyQueue
from kvstore.server.redis.rereads import transaction_bytes
from kvstore.server.redis.session import Session

_GET, _PUT = int(Code.GET), int(Code.PUT)
_VALUE_FORMAT, _OK_FORMAT = Fmt.VALUE, Fmt.OK

TOGETHER_MIN = 4
"""From this number on, to begin plain SETs together costs less than one by one."""


class Server(reply_queue.Server, specials.Server, Protocol):
    """Bounds and serves the commands of all connections: kvstore.server.redis.door.RespServer."""

    inflight_limit: InflightLimit
    rounds: CommandLatency
    access: Access

    def now_ms(self) -> int: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...


class Client(specials.Client, Protocol):
    """The client whose commands they are: kvstore.server.redis.connection.RespConnection."""

    def caught_up(self) -> None:
        """All that waited has begun."""
        ...


class Pipeline:
    """The commands of one connection, from when they are read until they are answered."""

    stream: Stream
    """Set when the connection is made."""

    def __init__(self, server: Server, session: Session, client: Client) -> None:
        self.server, self.session, self.client = server, session, client
        self.replies = ReplyQueue(server, session, flush=self.flush, resume=self.resume)
        self.waiting: deque[Words] = deque()
        """Commands that have been read and not begun."""
        self.is_closing = False
        """No more commands are begun: the connection ends when those in flight are answered."""
        self.is_handed_over = False
        """The connection is another server's: nothing is meant to come after the command that said so."""
        self._backend = self._unguarded = server.backend
        self._readable: tuple[bytes, ...] | None = None
        """Prefixes of the keys that the user may read; None: all of them."""
        self.gate: Gate | None = None
        """None where the cluster does not ask who its clients are."""
        self._accounted = 0
        """Commands that the limit does not count: those that are answered, or whose replies wait for others'."""
        self._value_bytes = 0
        """Values that the limit counts for this connection: those of its commands since it last had none in flight."""
        self._more_operations = 0
        """Operations that it counts beside one for each command, for as long."""
        self._inflight_limit = server.inflight_limit
        self._rounds = server.rounds
        self._timed: Timed | None = None
        self._key_hazards = KeyHazards()
        self._resume_below: int | None = None
        """There while commands wait: they go on when fewer than so many are in flight."""
        self.is_busy = False
        """A Special is being done; nothing is read meanwhile."""
        self._is_ended = False
        """The client sends no more."""

    # ── whose they are ────────────────────────────────────────────────────────────────────────────────────────────────

    def guard(self, identity: Identity | None) -> None:
        """Let this user do what he may from now on; None: a client that has not said who he is."""
        access, self.session.identity = self.server.access, identity
        self.gate, self._backend, self._readable = None, self._unguarded, None
        if access.is_on:
            who, address = identity or access.nobody, self.client.address
            self.gate = Gate(access, who, address)
            if not who.may_do_every_operation():  # what may be done is asked anew after each change of the table
                self._backend, self._readable = Guard(access, who, self._unguarded, address), who.read
        self.replies.backend = self._backend

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, commands: list[Words]) -> None:
        """Begin what has been read, or keep it for later."""
        if self._resume_below is not None:
            self.waiting.extend(commands)
        elif commands[1:] or not (commands and self._begin_lone(commands[0])):
            self._run(commands)
            if self.is_closing or self._is_ended:
                self.close_when_done()

    def _run(self, commands: Sequence[Words]) -> None:
        """Begin commands until one has to wait; that one and the rest go to the queue. Then send what is due."""
        replies, values, rounds = self.replies, self._value_bytes, self._rounds
        before = replies.issued
        rounds.left -= 1
        if rounds.left <= 0 and self._timed is None:
            self._timed = rounds.begin(commands, before)
        begun = 0
        is_free = len(commands) >= TOGETHER_MIN and self.session.queued is None and not self._inflight_limit.is_full
        if is_free and not self._is_crowded():
            if len(commands[0]) == 2:
                begun = answer_gets(commands, replies, self.session, self._unguarded, self._readable)
            else:
                begun = self._begin_puts(commands)
        self._begin_all(islice(commands, begun, None) if begun else iter(commands))
        if replies.answered == replies.issued and before == self._accounted and self._value_bytes == values:
            self._accounted = replies.issued  # all that this round has begun is answered
        else:
            self._inflight_limit.begin(replies.issued - before, self._value_bytes - values)
        if replies.due:
            self.send()

    def _begin_lone(self, words: Words) -> bool:
        """Begin a plain GET or SET of a client that waits for nothing else, where nothing can be in the way; False, and
        it has not begun, if there is more to it. Such a GET is looked up at once where that can be."""
        sink, rounds, session = self.replies, self._rounds, self.session
        number = sink.issued
        if (
            number != sink.answered
            or number != self._accounted
            or session.queued is not None
            or session.level
            or sink.due
            or sink.is_full
            or self._inflight_limit.is_full
            or self.is_closing
            or self._is_ended
            or self._timed is not None
        ):
            return False
        count, is_set = len(words), words[0] in SET_WORDS
        key = words[1] if count > 1 else b""
        if count != 2 + is_set or not (is_set or words[0] in GET_WORDS) or not 0 < len(key) <= KEY_BYTES_MAX:
            return False
        size = len(words[2]) if is_set else 0
        if size > VALUE_BYTES_MAX:
            return False
        rounds.left -= 1
        timed = self._timed = rounds.begin((words,), number) if rounds.left <= 0 else None
        if is_set:
            sink.issued = number + 1
            self._key_hazards.writes[key] = number
            self._value_bytes += size
            self._inflight_limit.begin(1, size)
            op = (_PUT, key, words[2], 0, 0, 0, None)
            self._backend.submit((op,), sink, (number << FORMAT_BITS | _OK_FORMAT,))
            return True
        readable = self._readable
        may_read = readable is None or key.startswith(readable)
        rows = self._unguarded.read_now([key]) if may_read else NOT_NOW
        if rows is NOT_NOW:
            sink.issued = number + 1
            self._key_hazards.reads[key] = number
            sink.rereads.reads[number] = key
            self._inflight_limit.begin(1, 0)
            begin = self._unguarded.submit if may_read else self._backend.submit
            begin(((_GET, key, 0, 0),), sink, (number << FORMAT_BITS | _VALUE_FORMAT,))
            return True
        row = rows[0]
        if row is None:
            reply = replies.NULL[session.protocol]
        else:
            value = row[VALUE_AT[row[0]] :]
            reply = b"$%d\r\n%b\r\n" % (len(value), value)
        if timed is not None:
            rounds.end(timed)
            self._timed = None
        sink.issued = sink.answered = self._accounted = number + 1
        self.stream.write(reply)
        if self.replies.is_full:  # by now
            self.server.reply_memory.add(sink, len(reply))
        return True

    def _begin_puts(self, commands: Sequence[Words]) -> int:
        """Begin the first commands together, as many as there is room for, if these are plain SETs and may be begun.
        Returns how many."""
        sink, reads = self.replies, self._key_hazards.reads
        room = sink.in_flight_max - (sink.issued - sink.answered)
        try:
            names, keys, values = zip(*islice(commands, room), strict=True)
        except ValueError:  # of different lengths, or none of three words
            return 0
        count = len(names)
        if not SET_WORDS.issuperset(names) or (reads and not reads.keys().isdisjoint(keys)):
            return 0
        lengths = list(map(len, keys))
        if not min(lengths) or max(lengths) > KEY_BYTES_MAX or max(map(len, values)) > VALUE_BYTES_MAX:
            return 0
        first = sink.issued
        sink.issued = end = first + count
        self._key_hazards.writes.update(zip(keys, range(first, end), strict=True))
        self._value_bytes += sum(map(len, values))
        ops: list[Op] = list(zip(repeat(_PUT), keys, values, repeat(0), repeat(0), repeat(0), repeat(None)))
        tokens = range(first << FORMAT_BITS | _OK_FORMAT, end << FORMAT_BITS, 1 << FORMAT_BITS)
        self._backend.submit(ops, sink, tokens)
        return count

    def _begin_all(self, waiting: Iterator[Words]) -> None:
        """Begin commands one by one, until one has to wait: plain GETs and SETs here, all others in `_begin`."""
        submit, read, readable, sink = self._backend.submit, self._unguarded.submit, self._readable, self.replies
        writes, reads, session = self._key_hazards.writes, self._key_hazards.reads, self.session
        rereads = sink.rereads.reads
        for words in waiting:
            name, count = words[0], len(words)
            key: bytes = words[1] if count > 1 else b""
            if count == 2 and name in GET_WORDS and session.queued is None and 0 < len(key) <= KEY_BYTES_MAX:
                if (writes and writes.get(key, -1) >= sink.answered) or self._is_crowded():
                    return self._stall(words, waiting)
                number = sink.issued
                sink.issued = number + 1
                reads[key] = number
                rereads[number] = key
                begin = read if readable is None or key.startswith(readable) else submit
                begin(((_GET, key, session.level, 0),), sink, (number << FORMAT_BITS | _VALUE_FORMAT,))
            elif (
                count == 3
                and name in SET_WORDS
                and session.queued is None
                and 0 < len(key) <= KEY_BYTES_MAX
                and len(words[2]) <= VALUE_BYTES_MAX
            ):
                if (reads and reads.get(key, -1) >= sink.answered) or self._is_crowded():
                    return self._stall(words, waiting)
                number = sink.issued
                sink.issued = number + 1
                writes[key] = number
                self._value_bytes += len(words[2])
                op = (_PUT, key, words[2], 0, 0, 0, None)
                submit((op,), sink, (number << FORMAT_BITS | _OK_FORMAT,))
            elif not self._begin(words):
                return self._stall(words, waiting)
            elif self.is_busy:
                return self._stall(None, waiting)
            elif self.is_closing or self.is_handed_over:
                return None  # nothing is meant to come after

    def _begin(self, words: Words) -> bool:
        """Begin any command. False if it has to wait, as also one that only has a reply does while nobody reads."""
        if self.replies.is_full:
            return False
        if isinstance(words, Unfit):
            self.session.spoil()
            self.replies.reply(replies.error(f"ERR {words.reason}"))
            return True
        try:
            found = self._plan(words)
            return found is None or self.perform(found)
        except CommandError as error:
            self.replies.reply(replies.error(str(error)))
            return True

    def _plan(self, words: Words) -> Plan | None:
        """Plan a command; None if it was done. Raises CommandError."""
        session = self.session
        clock = self.server.now_ms
        gate = self.gate
        if gate is not None:
            self._check(gate, words)
        if session.queued is not None:
            if words[0].upper() not in specials.WITHIN_MULTI:
                self.replies.reply(session.queue(words, clock, None if gate is None else gate.check_ops))
                return None
            session.check(words)
        return plan(words, Context(session.protocol, session.level, clock))

    def _check(self, gate: Gate, words: Words) -> None:
        try:
            gate.check(words)
        except CommandError:
            self.session.spoil()
            raise

    def perform(self, found: Plan) -> bool:
        """Carry a plan out. False if it has to wait."""
        if self.gate is not None and isinstance(found, Several):
            self.gate.check_ops(found.ops)  # none of it is done if one may not be
        match found:
            case Reply(data):
                self.replies.reply(data)
            case Single(op, format_):
                if (
                    self._is_crowded()
                    or self._key_hazards.block((op,), self.replies.answered)
                    or not self.replies.may_answer(found)
                ):
                    return False
                self._key_hazards.note((op,), self.replies.issued)
                self.replies.rereads.note(found, self.replies.issued)
                self._value_bytes += len(op[2]) if op[0] == _PUT else 0
                number = self.replies.next_number()
                self._backend.submit((op,), self.replies, (number << FORMAT_BITS | format_,))
            case Several(ops, _, is_atomic):
                if self._is_crowded(len(ops)) or self._key_hazards.block(ops, self.replies.answered):
                    return False
                if is_atomic:
                    if not self.replies.reserve(transaction_bytes((found,), BATCH_RESULT_BYTES_MAX)):
                        return False
                    found = together(found)
                rates = self.server.rates()
                if rates is not None and (refusal := rates.refusal_or_none(_keys_of(ops))) is not None:
                    self.replies.reply(replies.failure(refusal))  # none of it is done if not all may be
                    return True
                self._key_hazards.note(ops, self.replies.issued)
                self.replies.rereads.note(found, self.replies.issued)
                self._value_bytes += sum(len(op[2]) for op in ops if op[0] == _PUT)
                gathered = Gather(self.replies, self.replies.next_number(), found)
                self._more_operations += gathered.at_once - 1  # counted now: the next command looks whether it is full
                self._inflight_limit.begin(0, 0, gathered.at_once - 1)
                gathered.submit()
            case Special(name, words):
                if name == "EXEC" and self._is_crowded():
                    return False  # what it does would find no room
                if self.replies.in_flight() or not self.replies.reserve(specials.reply_bytes(self, name, words)):
                    return False
                specials.do(self, name, words)
        return True

    def _is_crowded(self, operations: int = 1) -> bool:
        """Whether a command of so many operations has to wait."""
        replies = self.replies
        in_flight = replies.issued - replies.answered
        return (
            replies.is_full
            or (self._inflight_limit.is_full and (in_flight > 0 or not self._inflight_limit.has_spare(operations)))
            or in_flight >= replies.in_flight_max
            or replies.answered < replies.rereads.below
        )

    # ── waiting and going on ──────────────────────────────────────────────────────────────────────────────────────────

    def _stall(self, words: Words | None, rest: Iterable[Words]) -> None:
        """Keep commands for later: until all are answered, or half if there were too many."""
        if words is not None:
            self.waiting.append(words)
        self.waiting.extend(rest)
        crowded = self.replies.in_flight() >= self.replies.in_flight_max
        self._resume_below = (self.replies.in_flight_max + 1) // 2 if crowded else 1
        if self._inflight_limit.is_full:
            self._inflight_limit.wait(self)
        self.stream.pause_reading()

    def resume(self) -> None:
        """Go on with what waits, if it may."""
        if self.replies.rereads.numbers:
            self.replies.read_again()
        if (
            self.replies.is_full
            or self.is_busy
            or self._resume_below is None
            or self.replies.in_flight() >= self._resume_below
        ):
            return
        if self._inflight_limit.is_full and (self.replies.in_flight() or not self._inflight_limit.has_spare()):
            return self._inflight_limit.wait(self)
        if self.replies.answered < self.replies.rereads.below:
            return
        self._key_hazards.answered(self.replies.issued, self.replies.answered)
        self.replies.widen()
        self._resume_below = None
        queue, self.waiting = self.waiting, deque()
        self._run(queue)
        if self._resume_below is None and not self.replies.is_gone:
            self.client.caught_up()

    def go_on(self) -> None:
        """All that waited has begun, and more may be read."""
        if self.is_closing or self._is_ended:
            self.close_when_done()
        else:
            self.stream.resume_reading()

    def flush(self) -> None:
        """Send the replies that are due, and go on with what waited for them."""
        self.send()
        if self._resume_below is not None or self.replies.rereads.numbers:
            self.resume()
        elif self.is_closing or self._is_ended:
            self.close_when_done()

    def send(self) -> None:
        """Send what is due, and tell the limit what is answered; values count until all commands are."""
        replies, size, more = self.replies, 0, 0
        answered = replies.answered
        if self._timed is not None and answered > self._timed[0]:
            self._rounds.end(self._timed)
            self._timed = None
        if replies.write():
            self._key_hazards.answered(replies.issued, answered)
        if replies.rereads.numbers:  # of a client that reads too little what waits for its turn is not under way
            answered += len(replies.rereads.numbers) + len(replies.early)
        if replies.issued == answered:
            size, self._value_bytes = self._value_bytes, 0
            more, self._more_operations = self._more_operations, 0
        newly, self._accounted = answered - self._accounted, answered
        if newly < 0:  # a read that was put off is under way again
            self._inflight_limit.begin(-newly, 0)
        elif newly or size or more:
            self._inflight_limit.end(newly, size, more)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close_soon(self) -> None:
        """Begin no more commands; close when those in flight are answered."""
        self.is_closing = True
        self.waiting.clear()
        self.close_when_done()

    def end_input(self) -> bool:
        """The client sends no more. Whether it still waits for something."""
        self._is_ended = True
        return self.replies.in_flight() > 0 or bool(self.waiting)

    def lose(self) -> None:
        """The client is gone."""
        self.is_closing = True
        self.waiting.clear()
        self.replies.lose()
        self.send()

    def end(self, text: str) -> None:
        """A last reply `-text`, after those that are due before it, then the end."""
        if not self.is_closing:
            self._inflight_limit.begin(1, 0)
            self.replies.reply(replies.error(text))
            self.is_closing = True
        self.send()
        self.close_when_done()

    def close_when_done(self) -> None:
        is_over = self.is_closing or self._is_ended
        if is_over and not self.replies.in_flight() and not self.waiting and not self.replies.is_gone:
            self.stream.close()

    # ── for the commands about more than keys ─────────────────────────────────────────────────────────────────────────

    def run_alone(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Answer with what `work` returns; nothing else is begun meanwhile."""
        number = self.replies.next_number()
        self.is_busy = True
        self.server.spawn(self._finish(number, work))

    async def _finish(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        reply = await specials.reply_of(work, self.client.address)
        self.is_busy = False
        self.replies.answer(number, reply)
        self.flush()

    def quit(self, farewell: bytes = replies.OK) -> None:
        """Say goodbye; what came after is not read."""
        self.replies.reply(farewell)
        self.is_closing = True


def _keys_of(ops: Sequence[Op]) -> list[bytes]:
    return [each[1] for op in ops for each in (op[2] if op[0] == BATCH else (op,))]
