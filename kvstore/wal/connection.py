"""One connection to one bookie: sends requests and delivers the answers to the callers. A broken connection is opened
again when the next request needs it.

When the connection breaks, all outstanding requests fail at once. A connection on which no add is answered is aborted
after ADD_SILENCE_S. No client waits for that if an ack quorum of the other bookies answers. The limit must therefore
only exceed the slowest disk sync of a healthy bookie, and be short enough that few adds are outstanding at a dead
bookie (docs/protocol.md W2). Reads have their own deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvstore.env.beat import Beat
from kvstore.env.ports import Clock, Nursery, Stream, Transport
from kvstore.errors import BookieError, LedgerFenced, StoreError
from kvstore.proto import bookkeeper as wire
from kvstore.proto import version_two
from kvstore.proto.bookkeeper import BadFrame, BookieOperation, BookieResponse, Status
from kvstore.proto.frames import FrameReader
from kvstore.proto.start_tls import ClientsPrelude
from kvstore.types import BookieId

T = TypeVar("T")
log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
ADD_SILENCE_S = 2.0
READ_SILENCE_S = 4.0
CHECK_EVERY_S = 0.25
STALLED_S = 2 * CHECK_EVERY_S
"""Seconds by which a check is late if this process was stopped or got no CPU time."""
RETRY_MIN_S = 0.05
RETRY_MAX_S = 2.0
BUFFERED_BYTES_MAX = 64 << 20
"""Maximum number of bytes waiting in one connection. Beyond the limit, a request fails as if the bookie had failed."""
OUTSTANDING_MAX = 20_000

AddDone = Callable[[StoreError | None], None]
ReadDone = Callable[[BookieResponse | BookieError], None]
Encode = Callable[[int], bytes]
"""Encodes a request as a frame, given its transaction number."""


class Connection:
    """A connection to the bookie with the given id. `address` returns the bookie's current address, or None if it is
    unknown."""

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
        """The reason of the bookie's last refusal, and its time on the boot-time clock. The reason is empty if the last
        connection was accepted or the bookie could not be reached."""
        self._address = address
        self._next_txn = next_txn
        self._clock = clock
        self._transport = transport
        self._nursery, self._beat = nursery, beat
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self.link: _Link | None = None
        """The current link."""
        self._is_connecting = False
        self._retry_at = 0.0
        self._retry_s = RETRY_MIN_S
        self._adds: dict[int, AddDone] = {}
        self._reads: dict[int, tuple[ReadDone, float]] = {}
        """The callback of each read, and its deadline."""
        self._received_at = 0.0
        """Boot-time clock when anything was last received, or when the first outstanding read was sent."""
        self._progress_at = 0.0
        """Boot-time clock when the last add was answered, or when the first outstanding add was sent."""
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._unsent_bytes = 0
        """Bytes that the stream had not sent at the last write or check."""
        self._is_checking = False
        self._checked_at = 0.0
        self._is_closed = False

    def add(self, txn: int, frame: bytes, done: AddDone) -> None:
        """Send an add. `txn` must not be in use by another request on this connection. `done` is called exactly once,
        never before this method returns, with None or the error."""
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
        """Send a request other than an add, and return its transaction number, which `forget` accepts. `done` is called
        at most once, never before this method returns, with the answer or BookieError after `timeout_s` seconds."""
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
        """Drop the callback of the request `txn`, whose answer is then ignored."""
        self._reads.pop(txn, None)

    async def ask(self, frame: Encode, timeout_s: float) -> BookieResponse:
        """Send a request other than an add, and return its answer. Raises BookieError if the answer does not arrive
        within `timeout_s` seconds or the connection breaks."""
        answered: asyncio.Future[BookieResponse | BookieError] = self._loop.create_future()
        txn = self.call(frame, timeout_s, partial(settle, answered))
        try:
            answer = await answered
        finally:
            self.forget(txn)
        if isinstance(answer, BookieError):
            raise answer
        return answer

    def notify(self, frame: Encode) -> None:
        """Send a request and ignore its answer. The request may be lost without an error."""
        if not self._refusal():
            self._send(frame(self._next_txn()))

    def close(self) -> None:
        """Fail the outstanding requests, and do not connect again."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.abort()
        self._lost("this client is closing")

    def _refusal(self) -> str:
        """Return the reason why nothing can be sent now, or "" if a request can be sent or queued. Starts to connect if
        there is no connection."""
        if self._is_closed:
            return f"{self.bookie}: this client is closing"
        if self._is_overloaded():
            return f"{self.bookie}: too many requests are waiting"
        if self._stream is not None:
            return ""
        if not self._is_connecting:
            if self._clock.now() < self._retry_at:
                return f"{self.bookie}: was unreachable a moment ago"
            self._is_connecting = True
            self._nursery.spawn(self._connect(), name=f"connect {self.bookie}")
        return ""

    def _is_overloaded(self) -> bool:
        if self._unsent_bytes > BUFFERED_BYTES_MAX and self._stream is not None:
            self._unsent_bytes = self._stream.get_write_buffer_size()
        too_many = len(self._adds) + len(self._reads) >= OUTSTANDING_MAX
        return too_many or self._out_bytes > BUFFERED_BYTES_MAX or self._unsent_bytes > BUFFERED_BYTES_MAX

    def _send(self, frame: bytes) -> None:
        """Queue a frame. All frames of one event-loop turn are written together."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if not self._is_checking:
            self._check_later()

    def _flush(self) -> None:
        if self._stream is None or not self._out:
            return  # written once the connection is open
        out, self._out, self._out_bytes = self._out, [], 0
        self._stream.writelines(out)
        self._unsent_bytes = self._stream.get_write_buffer_size()

    async def _connect(self) -> None:
        try:
            address = self._address(self.bookie)
            if address is None:
                raise BookieError("the bookie is not registered")
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._transport.connect(address, _Link(self), prelude=self._prelude)
        except (OSError, TimeoutError, BookieError) as error:
            self._is_connecting = False
            self.refusal = "", -math.inf
            self._lost(f"cannot connect: {str(error) or f'no connection within {CONNECT_TIMEOUT_S} s'}")
        finally:
            self._is_connecting = False

    def _prelude(self) -> ClientsPrelude:
        return ClientsPrelude(self._next_txn())

    def opened(self, link: _Link, stream: Stream) -> None:
        """Start to use a new connection."""
        if self._is_closed or self._stream is not None:
            stream.abort()
            return
        self._stream, self.link = stream, link
        self._progress_at = self._clock.now()
        # The first request names the bookie and the cluster that are meant. A bookie to which that does not apply
        # closes the connection.
        self._hello_txn = self._next_txn()
        context = wire.bookie_context(self.bookie, self._cluster)
        stream.write(wire.encode_bookie_info(self._hello_txn, requested=0, context=context))
        self._flush()

    def delivered(self, link: _Link, payloads: list[bytes], fault: str) -> None:
        """Deliver the answers in `payloads` to their callers. A non-empty `fault` aborts the connection afterwards."""
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
    def _hello_answered(self, answer: BookieResponse) -> None:
        """Handle the answer to the first request, which may be a refusal."""
        self._hello_txn = -1
        self.refusal = "", -math.inf
        if answer.status == Status.UNAUTHORIZED:
            error = NotAdmitted(
                f"{self.bookie}: refuses this process, because the bookie is of another cluster than "
                f"{self._cluster or 'ours'} or requires TLS; see the bookie's log"
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
        if answer.operation == BookieOperation.ADD_ENTRY:
            done = self._adds.pop(answer.txn, None)
            if done is not None:
                self._progress_at = self._clock.now()
                done(error_of(self.bookie, answer.status))
            return
        if answer.operation == BookieOperation.READ_ENTRY:
            self._retry_s = RETRY_MIN_S
        waiting = self._reads.pop(answer.txn, None)
        if waiting is not None:
            waiting[0](answer)

    def closed(self, link: _Link, reason: str) -> None:
        """Handle a closed connection. If it is the current one, fail all outstanding requests."""
        if link is self.link:
            if self._hello_txn >= 0 and not self._is_closed:
                self._hello_txn = -1
                reason = f"the bookie closed the connection before any answer ({reason})"
                self.refusal = reason, self._clock.now()
            self._lost(reason)

    def _abort(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.abort()
        self._lost(reason)

    def _lost(self, reason: str, error: BookieError | None = None) -> None:
        """Fail all outstanding requests, oldest first, with `error` or with a BookieError that gives the reason."""
        was_up, self._stream, self.link = self._stream is not None, None, None
        self._retry_at = self._clock.now() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        self._out.clear()
        self._out_bytes = self._unsent_bytes = 0
        adds, self._adds = self._adds, {}
        reads, self._reads = self._reads, {}
        if was_up or adds or reads:
            log.info("requests failed bookie=%s adds=%d reads=%d reason=%s", self.bookie, len(adds), len(reads), reason)
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
        """Fail requests that have waited too long. Runs periodically while requests are outstanding."""
        self._is_checking = False
        now = self._clock.now()
        if now - self._checked_at < STALLED_S:  # otherwise this process was silent, and must read first
            self._end_late(now)
        if (self._adds or self._reads) and not self._is_closed:
            self._check_later()

    def _end_late(self, now: float) -> None:
        if self._adds and not self._is_connecting and now - self._progress_at > ADD_SILENCE_S:
            self._abort(f"the bookie answered no add for {ADD_SILENCE_S} s")
        late = [txn for txn, (_, deadline) in self._reads.items() if deadline <= now]
        if late and now - self._received_at > READ_SILENCE_S and not self._is_connecting:
            self._abort(f"the bookie sent nothing for {READ_SILENCE_S} s")
        for txn in late:
            if (waiting := self._reads.pop(txn, None)) is not None:
                waiting[0](BookieError(f"{self.bookie}: did not answer in time"))


class _Link:
    """One connection of the transport. Its data is ignored once another link is the current one."""

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
        """Do nothing: outstanding requests are bounded by bytes instead."""

    def resume_writing(self) -> None:
        """See pause_writing."""


def settle(answered: asyncio.Future[T], answer: T) -> None:
    """Set the result of `answered`, unless its caller was cancelled."""
    if not answered.done():
        answered.set_result(answer)


class NotAdmitted(BookieError):
    """The bookie is up but refuses this process, because the bookie belongs to another cluster or requires TLS."""


class AnsweredError(BookieError):
    """The bookie answered with an error status, available as `status`. The requested entry may be damaged."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def error_of(bookie: BookieId, status: int) -> StoreError | None:
    """Return the error for the status of an answer, or None if the status is OK."""
    if status == Status.OK:
        return None
    if status == Status.FENCED:
        return LedgerFenced(f"{bookie}: the ledger has another writer")
    name = Status(status).name if status in Status.__members__.values() else status
    return AnsweredError(f"{bookie}: answered {name}", status)
