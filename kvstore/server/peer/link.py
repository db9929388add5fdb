"""One link to another server: a connection for operations that the other server leads, and for calls between replicas.

All operations that are submitted in one turn of the event loop leave in one frame, and results arrive in frames. When a
link breaks, reads and unsent operations return to the dispatcher, and mutations that had been sent fail with
OutcomeUnknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, Protocol

from kvstore.env import Stream
from kvstore.env.beat import Beat
from kvstore.env.traces import Traces
from kvstore.errors import Moved, NotLeader, NotYetRaised, OutcomeUnknown, Unavailable
from kvstore.partition.leading.answers import ResultDelivery
from kvstore.partition.state.commands import Get, Op, Put, Sink
from kvstore.partition.state.traits import READS, SINCE, version_of
from kvstore.server.peer import frames
from kvstore.server.peer.calls import LinkCalls
from kvstore.server.peer.flow_control import OPERATION_TIMEOUT_S
from kvstore.server.peer.frames import Answer, Call, FrameError, Frames, Goodbye, Lane, Operations, Ping, Results
from kvstore.server.peer.proof import CallingSide, Credentials
from kvstore.server.peer.traced import announced
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.large_reads import LARGE_BYTES
from kvstore.types import PartitionId, ServerId
from kvstore.versions import LINK_LATEST, build_for, link_version

log = logging.getLogger(__name__)


SILENCE_S = 3.0
"""Seconds of silence after which a link with unanswered operations or calls counts as broken."""
QUIET_S = 2.0
"""Time of silence that does not occur on a link with open answers while the other side is alive, because a ping is
echoed after 1.0 to 1.7 s."""
SWEEP_S = 0.5
STALLED_S = 2 * SWEEP_S
"""Delay in seconds of a sweep that shows that this process was stopped or got no CPU time."""
WRITE_HIGH_BYTES = 4 << 20


class LinkOwner(Protocol):
    """The owner of all links. Implemented by kvstore.server.peer.links.PeerLinks."""

    beat: Beat
    credentials: Credentials
    dispatcher: Dispatcher
    forwarded_max: int

    now: Callable[[], float]
    traces: Traces

    def version_to(self, server: ServerId) -> int:
        """Return the protocol version to use for a link to the server."""
        ...

    def lost(self, link: PeerLink) -> None:
        """Handle the loss of the link."""
        ...

    def report_fault(self, server: ServerId, error: FrameError) -> None:
        """Handle a server that failed to prove its identity or sent malformed frames."""
        ...


class PeerLink:
    """A StreamHandler for one connection to another server, from connecting until the connection is lost. It is not
    reused."""

    def __init__(self, links: LinkOwner, server: ServerId) -> None:
        self.server = server
        self.is_open = False
        self._is_full = self._is_leaving = self._is_outdated = False
        """True if, respectively: the other side does not read; the other side is stopping; both sides now support a
        higher version than this link's."""
        self.flight = Flight(server, links.forwarded_max)
        self._links, self._traces = links, links.traces
        self._stream: Stream | None = None
        self.version = links.version_to(server)
        """Determines which operations and fields may be sent (docs/protocol.md V3)."""
        self._caller = CallingSide(links.credentials, server, self.version)
        self._frames = Frames()
        self._lanes: dict[PartitionId, Lane] = {}
        """Operations for the next frame, which is sent at the end of this turn of the event loop."""
        self._frame_bytes = 0
        """Lower bound of the bytes of the next frame to handle."""
        self._results = 0
        """Number of result frames received."""
        self._answers = ResultDelivery()
        self._sweeps: deque[tuple[float, int]] = deque()
        """The time of each sweep, and the last number in use at that time."""
        self._calls = LinkCalls(server, self._write, self.flight.next_number)
        self.received_at = self._swept_at = links.now()
        """Time at which bytes from the other side last arrived, or at which connecting began. A pause of this
        process does not count as silence."""
        self._timer: asyncio.TimerHandle | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Completes when the link is usable, or with OSError or FrameError if it cannot be opened."""

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, partition: PartitionId, number: int, op: Op) -> None:
        """Send an operation of the flight, which has this number, with the next frame."""
        lane = self._lanes.get(partition) or self._new_lane(partition)
        if op.__class__ is Get:
            lane.gets.append((number, op))
        elif op.__class__ is Put:
            lane.puts.append((number, op))
        else:
            lane.others.append((number, op))

    def add_puts(self, partition: PartitionId, numbers: range, ops: Sequence[Any]) -> None:
        """Send puts of the flight, which have these numbers, with the next frame."""
        lane = self._lanes.get(partition) or self._new_lane(partition)
        lane.puts += zip(numbers, ops, strict=True)

    def _new_lane(self, partition: PartitionId) -> Lane:
        if not self._lanes:
            asyncio.get_running_loop().call_soon(self.flush)
        lane = self._lanes[partition] = Lane(partition, [], [], [])
        return lane

    @property
    def in_flight(self) -> int:
        """Number of operations that were sent and are not answered."""
        return len(self.flight.pending)

    async def call(self, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Make a call between replicas and return its answer. Raises Overloaded, OutcomeUnknown, Unavailable if the
        link was lost after it had been opened, and the error that the other side raised."""
        if not self.is_open:
            raise Unavailable(f"the link to {self.server} was lost")
        return await self._calls.make(partition, method, body, timeout_s)

    def close(self) -> None:
        self.is_open = False
        self.flight.is_closed_for_more = True  # operations submitted before the loss is noticed go elsewhere
        if self._stream is not None:
            self._stream.abort()

    # ── the connection ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Stream) -> None:
        self._stream = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        transport.write(self._caller.hello())

    def data_received(self, data: bytes) -> None:
        self.received_at = self._links.now()
        self._frame_bytes += len(data)
        try:
            if not self.is_open:
                data = self._finish_handshake(data)
            if data:
                message = None
                for message in self._frames.feed(data):
                    self._take(message)
                if message is not None:
                    self._frame_bytes = 0
        except FrameError as error:
            self._links.report_fault(self.server, error)
            self.fail_opening(error)
            self.close()

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail_opening(exc or ConnectionResetError(f"{self.server} closed the connection"))
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._links.lost(self)
        self._report_loss()

    def pause_writing(self) -> None:
        self._is_full = True
        self._note_capacity()

    def resume_writing(self) -> None:
        self._is_full = False
        self._note_capacity()

    def _note_capacity(self) -> None:
        self.flight.is_closed_for_more = self._is_full or self._is_leaving or self._is_outdated or not self.is_open

    def _finish_handshake(self, data: bytes) -> bytes:
        """Prove that this server belongs to the cluster, and verify the proof of the other side. Return the received
        bytes that follow the handshake."""
        proof, rest = self._caller.take(data)
        self._write(proof)
        if not self._caller.is_proven:
            return b""
        self.is_open = True
        self._swept_at = self._links.now()
        self._timer = asyncio.get_running_loop().call_later(self._links.beat.delay_s(SWEEP_S), self._sweep)
        if not self.opened.done():
            self.opened.set_result(None)
        self._links.dispatcher.link_opened(self.flight)
        return rest

    def fail_opening(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # no caller needs to wait for it

    def _write(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.write(data)

    def flush(self) -> None:
        """Send the operations that were submitted in this turn of the event loop."""
        if not (self.is_open and self._lanes):
            return
        lanes, self._lanes = list(self._lanes.values()), {}
        if SINCE and self.version < LINK_LATEST:
            lanes = self._known_there(lanes)
            if not lanes:
                return
        if self._traces.live and (call := announced(self.flight, lanes)) is not None:
            self._write(frames.encode(call))
        try:
            self._write(self._encoded(lanes))
        except FrameError:
            for lane in lanes:
                self._send_singly(lane)

    def _send_singly(self, lane: Lane) -> None:
        """Send each operation in its own frame, because all of them together exceed the size of a frame."""
        for number, op in sorted([*lane.gets, *lane.puts, *lane.others]):
            single = Lane(lane.partition, [], [], [(number, op)])
            self._write(self._encoded([single]))

    def _encoded(self, lanes: list[Lane]) -> bytes:
        return frames.encode(Operations(self._links.dispatcher.topology.ring.routed, lanes, self._results))

    # ── what comes back ───────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, message: frames.Message) -> None:
        match message:
            case Operations() | Call():
                raise FrameError(f"unexpected {type(message).__name__} from the answering side")
            case Results():
                self._take_results(message)
            case Answer():
                self._calls.take(message)
            case Ping():
                pass
            case Goodbye():
                self._is_leaving = True
                self._note_capacity()
        if self._is_leaving and self._stream is not None and not self._has_outstanding_calls():
            self._stream.close()
        if self._is_outdated and not self.flight.pending:
            self.close()

    def _has_outstanding_calls(self) -> bool:
        return bool(self.flight.pending) or not self._calls.are_answered()

    def _take_results(self, results: Results) -> None:
        if results.others:
            self._take_refusals(results.others)
        self._results += 1
        for partition, seq, time_ms in results.progress:
            self._links.dispatcher.note_progress(PartitionId(partition), seq, time_ms)
        reads = self.flight.reads
        if reads.is_on or self._frame_bytes > LARGE_BYTES:
            _note_sizes(self.flight, results, self._links.now())
        for column in (results.numbers, results.records, results.others):
            if column:
                self._complete([number for number, _ in column], [result for _, result in column])
        if results.absent:
            self._complete(results.absent, [None] * len(results.absent))
        self._answers.flush()
        if reads.count:
            self._links.dispatcher.reads_answered(self.flight)

    def _complete(self, numbers: list[int], results: list[Any]) -> None:
        """Complete these operations of the flight. Some of them may already have ended."""
        ended = list(map(self.flight.pending.pop, numbers, repeat(None)))
        there = [(entry[1], result) for entry, result in zip(ended, results, strict=True) if entry is not None]
        self.flight.bytes -= sum([pending.size for pending, _ in there])
        self._answers.deliver_all([(pending.sink, pending.token, result) for pending, result in there])

    def _take_refusals(self, results: list[tuple[int, Any]]) -> None:
        """Take back refused operations. They are routed again before any later operation is submitted. Operations
        that were submitted before this frame arrived are marked accordingly (docs/protocol.md M15)."""
        refused = sorted((each for each in results if isinstance(each[1], NotLeader | Moved)), key=itemgetter(0))
        if refused:
            self.flush()
            self._links.dispatcher.take_refusals(self.flight, refused)

    # ── loss and silence ──────────────────────────────────────────────────────────────────────────────────────────────

    def _report_loss(self) -> None:
        """Report the loss of the connection to the dispatcher and to the waiting callers, together with everything
        unsent."""
        columns = (column for lane in self._lanes.values() for column in (lane.gets, lane.puts, lane.others))
        unsent = (number for column in columns for number, _ in column)
        first_unsent = min(unsent, default=self.flight.last_number + 1)
        self._links.dispatcher.link_lost(self.flight, first_unsent)
        self._lanes = {}
        self._calls.lose()

    def _sweep(self) -> None:
        """End operations that have waited too long, and close the link if it owes answers and is silent."""
        now = self._links.now()
        self._timer = asyncio.get_running_loop().call_later(self._links.beat.delay_s(SWEEP_S), self._sweep)
        since_s, self._swept_at = now - self._swept_at, now
        if since_s > STALLED_S:
            self.received_at = now  # this process was paused: first it reads what has arrived meanwhile
            return
        if self.version < self._links.version_to(self.server):
            # docs/protocol.md V3. The link ends once no operation is in progress, to be replaced by one of the higher
            # version.
            # Calls are lost and repeated by their callers, because a call that waits for news is nearly always in
            # progress.
            self._is_outdated = True
            self._note_capacity()
        if self._is_outdated and not self.flight.pending:
            self.close()
            return
        owes = self._has_outstanding_calls()
        if owes and now - self.received_at > SILENCE_S:
            log.warning("server=%s has been silent for %.1f s, closing the link", self.server, now - self.received_at)
            self.close()
            return
        if not owes:
            self.received_at = now
        elif now - self.received_at > SILENCE_S / 3:
            self._write(frames.encode(Ping(0)))
        if self.flight.reads.is_on:
            self._links.dispatcher.reads_answered(self.flight, is_check=True)
        if not self.flight.pending:
            if self._sweeps:
                self._sweeps.clear()
                self.flight.forget_keys()
            return
        self.flight.forget_keys()
        self._sweeps.append((now, self.flight.last_number))
        expired = 0
        while self._sweeps and now - self._sweeps[0][0] > OPERATION_TIMEOUT_S:
            expired = self._sweeps.popleft()[1]
        self._expire(expired)

    def _expire(self, up_to: int) -> None:
        sinks: dict[int, Sink] = {}
        for pending in self.flight.end_up_to(up_to):
            reason = f"{self.server} did not answer within {OPERATION_TIMEOUT_S} s"
            is_read = pending.op.code in READS
            pending.sink.complete(pending.token, Unavailable(reason) if is_read else OutcomeUnknown(reason))
            sinks[id(pending.sink)] = pending.sink
        for sink in sinks.values():
            sink.flush()

    # ── silence ───────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md P40
    def last_received_at(self, now: float) -> float:
        """Return the time at which bytes last arrived from the other side of a lost link; `now` if this process was
        just paused."""
        return self.received_at if self._is_awake(now) else now

    # docs/protocol.md P40
    def silent_s(self, now: float) -> float | None:
        """Return the seconds for which the other side has owed an answer and sent nothing, not even a ping echo.
        Return None if that time is short, if the other side owes nothing, or if this process was just paused."""
        silent_s = now - self.received_at
        return silent_s if silent_s >= QUIET_S and self._is_awake(now) and self._has_outstanding_calls() else None

    def _is_awake(self, now: float) -> bool:
        return now - self._swept_at <= STALLED_S

    # ── operations that the other side does not know ──────────────────────────────────────────────────────────────────

    # docs/protocol.md V3
    def _known_there(self, lanes: list[Lane]) -> list[Lane]:
        """Remove and refuse the operations that the other side does not know and would reject as malformed, and
        return the remaining lanes. The refusals are delivered soon, not inside this call."""
        unknown: dict[int, int] = {}
        for lane in lanes:
            wanted = [(number, version_of(op)) for number, op in lane.others]
            its = {number: version for number, version in wanted if link_version(version) > self.version}
            lane.others[:] = [each for each in lane.others if each[0] not in its]
            unknown |= its
        if unknown:
            asyncio.get_running_loop().call_soon(self._refuse, unknown)
        return [lane for lane in lanes if lane.gets or lane.puts or lane.others]

    def _refuse(self, unknown: dict[int, int]) -> None:
        """Refuse operations. `unknown` maps the number of each to the cluster version that it needs."""
        errors = [
            NotYetRaised(
                f"expected cluster version {version}, but server {self.server}, which leads the partition, does not "
                "support it; "
                f"upgrade all servers to {build_for(version)}"
            )
            for version in unknown.values()
        ]
        self._complete(list(unknown), errors)
        self._answers.flush()


def _note_sizes(flight: Flight, results: Results, now: float) -> None:
    """Record for which clients large values have arrived, before the clients receive them."""
    reads, pending = flight.reads, flight.pending
    for number, record in results.records:
        size = len(record[0])
        if size > LARGE_BYTES and number in pending:
            reads.note_large(pending[number][1].sink.line, size, now)
        reads.ended(number, size, now)
    for number in results.absent:
        reads.ended(number, 0, now)
    for number, result in results.others:
        if not isinstance(result, NotLeader | Moved):
            reads.ended(number, 0, now)
