"""One connection to one bookie: frames out, answers back to whoever asked. Reconnects by itself when it is needed
again.

A connection that breaks fails all that is outstanding at once. One that is silent while adds are outstanding is broken
off after ADD_SILENCE_S: with Qa answers from the others nobody waits for that, so the limit only has to be longer than
the slowest disk sync of a healthy bookie, and short enough that little is owed to a dead one (docs/protocol.md W2).
Reads carry deadlines of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.env.beat import Beat
from kvstore.env.ports import Clock, Nursery, Stream, Transport
from kvstore.errors import BookieError, LedgerFenced, StoreError
from kvstore.proto import bookkeeper as wire
from kvstore.proto import version_two
from kvstore.proto.bookkeeper import Answer, BadFrame, Operation, Status
from kvstore.proto.frames import FrameReader
from kvstore.proto.start_tls import ClientsPrelude
from kvstore.types import BookieId

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
ADD_SILENCE_S = 2.0
READ_SILENCE_S = 4.0
CHECK_EVERY_S = 0.25
STOOD_STILL_S = 2 * CHECK_EVERY_S
"""A check that comes so late tells that this process was stopped, or had no turn."""
RETRY_MIN_S = 0.05
RETRY_MAX_S = 2.0
BUFFERED_BYTES_MAX = 64 << 20
"""What may wait in one connection; beyond it a call fails as if the bookie had."""
OUTSTANDING_MAX = 20_000

AddDone = Callable[[StoreError | None], None]
ReadDone = Callable[[Answer | BookieError], None]
Encode = Callable[[int], bytes]
"""txn -> frame."""


class Connection:
    """To the bookie that is meant by its id, wherever `address` says that it listens now."""

    def __init__(
        self,
        bookie: BookieId,
        address: Callable[[BookieId], str | None],
        next_txn: Callable[[], int],
        *,
        clock: Clock,
        transport: Transport,
        nursery: Nursery,
        beat: Beat,
        cluster: str = "",
    ) -> None:
        self.bookie, self._cluster = bookie, cluster
        self._hello_txn = -1
        self.refusal = "", -math.inf
        """Why the bookie refused the last connection, and when; empty if it accepted it or could not be reached."""
        self._address = address
        self._next_txn = next_txn
        self._clock = clock
        self._transport = transport
        self._nursery, self._beat = nursery, beat
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self.link: _Link | None = None
        """The present one."""
        self._is_connecting = False
        self._retry_at = 0.0
        self._retry_s = RETRY_MIN_S
        self._adds: dict[int, AddDone] = {}
        self._reads: dict[int, tuple[ReadDone, float]] = {}
        """Who waits, and until when."""
        self._received_at = 0.0
        """When anything was last heard, or the first of the reads outstanding was sent."""
        self._progress_at = 0.0
        """When the last add was answered, or the first of those outstanding was sent."""
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._unsent_bytes = 0
        """What the stream had not sent when it was given something last, or was looked at since."""
        self._is_checking = False
        self._checked_at = 0.0
        self._is_closed = False

    @property
    def is_up(self) -> bool:
        return self._stream is not None

    def add(self, txn: int, frame: bytes, done: AddDone) -> None:
        """Send an add, of a txn that no other request on this connection has. `done` is called once, never before this
        returns."""
        if (
            self._stream is None
            or len(self._adds) + len(self._reads) >= OUTSTANDING_MAX
            or self._out_bytes > BUFFERED_BYTES_MAX
            or self._unsent_bytes > BUFFERED_BYTES_MAX
        ):
            refusal = self._refusal()
            if refusal:
                self._loop.call_soon(done, BookieError(refusal))
                return
        if not self._adds:
            self._progress_at = self._clock.now()
        self._adds[txn] = done
        self._send(frame)

    def call(self, frame: Encode, timeout_s: float, done: ReadDone) -> int:
        """Send anything else. `done` is called once, never before this returns; forgotten by `forget` with what this
        returns."""
        txn = self._next_txn()
        refusal = self._refusal()
        if refusal:
            self._loop.call_soon(done, BookieError(refusal))
            return txn
        now = self._clock.now()
        if not self._reads:
            self._received_at = now
        self._reads[txn] = done, now + timeout_s
        self._send(frame(txn))
        return txn

    def forget(self, txn: int) -> None:
        """Nobody waits for the answer any more."""
        self._reads.pop(txn, None)

    async def ask(self, frame: Encode, timeout_s: float) -> Answer:
        """Send anything else and wait for its answer. Raises BookieError."""
        answered: asyncio.Future[Answer | BookieError] = self._loop.create_future()
        txn = self.call(frame, timeout_s, partial(settle, answered))
        try:
            answer = await answered
        finally:
            self.forget(txn)
        if isinstance(answer, BookieError):
            raise answer
        return answer

    def tell(self, frame: Encode) -> None:
        """Send something whose answer nobody waits for; dropped if the bookie is not there."""
        if not self._refusal():
            self._send(frame(self._next_txn()))

    def close(self) -> None:
        """Fail what is outstanding and connect no more."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.abort()
        self._lost("this client is closing")

    def _refusal(self) -> str:
        """Why nothing can be sent now; "" if it can. Starts a connection if there is none."""
        if self._is_closed:
            return f"{self.bookie}: this client is closing"
        if self._is_overloaded():
            return f"{self.bookie}: too much is waiting for it"
        if self._stream is not None:
            return ""
        if not self._is_connecting:
            if self._clock.now() < self._retry_at:
                return f"{self.bookie}: not reachable a moment ago"
            self._is_connecting = True
            self._nursery.spawn(self._connect(), name=f"connect {self.bookie}")
        return ""

    def _is_overloaded(self) -> bool:
        if self._unsent_bytes > BUFFERED_BYTES_MAX and self._stream is not None:
            self._unsent_bytes = self._stream.get_write_buffer_size()
        too_many = len(self._adds) + len(self._reads) >= OUTSTANDING_MAX
        return too_many or self._out_bytes > BUFFERED_BYTES_MAX or self._unsent_bytes > BUFFERED_BYTES_MAX

    def _send(self, frame: bytes) -> None:
        """Frames of one turn of the event loop leave together."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if not self._is_checking:
            self._check_later()

    def _flush(self) -> None:
        if self._stream is None or not self._out:
            return  # sent when the connection is there
        out, self._out, self._out_bytes = self._out, [], 0
        self._stream.writelines(out)
        self._unsent_bytes = self._stream.get_write_buffer_size()

    async def _connect(self) -> None:
        try:
            address = self._address(self.bookie)
            if address is None:
                raise BookieError("it is not registered")
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._transport.connect(address, _Link(self), prelude=self._prelude)
        except (OSError, TimeoutError, BookieError) as error:
            self._is_connecting = False
            self.refusal = "", -math.inf
            self._lost(f"no connection: {str(error) or f'none within {CONNECT_TIMEOUT_S} s'}")
        finally:
            self._is_connecting = False

    def _prelude(self) -> ClientsPrelude:
        return ClientsPrelude(self._next_txn())

    def opened(self, link: _Link, stream: Stream) -> None:
        """A connection is there."""
        if self._is_closed or self._stream is not None:
            stream.abort()
            return
        self._stream, self.link = stream, link
        self._progress_at = self._clock.now()
        # The first request says which bookie is meant, and of which cluster: one that is another closes the connection.
        self._hello_txn = self._next_txn()
        context = wire.bookie_context(self.bookie, self._cluster)
        stream.write(wire.encode_bookie_info(self._hello_txn, requested=0, context=context))
        self._flush()

    def delivered(self, link: _Link, payloads: list[bytes], fault: str) -> None:
        """Answers have come, in frames."""
        stored = False
        self._received_at = self._clock.now()
        for payload in payloads:
            txn = wire.stored_txn(payload)
            if txn >= 0:
                done = self._adds.pop(txn, None)
                if done is not None:
                    stored = True
                    done(None)
            elif link is self.link:
                self._answered(payload)
        if stored:
            self._progress_at = self._received_at
            self._retry_s = RETRY_MIN_S
        if fault:
            self._abort(fault)

    # docs/protocol.md B32
    def _hello_answered(self, answer: Answer) -> None:
        """The bookie has answered the first request. Nobody waits for that, but it may be a refusal."""
        self._hello_txn = -1
        self.refusal = "", -math.inf
        if answer.status == Status.UNAUTHORIZED:
            error = NotAdmitted(
                f"{self.bookie}: it does not let this process in: it is of another cluster than "
                f"{self._cluster or 'ours'}, or wants TLS; its log says which"
            )
            log.warning("%s", error)
            self.refusal = str(error), self._clock.now()
            if self._stream is not None:
                self._stream.abort()
            self._lost("refused", error)

    def _answered(self, payload: bytes) -> None:
        try:
            is_batch = payload.startswith(version_two.MARK)
            answer = version_two.decode_batch_response(payload) if is_batch else wire.decode_response(payload)
        except BadFrame as error:
            self._abort(str(error))
            return
        if answer.txn == self._hello_txn:
            self._hello_answered(answer)
            return
        if answer.operation == Operation.ADD_ENTRY:
            done = self._adds.pop(answer.txn, None)
            if done is not None:
                self._progress_at = self._clock.now()
                done(error_of(self.bookie, answer.status))
            return
        if answer.operation == Operation.READ_ENTRY:
            self._retry_s = RETRY_MIN_S
        waiting = self._reads.pop(answer.txn, None)
        if waiting is not None:
            waiting[0](answer)

    def closed(self, link: _Link, reason: str) -> None:
        """A connection has gone; if it is the present one, all that is outstanding fails."""
        if link is self.link:
            if self._hello_txn >= 0 and not self._is_closed:
                self._hello_txn = -1
                reason = f"it closed the connection before it answered anything ({reason})"
                self.refusal = reason, self._clock.now()
            self._lost(reason)

    def _abort(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.abort()
        self._lost(reason)

    def _lost(self, reason: str, error: BookieError | None = None) -> None:
        """Fail all that is outstanding, by this error if it is given; the oldest first."""
        was_up, self._stream, self.link = self._stream is not None, None, None
        self._retry_at = self._clock.now() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        self._out.clear()
        self._out_bytes = self._unsent_bytes = 0
        adds, self._adds = self._adds, {}
        reads, self._reads = self._reads, {}
        if was_up or adds or reads:
            log.info("bookie=%s adds=%d reads=%d failed: %s", self.bookie, len(adds), len(reads), reason)
        error = error or BookieError(f"{self.bookie}: {reason}")
        for done in adds.values():
            done(error)
        for waiting, _ in reads.values():
            waiting(error)

    def _check_later(self) -> None:
        self._is_checking = True
        self._checked_at = self._clock.now()
        self._loop.call_later(self._beat.delay_s(CHECK_EVERY_S), self._check)

    def _check(self) -> None:
        """Look for what has waited too long, for as long as anything waits."""
        self._is_checking = False
        now = self._clock.now()
        if now - self._checked_at < STOOD_STILL_S:  # else it was this process that was silent: it reads first
            self._end_late(now)
        if (self._adds or self._reads) and not self._is_closed:
            self._check_later()

    def _end_late(self, now: float) -> None:
        if self._adds and not self._is_connecting and now - self._progress_at > ADD_SILENCE_S:
            self._abort(f"no add was answered for {ADD_SILENCE_S} s")
        late = [txn for txn, (_, deadline) in self._reads.items() if deadline <= now]
        if late and now - self._received_at > READ_SILENCE_S and not self._is_connecting:
            self._abort(f"nothing was heard for {READ_SILENCE_S} s")
        for txn in late:
            if (waiting := self._reads.pop(txn, None)) is not None:
                waiting[0](BookieError(f"{self.bookie}: no answer in time"))


class _Link:
    """One connection of the transport's. Once it is not the present one, whatever comes from it is ignored."""

    def __init__(self, owner: Connection) -> None:
        self._owner = owner
        self._frames = FrameReader(wire.PAYLOAD_MAX)

    def connection_made(self, transport: Any) -> None:
        self._owner.opened(self, transport)

    def data_received(self, data: bytes) -> None:
        if self._owner.link is self:
            self._owner.delivered(self, self._frames.feed(data), self._frames.fault)

    def eof_received(self) -> bool | None:
        return None  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.closed(self, f"connection lost: {exc or 'closed by the bookie'}")

    def pause_writing(self) -> None:
        """Do nothing: what is outstanding is bounded by bytes instead."""

    def resume_writing(self) -> None:
        """See pause_writing."""


def settle(answered: asyncio.Future[Answer | BookieError], answer: Answer | BookieError) -> None:
    """Give an answer to who waits for it, if anybody still does."""
    if not answered.done():
        answered.set_result(answer)


class NotAdmitted(BookieError):
    """The bookie is there and serves others: those of its own cluster, by TLS if it wants that."""


class AnsweredError(BookieError):
    """The bookie is there and said no; what it was asked for may be damaged. `status` is what it said."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def error_of(bookie: BookieId, status: int) -> StoreError | None:
    """Make the caller's error of an answer's status; None if it is fine."""
    if status == Status.OK:
        return None
    if status == Status.FENCED:
        return LedgerFenced(f"{bookie}: the ledger has another writer")
    name = Status(status).name if status in Status.__members__.values() else status
    return AnsweredError(f"{bookie}: answered {name}", status)
