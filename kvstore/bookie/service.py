"""A bookie's connections: frames in, storage calls, frames out. Fed with bytes by the event loop or the simulator.

Answers leave in the order in which they become ready, gathered into one write per turn of the loop. Who reads no
answers is not read from either, nor is a client with too many adds under way: it would take a refusal for a fault of
this bookie, and turn to others. A connection is answered in the version of the protocol that it speaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connection_limits import UNREAD_HIGH_BYTES, Answers, has_room, may_poll, silent_one
from kvstore.bookie.reader import ReadDone
from kvstore.bookie.sparing import SparingLog
from kvstore.bookie.storage import BookieStorage
from kvstore.bookie.turns import Turns
from kvstore.env.ports import Stream
from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto import version_two
from kvstore.proto.availability import encode_availability
from kvstore.proto.bookkeeper import LAST_ENTRY, BadFrame, BadRequest, Operation, Status
from kvstore.proto.frames import FrameReader
from kvstore.proto.version_two import BatchRead

log = logging.getLogger(__name__)

WRITE_BYTES = 1 << 20
"""Answers gathered in one turn of the loop before they are written."""
HARD_FACTOR = 4
"""How far what recovery reads may exceed a connection's limit before the connection is not read for a while."""

_ADD = int(Operation.ADD_ENTRY)
_NEGATIVE = (Status.NO_LEDGER, Status.NO_ENTRY)


class BookieService:
    """Makes a handler for each connection, and closes them all."""

    def __init__(self, storage: BookieStorage, config: BookieConfig) -> None:
        self.storage = storage
        self.config = config
        self.connections: dict[BookieConnection, None] = {}
        self.log = SparingLog(log)
        self.lists = Turns()
        """Of the entries of a ledger: one with many holes takes long."""
        self.polls = 0
        """Long polls that wait, of all connections."""

    def handler(self) -> BookieConnection:
        """The handler of a new connection."""
        return BookieConnection(self)

    def close(self) -> None:
        """End all connections at once; what they wait for is answered to nobody."""
        for connection in list(self.connections):
            connection.abort()


class BookieConnection:
    """One client."""

    def __init__(self, service: BookieService) -> None:
        self._service = service
        self._storage = service.storage
        self._statistics = service.storage.statistics
        self._config = service.config
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(wire.PAYLOAD_MAX)
        self._answers: Answers = wire
        self._backlog: deque[bytes] = deque()
        """Requests held back while the client does not read its answers, or there is no room for adds."""
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_flush_due = False
        self._is_choked = False
        self._is_reading_paused = False
        self._is_closed = True
        self.has_asked = self._is_named = False
        """The client has said which bookie it means, and it is this one."""
        self._pending = 0
        """Requests under way that are no adds."""
        self._adds = 0
        self._add_bytes = 0
        self._is_serve_due = False
        self._polls: dict[object, Callable[[], None]] = {}
        """How to take back each long poll that waits."""
        self._transport: Stream
        self._calls: dict[int, Callable[[int, pb.Request], None]] = {
            Operation.READ_ENTRY: self._read,
            Operation.AUTH: self._auth,
            Operation.WRITE_LAC: self._write_lac,
            Operation.READ_LAC: self._read_lac,
            Operation.GET_BOOKIE_INFO: self._info,
            Operation.FORCE_LEDGER: self._force,
            Operation.LIST_ENTRIES: self._list,
        }

    # The stream

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        connections = self._service.connections
        if len(connections) >= self._config.connections_max:
            silent = silent_one(connections)
            gone = "a silent" if silent else "a new"
            self._service.log.say(logging.WARNING, "there are %d connections: %s is closed", len(connections), gone)
            if silent is None:
                return self.abort()
            silent.has_asked = True  # it gives way once
            silent.abort()
        self._is_closed = False
        connections[self] = None
        self._statistics.connections += 1
        transport.set_write_buffer_limits(high=min(UNREAD_HIGH_BYTES, self._config.connection_bytes_max))

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._backlog.extend(self._frames.feed(data))
        self.has_asked |= bool(self._backlog)
        self._serve()
        if self._frames.fault and not self._is_closed:
            self._give_up(self._frames.fault)

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._service.connections.pop(self, self) is None:
            self._statistics.connections -= 1
        self._is_closed = True
        self._backlog.clear()
        self._out.clear()
        for take_back in self._polls.values():
            take_back()
        self._service.polls -= len(self._polls)
        self._polls.clear()

    @property
    def unread_bytes(self) -> int:
        """Answers that the client has not read."""
        return self._out_bytes + self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        self._is_choked = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_choked = False
        self._serve()

    def abort(self) -> None:
        """Close at once."""
        self._is_closed = True
        self._transport.abort()

    def _give_up(self, reason: str) -> None:
        self._statistics.bad_requests += 1
        self._service.log.say(logging.WARNING, "peer=%s closed: %s", self._transport.get_extra_info("peername"), reason)
        self._flush()
        self._is_closed = True
        self._transport.close()

    def _serve(self) -> None:
        """Handle what has arrived, as far as the client takes its answers and there is room for adds."""
        self._is_serve_due = False
        backlog = self._backlog
        while backlog and not (self._is_choked or self._is_closed or self._lacks_room(backlog[0])):
            self._handle(backlog.popleft())
            if self._out_bytes > WRITE_BYTES:
                self._flush()
        self._update_reading()

    # docs/protocol.md B12
    def _lacks_room(self, payload: bytes) -> bool:
        """Whether the next request waits at the door; what comes behind it does too, and so keeps its place."""
        if self._adds >= self._config.connection_pending_max or self._add_bytes >= self._config.connection_bytes_max:
            return True  # goes on in _added
        if self._storage.adds.is_busy:
            self._storage.door.wait(self._serve)
            return True
        if self._storage.admission.is_busy and self._may_ask(payload):
            self._storage.gate.wait(self._serve)
            return True
        return False

    def _may_ask(self, payload: bytes) -> bool:
        """Whether a request may have to wait for the metadata store. What cannot be understood does not."""
        may_ask = self._storage.may_ask
        if (plain := wire.plain_add(payload)) is not None:
            _, ledger, _, key, body = plain
            return may_ask(ledger, key, body, is_writers=True)
        try:
            request = self._decode(payload)
        except (BadFrame, BadRequest):
            return False
        if isinstance(request, BatchRead):
            return request.fence_key is not None and may_ask(request.ledger, request.fence_key)
        add, read, lac = request.add, request.read, request.write_lac
        match request.header.operation:
            case Operation.ADD_ENTRY:
                is_writers = add.flag != pb.AddRequest.RECOVERY_ADD
                return may_ask(add.ledger, add.master_key, add.body, is_writers=is_writers)
            case Operation.READ_ENTRY:
                return read.flag == pb.ReadRequest.FENCE_LEDGER and may_ask(read.ledger, read.master_key)
            case Operation.WRITE_LAC:
                return may_ask(lac.ledger, lac.master_key, lac.body)
        return False

    def _decode(self, payload: bytes) -> pb.Request | BatchRead:
        is_version_two = payload.startswith(version_two.MARK)
        return version_two.decode_request(payload) if is_version_two else wire.decode_request(payload)

    def _update_reading(self) -> None:
        if self._is_closed:
            return
        is_over = (
            self._is_choked or bool(self._backlog) or self._pending > HARD_FACTOR * self._config.connection_pending_max
        )
        if is_over != self._is_reading_paused:
            self._is_reading_paused = is_over
            (self._transport.pause_reading if is_over else self._transport.resume_reading)()

    def _send(self, frame: bytes) -> None:
        if self._is_closed:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._out and not self._is_closed:
            data = b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            self._transport.write(data)

    # Requests

    def _handle(self, payload: bytes) -> None:
        plain = wire.plain_add(payload)
        if plain is not None:
            self._add(*plain)
            return
        try:
            if payload.startswith(version_two.MARK):
                self._answers = version_two
            request = self._decode(payload)
        except BadFrame as error:
            self._give_up(str(error))
            return
        except BadRequest as error:
            self._statistics.bad_requests += 1
            self._send(wire.encode_status(error.txn, error.operation, Status.BAD_REQUEST))
            return
        if isinstance(request, BatchRead):
            self._batch_read(request)
            return
        header = request.header
        operation: int = header.operation
        if header.version != pb.VERSION_THREE:
            self._send(wire.encode_status(header.txn_id, operation, Status.BAD_VERSION))
        elif not self._is_named and len(request.context) and not self._is_meant(request):
            self._send(wire.encode_status(header.txn_id, operation, Status.UNKNOWN_LEDGER_STATE))
            self._give_up(f"it means another bookie than {self._storage.bookie}")
        elif operation == _ADD:
            add = request.add
            is_recovery = add.flag == pb.AddRequest.RECOVERY_ADD
            self._add(header.txn_id, add.ledger, add.entry, add.master_key, add.body, is_recovery)
        else:
            call = self._calls.get(operation)
            if call is not None:
                call(header.txn_id, request)
            else:
                self._send(wire.encode_status(header.txn_id, operation, Status.BAD_REQUEST))

    def _is_meant(self, request: pb.Request) -> bool:
        """False if the client names another bookie: one whose disk or address this bookie may have inherited."""
        for pair in request.context:
            if pair.key == wire.BOOKIE_KEY:
                self._is_named = pair.value == self._storage.bookie
                return self._is_named
        return True

    def _begin(self, *, is_priority: bool) -> bool:
        """Count a request that is no add in; False if this connection has too many under way."""
        if not is_priority and self._pending >= self._config.connection_pending_max:
            self._statistics.refused_overload += 1
            return False
        self._pending += 1
        return True

    def _end(self) -> None:
        self._pending -= 1
        if self._is_reading_paused:
            self._update_reading()

    def _add(self, txn: int, ledger: int, entry: int, key: bytes, body: bytes, is_recovery: bool = False) -> None:
        size = len(body)
        self._adds += 1
        self._add_bytes += size
        done = partial(self._added, txn, ledger, entry, size)
        self._storage.add(ledger, entry, body, key, recovery=is_recovery, done=done)

    def _added(self, txn: int, ledger: int, entry: int, size: int, status: Status) -> None:
        self._adds -= 1
        self._add_bytes -= size
        if self._backlog and not self._is_serve_due:
            self._is_serve_due = True
            self._loop.call_soon(self._serve)
        self._send(self._answers.encode_add_response(txn, status, ledger, entry))

    def _read(self, txn: int, request: pb.Request) -> None:
        read = request.read
        is_fence = read.flag == pb.ReadRequest.FENCE_LEDGER
        is_poll = read.HasField("previous_lac") and not is_fence
        if is_poll and read.entry != LAST_ENTRY:
            self._send(wire.encode_read_response(txn, Status.BAD_REQUEST, read.ledger, read.entry))
            return
        if not self._begin(is_priority=is_fence or request.header.priority > 0):
            self._send(self._answers.encode_read_response(txn, Status.TOO_MANY_REQUESTS, read.ledger, read.entry))
            return
        done = partial(self._have_read, txn, read.ledger, is_fence)
        if is_poll:
            self._poll(read, done)
            return
        key = read.master_key if read.HasField("master_key") else None
        self._storage.read(read.ledger, read.entry, key=key, fence=is_fence, done=done)

    # docs/protocol.md B12
    def _poll(self, read: pb.ReadRequest, have_read: ReadDone) -> None:
        if not may_poll(len(self._polls), self._service.polls):
            self._statistics.refused_overload += 1
            have_read(Status.TOO_MANY_REQUESTS, read.entry, None, -1)
            return
        poll, is_answered = object(), False

        def done(status: Status, entry: int, body: bytes | None, lac: int) -> None:
            nonlocal is_answered
            is_answered = True
            self._service.polls -= self._polls.pop(poll, None) is not None
            have_read(status, entry, body, lac)

        take_back = self._storage.long_poll(read.ledger, read.previous_lac, read.timeout_ms, done=done)
        if not is_answered:
            self._polls[poll] = take_back
            self._service.polls += 1

    def _have_read(
        self, txn: int, ledger: int, is_fence: bool, status: Status, entry: int, body: bytes | None, lac: int
    ) -> None:
        def answer(status: Status) -> None:
            self._end()
            fits = is_fence or not body or has_room(self, len(body), self._service.connections)
            if not fits:
                self._statistics.refused_overload += 1
                status = Status.TOO_MANY_REQUESTS
            max_lac = lac if status is Status.OK and not is_fence else None
            self._send(self._answers.encode_read_response(txn, status, ledger, entry, body if fits else None, max_lac))

        self._when_deniable(status, ledger, answer)

    def _batch_read(self, asked: BatchRead) -> None:
        """The first entry as in a read of it alone; those after it if they are here and fit."""

        def have_first(status: Status, _entry: int, first: bytes | None, _lac: int) -> None:
            def answer(status: Status) -> None:
                self._end()
                bodies = [] if first is None else self._batch(asked, first)
                if first is not None and not bodies:
                    self._statistics.refused_overload += 1
                    status = Status.TOO_MANY_REQUESTS
                self._send(version_two.encode_batch_response(asked, status, bodies))

            self._when_deniable(status, asked.ledger, answer)

        is_fence = asked.fence_key is not None
        if self._begin(is_priority=is_fence or asked.is_priority):
            self._storage.read(asked.ledger, asked.entry, key=asked.fence_key, fence=is_fence, done=have_first)
        else:
            self._send(version_two.encode_batch_response(asked, Status.TOO_MANY_REQUESTS, ()))

    def _batch(self, asked: BatchRead, first: bytes) -> list[bytes]:
        """As many entries as may be kept until the client reads them; none if there is no room for any."""
        connections, (_, size_max) = self._service.connections, asked.limits
        if has_room(self, max(len(first), size_max), connections):
            return self._storage.reader.read_on(asked.ledger, asked.entry, first, asked.limits)
        return [first] if asked.fence_key is not None or has_room(self, len(first), connections) else []

    def _when_deniable(self, status: Status, ledger: int, answer: Callable[[Status], None]) -> None:
        """Give the status as the answer. "Not here" is said to a client that has not named this bookie only if it is
        true of the bookie that the client may mean; otherwise the bookie does not know."""
        if status not in _NEGATIVE or self._is_named:
            answer(status)
            return

        def on_answer(may_deny: bool) -> None:
            self._statistics.refused_unknown += not may_deny
            answer(status if may_deny else Status.UNKNOWN_LEDGER_STATE)

        self._storage.admission.ask_denial(ledger, on_answer)

    def _write_lac(self, txn: int, request: pb.Request) -> None:
        part = request.write_lac
        ledger = part.ledger
        if not self._counted(txn, Operation.WRITE_LAC, ledger, request):
            return

        def done(status: Status) -> None:
            self._end()
            self._send(wire.encode_status(txn, Operation.WRITE_LAC, status, ledger))

        self._storage.write_lac(ledger, part.body, part.master_key, done=done)

    def _counted(self, txn: int, operation: Operation, ledger: int, request: pb.Request) -> bool:
        """Count a question in, or refuse it."""
        if self._begin(is_priority=request.header.priority > 0):
            return True
        self._send(wire.encode_status(txn, operation, Status.TOO_MANY_REQUESTS, ledger))
        return False

    def _read_lac(self, txn: int, request: pb.Request) -> None:
        ledger = request.read_lac.ledger
        if not self._counted(txn, Operation.READ_LAC, ledger, request):
            return

        def done(status: Status, lac_body: bytes | None, last_entry: bytes | None) -> None:
            def answer(status: Status) -> None:
                self._end()
                self._send(wire.encode_read_lac_response(txn, status, ledger, lac_body, last_entry))

            self._when_deniable(status, ledger, answer)

        self._storage.read_lac(ledger, done=done)

    def _list(self, txn: int, request: pb.Request) -> None:
        ledger = request.list_entries.ledger
        if not self._counted(txn, Operation.LIST_ENTRIES, ledger, request):
            return

        def look(ended: Callable[[], None]) -> None:
            def done(status: Status, runs: Any) -> None:
                ended()
                self._have_listed(txn, ledger, status, runs)

            if self._is_closed:
                ended()
            else:
                self._storage.list_entries(ledger, done=done)

        self._service.lists.add(self, look)

    def _have_listed(self, txn: int, ledger: int, status: Status, runs: Any) -> None:
        availability = encode_availability(runs) if status is Status.OK else None
        if availability is not None and not has_room(self, len(availability), self._service.connections):
            self._statistics.refused_overload += 1
            status, availability = Status.TOO_MANY_REQUESTS, None

        def answer(status: Status) -> None:
            self._end()
            self._send(wire.encode_list_response(txn, status, ledger, availability))

        self._when_deniable(status, ledger, answer)

    def _force(self, txn: int, request: pb.Request) -> None:
        ledger = request.force_ledger.ledger
        if not self._counted(txn, Operation.FORCE_LEDGER, ledger, request):
            return

        def done(status: Status) -> None:
            self._end()
            self._send(wire.encode_status(txn, Operation.FORCE_LEDGER, status, ledger))

        self._storage.force(ledger, done=done)

    def _info(self, txn: int, request: pb.Request) -> None:
        requested = request.bookie_info.requested
        total, free = self._storage.space()
        self._send(
            wire.encode_info_response(
                txn,
                total if requested & wire.TOTAL_CAPACITY else None,
                free if requested & wire.FREE_SPACE else None,
            )
        )

    def _auth(self, txn: int, _request: pb.Request) -> None:
        self._send(self._answers.encode_auth_response(txn))
