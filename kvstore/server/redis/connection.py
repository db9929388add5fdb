"""One Redis client's connection: bytes in, operations to the backend, replies out in the order of the commands.

Commands are submitted as they arrive, many at once; reply_queue.py puts their replies in order. The token of a request
holds its place in that order and, in its low bits, the format of its reply. What a client may rely on from a server
that does one thing after the other is kept: an operation on a key that another one of this connection is changing, and
a command about more than keys, wait until all before are answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import Code
from kvstore.server.redis import replies
from kvstore.server.redis import server_commands as specials
from kvstore.server.redis.admission import REFUSAL, Admission, Trial
from kvstore.server.redis.commands import CommandError, Context, Plan, Reply, Several, Single, Special, plan
from kvstore.server.redis.gather import Gather
from kvstore.server.redis.key_hazards import Hazards
from kvstore.server.redis.latency import Timed
from kvstore.server.redis.parser import Command, Parser, Unfit
from kvstore.server.redis.replies import FORMATS, Fmt
from kvstore.server.redis.reply_queue import FORMAT_BITS, Outbox

if TYPE_CHECKING:
    from kvstore.env import Stream
    from kvstore.server.redis.door import RespServer

OUTPUT_HIGH_BYTES = 64 << 10
"""From here on no more of the client's commands are begun."""
QUEUED_BYTES = 160
"""What a command takes that has been read, beside its bytes."""

_GET, _PUT = int(Code.GET), int(Code.PUT)
_VALUE_FORMAT, _OK_FORMAT = Fmt.VALUE, Fmt.OK


class RespConnection(Outbox):
    """A StreamHandler towards the client and, as an Outbox, a Sink towards the backend."""

    def __init__(self, server: RespServer) -> None:
        super().__init__(server)
        self._parser = Parser()
        self._accounted = 0
        """Commands that the window counts as answered."""
        self._value_bytes = 0
        self._window = server.window
        self._rounds = server.rounds
        self._timed: Timed | None = None
        self._hazards = Hazards()
        self._queue: deque[Command] = deque()
        """Read but not begun."""
        self._resume_below: int | None = None
        """While commands wait: they go on when fewer than so many are in flight."""
        self._is_busy = False
        """A Special is being done."""
        self._is_closing = False
        """No more commands are begun."""
        self._is_ended = False
        """The client sends no more."""
        self._trial: Trial | None = None
        """Until it shows that it is another server's, if it has to."""
        self._is_peer = False
        """It is another server's: the stream has another handler."""

    # ── the client's side ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Stream) -> None:
        self._stream = transport
        transport.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)
        match self.server.admit(self):
            case Admission.IF_SERVER:
                self._trial = Trial(self.turn_away)
            case Admission.NO:
                self.turn_away()

    def data_received(self, data: bytes) -> None:
        if self._trial is not None:
            is_server = self._trial.is_server(data)
            self._end_trial()
            if not is_server:
                self.turn_away()
        if self._is_closing:
            return
        commands = self._parser.parse(data)
        self.server.commands += len(commands)
        if commands and not self._issued:
            self.server.heard(self)
        if self._is_stalled():
            self._queue.extend(commands)
        else:
            self._run(commands)
            self._close_when_done()
        if self._parser.error is not None and not self._queue:
            self.end(f"ERR Protocol error: {self._parser.error}")
        self._note_input(len(data) + QUEUED_BYTES * len(self._queue) if self._queue else 0)

    def _note_input(self, queued: int = 0) -> None:
        self.server.note_input(self, self._parser.buffered + queued + self.session.queued_bytes)

    def turn_away(self) -> None:
        """There is no place for it."""
        self._end_trial()
        self._is_closing = True
        self.server.connections_refused += 1
        self._stream.write(REFUSAL)
        self._stream.close()

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def eof_received(self) -> bool | None:
        """The client sends no more; what it still waits for is answered first."""
        self._is_ended = True
        return self._in_flight() > 0 or bool(self._queue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = self._is_closing = True
        self._queue.clear()
        self._let_go()
        self._send()
        self.server.forget(self)
        self._end_trial()

    def pause_writing(self) -> None:
        self._is_full = True
        self.full_since = self.server.now()

    def resume_writing(self) -> None:
        self._is_full = False
        self.full_since = None
        self.resume()

    # ── the backend's side ────────────────────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        self._send()
        if self._resume_below is not None or self._again.numbers:
            self.resume()
        elif self._is_closing or self._is_ended:
            self._close_when_done()

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, commands: Iterable[Command]) -> None:
        """Begin commands until one has to wait; that one and the rest go to the queue. Then send what is due."""
        before, values, rounds = self._issued, self._value_bytes, self._rounds
        rounds.left -= 1
        if rounds.left <= 0 and self._timed is None:
            self._timed = rounds.begin(commands, before)
        self._begin_all(iter(commands))
        self._window.begin(self._issued - before, self._value_bytes - values)
        self._send()

    def _begin_all(self, waiting: Iterator[Command]) -> None:
        submit = self.backend.submit
        writes, reads, session = self._hazards.writes, self._hazards.reads, self.session
        again = self._again.reads
        for words in waiting:
            name, count = words[0], len(words)
            key: bytes = words[1] if count > 1 else b""
            if count == 2 and name == b"GET" and session.queued is None and 0 < len(key) <= KEY_BYTES_MAX:
                if (writes and writes.get(key, -1) >= self._answered) or self._is_crowded():
                    return self._stall(words, waiting)
                number = self._issued
                self._issued = number + 1
                reads[key] = number
                again[number] = key
                submit((_GET, key, session.level, 0), self, number << FORMAT_BITS | _VALUE_FORMAT)
            elif (
                count == 3
                and name == b"SET"
                and session.queued is None
                and 0 < len(key) <= KEY_BYTES_MAX
                and len(words[2]) <= VALUE_BYTES_MAX
            ):
                if (reads and reads.get(key, -1) >= self._answered) or self._is_crowded():
                    return self._stall(words, waiting)
                number = self._issued
                self._issued = number + 1
                writes[key] = number
                self._value_bytes += len(words[2])
                submit((_PUT, key, words[2], 0, 0, 0, None), self, number << FORMAT_BITS | _OK_FORMAT)
            elif not self._begin(words):
                return self._stall(words, waiting)
            elif self._is_busy:
                return self._stall(None, waiting)
            elif self._is_closing or self._is_peer:
                return None  # nothing is meant to come after

    def _begin(self, words: Command) -> bool:
        """Begin any command. False if it has to wait, as also one that only has a reply does while nobody reads."""
        if self._is_full:
            return False
        if isinstance(words, Unfit):
            self.reply(replies.error(f"ERR {words.reason}"))
            return True
        try:
            found = self._plan(words)
            return found is None or self.perform(found)
        except CommandError as error:
            self.reply(replies.error(str(error)))
            return True

    def _plan(self, words: Command) -> Plan | None:
        """What to do; None if it was done. Raises CommandError."""
        session = self.session
        now_ms = self.server.now_ms()
        if session.queued is not None:
            if words[0].upper() not in specials.WITHIN_MULTI:
                self.reply(session.queue(words, now_ms))
                return None
            session.check(words)
        return plan(words, Context(session.protocol, session.level, now_ms))

    def perform(self, found: Plan) -> bool:
        match found:
            case Reply(data):
                self.reply(data)
            case Single(op, format_):
                if self._is_crowded() or self._hazards.block((op,), self._answered) or not self.may_answer(found):
                    return False
                self._hazards.note((op,), self._issued)
                self._again.note(found, self._issued)
                self._value_bytes += len(op[2]) if op[0] == _PUT else 0
                number = self._next_number()
                self.backend.submit(op, self, number << FORMAT_BITS | format_)
            case Several(ops, _):
                if self._is_crowded() or self._hazards.block(ops, self._answered):
                    return False
                self._hazards.note(ops, self._issued)
                self._again.note(found, self._issued)
                self._value_bytes += sum(len(op[2]) for op in ops if op[0] == _PUT)
                Gather(self, self._next_number(), found).submit()
            case Special(name, words):
                if self._in_flight() or not self.reserve(specials.reply_bytes(self, name, words)):
                    return False
                specials.do(self, name, words)
        return True

    def _is_crowded(self) -> bool:
        in_flight = self._issued - self._answered
        return (
            self._is_full
            or self._window.is_full
            or in_flight >= self._in_flight_max
            or self._answered < self._again.below
        )

    # ── waiting and going on ──────────────────────────────────────────────────────────────────────────────────────────

    def _is_stalled(self) -> bool:
        return self._resume_below is not None

    def _stall(self, words: Command | None, rest: Iterable[Command]) -> None:
        """Keep commands for later: until all are answered, or half if there were too many."""
        if words is not None:
            self._queue.append(words)
        self._queue.extend(rest)
        crowded = self._in_flight() >= self._in_flight_max
        self._resume_below = (self._in_flight_max + 1) // 2 if crowded else 1
        if self._window.is_full:
            self._window.wait(self)
        self._stream.pause_reading()

    def resume(self) -> None:
        """Go on with what waits, if it may."""
        if self._again.numbers:
            self.read_again()
        if self._is_full or self._is_busy or self._resume_below is None or self._in_flight() >= self._resume_below:
            return
        if self._window.is_full:
            return self._window.wait(self)
        if self._answered < self._again.below:
            return
        self._hazards.answered(self._issued, self._answered)
        self._widen()
        self._resume_below = None
        queue, self._queue = self._queue, deque()
        self._run(queue)
        if self._is_stalled() or self._is_lost:
            return
        self._note_input()
        if self._parser.error is not None:
            self.end(f"ERR Protocol error: {self._parser.error}")
        elif self._is_closing or self._is_ended:
            self._close_when_done()
        else:
            self._stream.resume_reading()

    def _send(self) -> None:
        self._account()
        if not self._out or self._is_lost:
            self._out.clear()
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        self._stream.write(data)
        if self._is_full:
            self.server.room.add(self, len(data))
        self._hazards.answered(self._issued, self._answered)
        self._again.answered(self._issued, self._answered)

    def _account(self) -> None:
        """Tell the window what is answered; values count until all commands are."""
        if self._timed is not None and self._answered > self._timed[0]:
            self._rounds.end(self._timed)
            self._timed = None
        size = 0
        if self._issued == self._answered:
            size, self._value_bytes, self._reserved, self._held = self._value_bytes, 0, 0, 0
        answered, self._accounted = self._answered - self._accounted, self._answered
        if answered or size:
            self._window.end(answered, size)

    def close_soon(self) -> None:
        """Begin no more commands; close when those in flight are answered."""
        self._is_closing = True
        self._queue.clear()
        self._close_when_done()

    def give_up(self, text: str) -> None:
        """Forget what has been read and not begun, and end."""
        self._queue.clear()
        self._parser = Parser()
        self.session.reset()
        self.server.note_input(self, 0)
        self.end(text)

    @property
    def is_gone(self) -> bool:
        """The client is."""
        return self._is_lost

    def is_done(self) -> bool:
        return self._is_lost or not self._in_flight()

    def end(self, text: str) -> None:
        """A last reply `-text`, after those that are due before it, then the end."""
        if not self._is_closing:
            self._window.begin(1, 0)
            self.reply(replies.error(text))
            self._is_closing = True
        self._send()
        self._close_when_done()

    def _close_when_done(self) -> None:
        is_over = self._is_closing or self._is_ended
        if is_over and not self._in_flight() and not self._queue and not self._is_lost:
            self._stream.close()

    # ── for the commands about more than keys ─────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> str:
        """The client's, without its port."""
        name = self._stream.get_extra_info("peername") or ("?", 0)
        return str(name[0])

    @property
    def address(self) -> str:
        """The client's."""
        name = self._stream.get_extra_info("peername") or ("?", 0)
        return f"{name[0]}:{name[1]}"

    def use_protocol(self) -> None:
        """The session's protocol version has changed: later replies are in it."""
        self._formats = FORMATS[self.session.protocol]

    def run_alone(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Answer with what `work` returns; nothing else is begun meanwhile."""
        number = self._next_number()
        self._is_busy = True
        self.server.spawn(self._finish(number, work))

    async def _finish(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        reply = await specials.reply_of(work, self.address)
        self._is_busy = False
        self.answer(number, reply)
        self.flush()

    def quit(self, farewell: bytes = replies.OK) -> None:
        """Say goodbye; what came after is not read."""
        self.reply(farewell)
        self._is_closing = True

    def become_peer(self, words: list[bytes]) -> None:
        """Give the connection to another server's link. Until that server has proven itself it counts as a client's.
        Raises CommandError if anything else was asked before."""
        if self._issued or self._queue or self._parser.buffered:
            raise CommandError("ERR KVSTORE.PEER must be the first command")
        peer = self.server.accept_peer(words, self._stream, self._leave)
        self._is_peer = True
        self._stream.set_protocol(peer)

    def _leave(self) -> None:
        """It is no client's any more: at a stop whoever has it now ends it, in good order."""
        self.server.forget(self)
