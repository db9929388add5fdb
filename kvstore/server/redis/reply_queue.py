"""The replies of one Redis connection: in the order of its commands, and never more of them than there is room for.

Results come in any order and wait for their turn. How large they are is known only when they come: those of reads that
do not fit are forgotten, and read again in their turn; a command that cannot be done again begins when there is room
for all that it may answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.env import Stream
from kvstore.errors import Overloaded
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Code
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.gather import REPLY_BYTES_MAX, Gather, paid
from kvstore.server.redis.plans import CommandError, Several, Single
from kvstore.server.redis.replies import FORMATS, Fmt
from kvstore.server.redis.reply_memory import SMALL_BYTES, Holder, ReplyMemory
from kvstore.server.redis.rereads import Rereads, bytes_of, transaction_bytes
from kvstore.server.redis.session import Session
from kvstore.server.routing.backend import Backend

IN_FLIGHT_FIRST, IN_FLIGHT_MAX = 64, 1024
"""Commands of one connection that may be in flight; those that come after them wait. A connection begins with the first
number and may soon have the second, unless its replies are large."""
HELD_BYTES_MAX = 8 << 20
"""Bytes of large replies that one connection holds. A single reply may be larger."""
RESERVED_BYTES_MAX = 16 << 20
"""Room for the replies of commands that cannot be done again, while these are in flight. One command may have more."""
FORMAT_BITS = 6
_FORMAT_MASK = (1 << FORMAT_BITS) - 1
_GET, _OK_FORMAT = int(Code.GET), Fmt.OK
_OK, _INT = {int(Fmt.OK)}, {int}
_NO_ROOM = Overloaded("other clients do not read their replies")


class Server(Protocol):
    """Holds the replies of all connections: kvstore.server.redis.door.RespServer."""

    backend: Backend
    reply_memory: ReplyMemory
    rates: Callable[[], Rates | None]
    """Those of namespaces, while one has any."""

    def wait_for_room(self, connection: Holder, size: int) -> None:
        """Have `connection` resumed, or refused, when there is room for replies of `size` bytes or will be none."""
        ...


class ReplyQueue:
    """The replies of one connection: the Sink of its operations, and the Holder of what its client has not read.

    `flush` is called when a group of results has come, `resume` when there may be room for what waits.
    """

    stream: Stream
    """Set when the connection is made."""

    def __init__(
        self, server: Server, session: Session, *, flush: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        self.flush, self.resume = flush, resume
        self.backend, self.rates = server.backend, server.rates
        self.full_since: float | None = None
        """Since when the client has not read enough."""
        self._server, self._session = server, session
        self._formats = FORMATS[session.protocol]
        self.line = object()
        """Names the client, as the line of a Sink. The queue itself would be a cycle of references."""
        self.due: list[bytes] = []
        """Replies whose turn it is, to be written next."""
        self.issued = 0
        """Commands begun."""
        self.answered = 0
        """Commands whose reply is due or sent. The next reply that is due is that of command number `answered`."""
        self.early: dict[int, bytes] = {}
        """Replies that came before their turn, by the numbers of their commands."""
        self.rereads = Rereads()
        self.in_flight_max = IN_FLIGHT_FIRST
        self._unchecked = SMALL_BYTES
        """Replies up to this size are kept without a look at what is held."""
        self._held = 0
        """Large replies since the last look; no less than those that are not written yet."""
        self._gathered = 0
        """Bytes of values that wait for other values of their reply."""
        self._reserved = 0
        """Bytes reserved for replies of commands that cannot be done again; they count until nothing is in flight."""
        self._is_refused = False
        """The command that waits for room is not going to get it."""
        self.is_full = False
        """The client does not read its replies."""
        self.is_gone = False
        """The client is gone."""

    # ── what comes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, token: int, result: Any) -> None:
        number, format_ = token >> FORMAT_BITS, token & _FORMAT_MASK
        if format_ == _OK_FORMAT and result.__class__ is int:  # most writes: the answer that they always get
            if number == self.answered and not self.early:
                self.due.append(replies.OK)
                self.answered = number + 1
            else:
                self.answer(number, replies.OK)
            return
        if self.is_gone:  # a reply that comes before its turn would be kept, and nobody counts it any more
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
        """The reply of a command whose result is not formatted by `complete`."""
        if number == self.answered:
            self.due.append(reply)
            self.answered = number + 1
            if self.early:
                self._release()
        else:
            self.early[number] = reply

    def reply(self, data: bytes) -> None:
        """Answer a command that has not begun."""
        self.answer(self.next_number(), data)

    def in_flight(self) -> int:
        return self.issued - self.answered

    def next_number(self) -> int:
        self.issued += 1
        return self.issued - 1

    def widen(self) -> None:
        """Let more be in flight, because all that was begun has fitted; fewer more if there was once too much."""
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
        """Later replies are in this version of the protocol."""
        self._formats = FORMATS[version]

    def write(self) -> bool:
        """Send what is due. False if there was nothing."""
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
        if self.is_full:  # last: it may count anew, then without what was reserved
            self._server.reply_memory.add(self, len(data))
        return True

    # ── what there is room for ────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, number: int, size: int) -> bool:
        """Whether a reply may be kept. If not, its command is done again when its turn comes."""
        rereads = self.rereads
        if number == rereads.current or number not in rereads.reads or self.is_gone:
            return True  # room is reserved for it, or it is small
        is_new = number >= rereads.below
        if is_new:
            self._unchecked = SMALL_BYTES
        if (is_new or number == self.answered) and self.fits(size):
            return True
        self.put_off(number, size)
        return False

    def put_off(self, number: int, size: int) -> None:
        """Do a read again when its turn comes: its reply of `size` bytes did not fit."""
        if self.is_gone:
            return self.answer(number, b"")
        if number >= self.rereads.below:
            self.in_flight_max = max(1, min(self.in_flight_max, HELD_BYTES_MAX // max(1, size)))
            self._unchecked = -1
            self._server.reply_memory.put_off += 1
        self.rereads.put_off(number, self.issued, self.early)

    def fits(self, size: int) -> bool:
        """Count in so many bytes of a reply, if there is room."""
        self._held += size
        if self._held > HELD_BYTES_MAX:
            self._held = self._unsent_bytes()
            held = self._held + self.stream.get_write_buffer_size()
            if held and held + size > HELD_BYTES_MAX:
                return False
            self._held += size
        return self._server.reply_memory.take(self, size)

    def gather(self, size: int) -> bool:
        """The same for a value that waits for others of its reply."""
        fits = self.fits(size)
        self._gathered += size if fits else 0
        return fits

    def gathered(self, size: int) -> None:
        """Count so many bytes of values out: they do not wait any more."""
        self._gathered -= size

    @property
    def held_bytes(self) -> int:
        """Replies that the socket has not taken, and what is reserved for others."""
        if self.is_gone:
            return 0
        reread = self.rereads.size if self.rereads.current >= self.answered else 0
        return self._unsent_bytes() + self._reserved + reread + self.stream.get_write_buffer_size()

    def _unsent_bytes(self) -> int:
        return self._gathered + sum(map(len, self.early.values())) + sum(map(len, self.due))

    def read_again(self) -> None:
        """Begin the read whose turn it is, if it was put off and there is room for whatever it brings."""
        rereads, number = self.rereads, self.answered
        if number not in rereads.numbers or self.is_full or self.is_gone:
            return
        read = rereads.reads[number]
        size = bytes_of(read, REPLY_BYTES_MAX)
        if not (self._is_refused or self._server.reply_memory.take(self, size)):
            return self._server.wait_for_room(self, size)
        rereads.numbers.discard(number)
        rereads.current, rereads.size = number, size
        if self._is_refused:
            self._is_refused = False
            self.answer(number, replies.failure(_NO_ROOM))
            self.flush()
            return
        if isinstance(read, Several):
            Gather(self, number, read, is_reserved=True).submit()
        else:
            op, format_ = ((_GET, read, self._session.level, 0), Fmt.VALUE) if isinstance(read, bytes) else read
            with paid(self.rates()):
                self.backend.submit((op,), self, (number << FORMAT_BITS | format_,))

    def may_answer(self, found: Single) -> bool:
        """Whether there is room for the reply of an operation that cannot be done again. Raises CommandError."""
        return found.format != Fmt.OLD_VALUE or self.reserve(transaction_bytes((found,), BATCH_RESULT_BYTES_MAX))

    def reserve(self, size: int) -> bool:
        """Whether there is room for replies of `size` bytes; if so, it is kept for them. Raises CommandError."""
        if not size:
            return True
        if self.issued == self.answered:
            self._reserved = 0  # else a command could wait for room that no answer gives back
        if self._is_refused:
            self._is_refused = False
            self._session.abandon()
            raise CommandError(f"TRYAGAIN overloaded: {_NO_ROOM}")
        if self._reserved and self._reserved + size > RESERVED_BYTES_MAX:
            return False
        if not self._server.reply_memory.take(self, size):
            self._server.wait_for_room(self, size)
            return False
        self._reserved += size
        return True

    def hold_back(self, since: float | None) -> None:
        """The client does not read what it was sent; None: it reads again."""
        self.is_full, self.full_since = since is not None, since

    def lose(self) -> None:
        """The client is gone: nothing is read again for it."""
        self.is_gone = True
        self.early = dict.fromkeys((*self.early, *self.rereads.numbers), b"")
        self.rereads.numbers.clear()
        self._release()

    def refuse(self) -> None:
        """Answer the command that waits for room with an error: there is none."""
        self._is_refused = True
        self.resume()
        self._is_refused = False

    def abort(self) -> None:
        """Close at once: the client does not read what it asked for, or the server stops."""
        self.full_since = None
        self.stream.abort()
