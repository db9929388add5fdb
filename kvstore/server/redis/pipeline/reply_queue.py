"""The replies of one Redis connection, in the order of its commands, within the memory for replies.

Results arrive in any order and wait for their turn. Their size is known only when they arrive. The result of a read
that does not fit is dropped, and the read is repeated in its turn. A command that cannot be repeated begins when there
is capacity for the largest reply that it may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from kvstore.env import Stream
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Get, Meta, Sink
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.commands.performer import CommandServer
from kvstore.server.redis.pipeline.in_flight_limit import InFlightLimit
from kvstore.server.redis.pipeline.latency import CommandLatency
from kvstore.server.redis.pipeline.reply_memory import SMALL_BYTES, Holder, ReplyMemory
from kvstore.server.redis.pipeline.rereads import Rereads, bytes_of
from kvstore.server.redis.plans import REPLY_BYTES_MAX, CommandError, Several, Single, value_bytes
from kvstore.server.redis.replies import FORMATS, Fmt
from kvstore.server.redis.session import RespSession
from kvstore.server.redis.slot_table import SlotRedirects

IN_FLIGHT_FIRST, IN_FLIGHT_MAX = 64, 1024
"""Maximum number of commands of one connection in flight: at first, and later, unless its replies are large. Further
commands wait."""
HELD_BYTES_MAX = 8 << 20
"""Bytes of large replies that one connection may hold. A single reply may be larger."""
RESERVED_BYTES_MAX = 16 << 20
"""Bytes that may be reserved for the replies of commands in flight that cannot be repeated. A single command may
reserve more."""
READS_AT_ONCE = 256
"""Maximum number of reads of one command in flight at a time, because the size of their values is known only when they
arrive. Also, a leader that receives tens of thousands at once is busy for so long that it seems to be down."""
WRITES_AT_ONCE = 1024
"""Maximum number of writes of one command in flight at a time. A leader's queue refuses some of tens of thousands."""
FORMAT_BITS = 6
_FORMAT_MASK = (1 << FORMAT_BITS) - 1
_OK_FORMAT = Fmt.OK
_OK, _INT = {int(Fmt.OK)}, {int}
_NO_CAPACITY = Overloaded("the memory for replies is full, because clients do not read theirs; try again")


class PipelineServer(CommandServer, Protocol):
    """The server, as the pipeline of a connection uses it. Implemented by kvstore.server.redis.listener.RespServer."""

    in_flight_limit: InFlightLimit
    reply_memory: ReplyMemory
    rounds: CommandLatency
    redirects: SlotRedirects | None

    def note_slow_subscriber(self) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...
    def wait_for_capacity(self, connection: Holder, size: int) -> None:
        """Resume `connection` when there is capacity for replies of `size` bytes, or refuse it after a while."""
        ...


class ReplyQueue:
    """The replies of one connection: the Sink of its operations, and the Holder of the replies that its client has not
    read.

    The queue calls `flush` when a group of results has arrived, and `resume` when there may be capacity for a command
    that waits.
    """

    stream: Stream
    """Set when the connection is made."""

    def __init__(
        self, server: PipelineServer, session: RespSession, *, flush: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        self.flush, self.resume = flush, resume
        self.backend, self.rates = server.backend, server.rates
        self.full_since: float | None = None
        """Time since which the client has not read enough; None if it reads enough."""
        self._server, self._session = server, session
        self._formats = FORMATS[session.protocol]
        self.line = object()
        """Identifies the client, as the line of a Sink. The queue itself would be a reference cycle."""
        self.due: list[bytes] = []
        """Replies to be written next."""
        self.issued = 0
        """Number of commands begun."""
        self.answered = 0
        """Number of commands whose reply is due or sent. The next reply belongs to command number `answered`."""
        self.early: dict[int, bytes] = {}
        """Replies that arrived before their turn, by the numbers of their commands."""
        self.rereads = Rereads()
        self.in_flight_max = IN_FLIGHT_FIRST
        self._unchecked = SMALL_BYTES
        """Largest reply that is kept without a check of the memory for replies."""
        self._held = 0
        """Bytes of large replies since the last check: at least those of the unwritten replies."""
        self._gathered = 0
        """Bytes of values that wait for other values of the same reply."""
        self._reserved = 0
        """Bytes reserved for the replies of commands that cannot be repeated. They count until nothing is in flight."""
        self._is_refused = False
        """True while the command that waits for capacity is refused."""
        self.is_full = False
        """True while the client does not read its replies."""
        self.is_gone = False
        """True if the client has disconnected."""

    # ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, token: int, result: Any) -> None:
        number, format_ = token >> FORMAT_BITS, token & _FORMAT_MASK
        if format_ == _OK_FORMAT and result.__class__ is int:  # most writes: the reply is always +OK
            if number == self.answered and not self.early:
                self.due.append(replies.OK)
                self.answered = number + 1
            else:
                self.answer(number, replies.OK)
            return
        if self.is_gone:  # a reply before its turn would be kept, and nobody would count it any more
            self.answer(number, b"")
            return
        reply = self._formats[format_](result)
        if len(reply) <= self._unchecked or self.admit(number, len(reply)):
            self.answer(number, reply)

    def complete_all(self, tokens: Sequence[int], results: Sequence[Any]) -> None:
        first, count = tokens[0], len(tokens)
        if set(map(type, results)) != _INT or {token & _FORMAT_MASK for token in tokens} != _OK:
            for token, result in zip(tokens, results, strict=True):
                self.complete(token, result)
        elif first >> FORMAT_BITS == self.answered and tokens == tuple(
            range(first, first + (count << FORMAT_BITS), 1 << FORMAT_BITS)
        ):
            self.due.append(replies.OK * count)
            self.answered += count
            self._release()
        else:
            self.early.update(dict.fromkeys([token >> FORMAT_BITS for token in tokens], replies.OK))
            self._release()

    def answer(self, number: int, reply: bytes) -> None:
        """Add the reply to a command whose result is not formatted by `complete`."""
        if number == self.answered:
            self.due.append(reply)
            self.answered = number + 1
            if self.early:
                self._release()
        else:
            self.early[number] = reply

    def reply(self, data: bytes) -> None:
        """Add the reply to a command that has not begun."""
        self.answer(self.next_number(), data)

    def in_flight(self) -> int:
        return self.issued - self.answered

    def next_number(self) -> int:
        self.issued += 1
        return self.issued - 1

    def widen(self) -> None:
        """Allow more commands in flight, because the replies of all begun commands fitted. Raise the limit more slowly
        if replies did not fit before."""
        now = self.in_flight_max
        self.in_flight_max = min(now + (now if not self.rereads.below else now // 4 + 1), IN_FLIGHT_MAX)

    def _release(self) -> None:
        early, first = self.early, self.answered
        end = first
        while end in early:
            end += 1
        self.due += map(early.pop, range(first, end))
        self.answered = end

    def use_protocol(self, version: int) -> None:
        """Format later replies for this protocol version."""
        self._formats = FORMATS[version]

    def write(self) -> bool:
        """Send the replies that are due. Return False if there were none."""
        reserved = 0
        if self.issued == self.answered:
            reserved, self._reserved, self._held = self._reserved, 0, 0
        if not self.due or self.is_gone:
            self.due.clear()
            return False
        data = self.due[0] if len(self.due) == 1 else b"".join(self.due)
        self.due.clear()
        self.stream.write(data)
        if self.rereads.reads:
            self.rereads.answered(self.issued, self.answered)
        if reserved and self._server.reply_memory.give_back(self, reserved - self.held_bytes):
            asyncio.get_running_loop().call_soon(self._server.reply_memory.serve)
        if self.is_full:  # last: it may recount, then without the reserved bytes
            self._server.reply_memory.add(self, len(data))
        return True

    # ── capacity ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, number: int, size: int) -> bool:
        """Return True if a reply of `size` bytes may be kept. If not, its command is repeated when its turn comes."""
        rereads = self.rereads
        if number == rereads.current or number not in rereads.reads or self.is_gone:
            return True  # capacity is reserved for it, or it is small
        is_new = number >= rereads.below
        if is_new:
            self._unchecked = SMALL_BYTES
        if (is_new or number == self.answered) and self.fits(size):
            return True
        self.put_off(number, size)
        return False

    def put_off(self, number: int, size: int) -> None:
        """Repeat a read when its turn comes, because its reply of `size` bytes exceeded the capacity."""
        if self.is_gone:
            return self.answer(number, b"")
        if number >= self.rereads.below:
            self.in_flight_max = max(1, min(self.in_flight_max, HELD_BYTES_MAX // max(1, size)))
            self._unchecked = -1
            self._server.reply_memory.put_off += 1
        self.rereads.put_off(number, self.issued, self.early)

    def fits(self, size: int) -> bool:
        """Count `size` bytes of a reply and return True, if there is capacity."""
        self._held += size
        if self._held > HELD_BYTES_MAX:
            self._held = self._unsent_bytes()
            held = self._held + self.stream.get_write_buffer_size()
            if held and held + size > HELD_BYTES_MAX:
                return False
            self._held += size
        return self._server.reply_memory.take(self, size)

    def gather(self, size: int) -> bool:
        """Count a value that waits for other values of the same reply and return True, if there is capacity."""
        fits = self.fits(size)
        self._gathered += size if fits else 0
        return fits

    def gathered(self, size: int) -> None:
        """Count out bytes of values that no longer wait."""
        self._gathered -= size

    @property
    def held_bytes(self) -> int:
        """Bytes of replies that the socket has not taken, and bytes reserved for other replies."""
        if self.is_gone:
            return 0
        reread = self.rereads.size if self.rereads.current >= self.answered else 0
        return self._unsent_bytes() + self._reserved + reread + self.stream.get_write_buffer_size()

    def _unsent_bytes(self) -> int:
        return self._gathered + sum(map(len, self.early.values())) + sum(map(len, self.due))

    def read_again(self) -> None:
        """Begin the read whose turn it is, if it was postponed and there is capacity for its largest possible
        result."""
        rereads, number = self.rereads, self.answered
        if number not in rereads.numbers or self.is_full or self.is_gone:
            return
        read = rereads.reads[number]
        size = bytes_of(read, REPLY_BYTES_MAX)
        if not (self._is_refused or self._server.reply_memory.take(self, size)):
            return self._server.wait_for_capacity(self, size)
        rereads.numbers.discard(number)
        rereads.current, rereads.size = number, size
        if self._is_refused:
            self._is_refused = False
            self.answer(number, replies.failure(_NO_CAPACITY))
            self.flush()
            return
        if isinstance(read, Several):
            Gather(self, number, read, is_reserved=True).submit()
        else:
            op, format_ = (Get(read, self._session.level), Fmt.VALUE) if isinstance(read, bytes) else read
            with paid(self.rates()):
                self.backend.submit((op,), self, (number << FORMAT_BITS | format_,))

    def may_answer(self, found: Single) -> bool:
        """Return True if the operation may be executed now. That is the case if capacity for its reply is reserved,
        or if the operation can be repeated in case its reply exceeds the capacity. Raises CommandError."""
        return found.format != Fmt.OLD_VALUE or self.reserve(value_bytes((found,), BATCH_RESULT_BYTES_MAX))

    def reserve(self, size: int) -> bool:
        """Reserve capacity for replies of `size` bytes. Return True if it was reserved. Raises CommandError."""
        if not size:
            return True
        if self.issued == self.answered:
            self._reserved = 0  # otherwise a command could wait for capacity that no reply frees
        if self._is_refused:
            self._is_refused = False
            self._session.abandon()
            raise CommandError(f"TRYAGAIN overloaded: {_NO_CAPACITY}")
        if self._reserved and self._reserved + size > RESERVED_BYTES_MAX:
            return False
        if not self._server.reply_memory.take(self, size):
            self._server.wait_for_capacity(self, size)
            return False
        self._reserved += size
        return True

    def hold_back(self, since: float | None) -> None:
        """Record that the client has not read its replies since `since`; None if it reads again."""
        self.is_full, self.full_since = since is not None, since

    def lose(self) -> None:
        """Note that the client has disconnected: nothing is read again for it."""
        self.is_gone = True
        self.early = dict.fromkeys((*self.early, *self.rereads.numbers), b"")
        self.rereads.numbers.clear()
        self._release()

    def refuse(self) -> None:
        """Reply with an error to the command that waits for capacity."""
        self._is_refused = True
        self.resume()
        self._is_refused = False

    def abort(self) -> None:
        """Close at once, because the client does not read its replies or the server stops."""
        self.full_since = None
        self.stream.abort()


class Gather(Sink):
    """The sink of the operations of one command, which combines their results into one reply.

    If the values of reads do not fit into the connection's share, they are dropped, and the queue repeats the command
    with a Gather for which capacity `is_reserved`. Rates have already admitted all operations.
    """

    __slots__ = (
        *("_are_values", "_begun", "_bytes", "_queue", "_counted", "_is_reserved", "_missing", "_number"),
        *("_portion", "_results", "_several"),
    )

    def __init__(self, queue: ReplyQueue, number: int, several: Several, *, is_reserved: bool = False) -> None:
        self._queue, self._number, self._several = queue, number, several
        self._missing = len(several.ops)
        self._results: list[Any] = [None] * self._missing
        first = several.ops[0].__class__ if several.ops else None
        self._are_values = first is Get
        self._portion = READS_AT_ONCE if first is Get or first is Meta else WRITES_AT_ONCE
        self._is_reserved = is_reserved
        self._counted = 0
        """Bytes of values that the queue counts for this command."""
        self._begun = self._bytes = 0

    @property
    def line(self) -> object:
        return self._queue.line

    @property
    def is_gone(self) -> bool:
        return self._queue.is_gone

    @property
    def at_once(self) -> int:
        """Number of operations in flight at a time."""
        return min(self._portion, self._missing)

    def submit(self) -> None:
        self._submit(self.at_once)

    def _submit(self, count: int) -> None:
        begun = self._begun
        some = self._several.ops[begun : begun + count]
        self._begun = begun + len(some)
        with paid(self._queue.rates()):
            self._queue.backend.submit(some, self, range(begun, self._begun))

    def complete(self, token: int, result: Any) -> None:
        if self._are_values and isinstance(result, tuple):
            self._count(result)
        self._missing -= 1
        if self._results:
            self._results[token] = result
        if not self._missing:
            self._end()

    def _count(self, record: Any) -> None:
        """Count the value of a record. Drop all records if they are too large or if there is no capacity."""
        self._bytes += len(record[0])
        if self._bytes > REPLY_BYTES_MAX:
            self._results.clear()
        if self._results and not self._is_reserved:
            if self._queue.gather(len(record[0])):
                self._counted += len(record[0])
            else:
                self._results.clear()
                self._uncount()

    def _uncount(self) -> None:
        self._queue.gathered(self._counted)
        self._counted = 0

    def _end(self) -> None:
        queue, number = self._queue, self._number
        self._uncount()
        if self._bytes > REPLY_BYTES_MAX:
            queue.answer(number, replies.failure(_too_large()))
        elif not self._results:
            queue.put_off(number, REPLY_BYTES_MAX)
        elif queue.admit(number, 0):
            queue.answer(number, self._several.combine(self._results))

    def flush(self) -> None:
        unbegun = len(self._several.ops) - self._begun
        if unbegun and self._missing - unbegun <= self._portion // 2:
            if not self._results or self.is_gone:
                self._skip_rest()
            else:
                self._submit(self._portion)
        self._queue.flush()

    def _skip_rest(self) -> None:
        """Read nothing more, because the values are too large or the client has disconnected."""
        rest = range(self._begun, len(self._several.ops))
        self._begun = len(self._several.ops)
        for token in rest:
            self.complete(token, None)


def paid(rates: Rates | None) -> AbstractContextManager[None]:
    """Return a context in which submitted operations are not charged to rates, because the rates have already
    admitted them."""
    return nullcontext() if rates is None else rates.paid()


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"expected a reply of at most {REPLY_BYTES_MAX} bytes, got more; ask for fewer keys at once")
