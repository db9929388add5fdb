"""A bookie's connections: frames in, storage calls, frames out. The event loop or the simulator feeds them with bytes.

Answers leave in the order in which they become ready, batched into one write per turn of the event loop. A connection
is not read while its client does not read its answers. It is not read either while it has too many adds in progress,
because the client would take a refusal for a failure of this bookie and use another one. A connection is answered in
the protocol version that it speaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.limits import UNREAD_HIGH_BYTES, ResponseEncoders
from kvstore.bookie.connections.requests import RequestHandler
from kvstore.bookie.directories.spread import AnyStorage
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.turns import FairQueue
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.ports import Stream
from kvstore.env.shares import Shares
from kvstore.env.turn_budget import TurnBudget
from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto import version_two
from kvstore.proto.bookkeeper import BadFrame, BadRequest, BookieOperation, Status
from kvstore.proto.frames import FrameReader
from kvstore.proto.version_two import BatchRead

log = logging.getLogger(__name__)

WRITE_BYTES = 1 << 20
"""Bytes of answers gathered in one turn of the event loop before they are written."""
HARD_FACTOR = 4
"""How far recovery reads may exceed a connection's limit before the connection is not read for a while."""
TURN_REQUESTS, UNCOUNTED_MAX = 2_048, 64
"""Number of requests that all connections together begin in one turn of the event loop, and number of requests of one
delivery that do not count. A client could otherwise send 600,000 requests in a turn, which take seconds."""
CLUSTER_SHOWN_MAX = 64
"""Maximum number of characters of an unauthenticated peer's claim in the log."""

_ADD = int(BookieOperation.ADD_ENTRY)


class BookieService:
    """Creates a handler for each connection to the bookie, and limits and closes the connections."""

    def __init__(
        self,
        storage: AnyStorage,
        config: BookieConfig,
        cluster: str = "",
        is_user: Callable[[Stream], bool] = lambda _: False,
        known: KnownNetworks | None = None,
    ) -> None:
        """`cluster` is the instance id of the bookie's cluster; if it is empty, clients of any cluster are served.
        `is_user` returns True if a client presents the certificate of a user of the cluster. `known` are networks, such
        as those of the other nodes, whose connections are closed only in favour of each other."""
        self.known = known = KnownNetworks() if known is None else known
        self.idle: Shares[BookieConnection] = Shares(known)
        """Connections that have not sent a request yet."""
        self.active: Shares[BookieConnection] = Shares(known)
        """Connections that have sent at least one request."""
        self.cluster = cluster
        self.storage = storage
        self.config = config
        self.is_user = is_user
        self.connections: dict[BookieConnection, None] = {}
        self.log = RateLimitedLog(log)
        self.lists = FairQueue()
        """Lists of a ledger's entries; a ledger with many holes takes long."""
        self.polls = 0
        """Number of waiting long polls, over all connections."""
        self.turn = TurnBudget(TURN_REQUESTS)
        self.is_closed = False

    def handler(self) -> BookieConnection:
        """Return the handler of a new connection."""
        return BookieConnection(self)

    def admit(self, connection: BookieConnection, host: str) -> bool:
        """Give a new connection a slot. If none is free, close an idle connection, or a connection of a network that
        has more connections. Return False if there is no connection to close."""
        network = network_of(host)
        self.idle.add(connection, network)
        if len(self.connections) < self.config.connections_max:
            return True
        gone = self.idle.first_to_go()
        if gone is connection:
            gone = self.active.displaced_by(network)
        self.log.emit(
            logging.WARNING, "connection limit reached, closing a connection connections=%d", len(self.connections)
        )
        if gone is None:
            self.forget(connection)
            return False
        self.forget(gone)
        gone.abort()
        return True

    def note_request(self, connection: BookieConnection, host: str) -> None:
        """Record that a connection has sent its first request."""
        if self.idle.discard(connection):
            self.active.add(connection, network_of(host))

    def forget(self, connection: BookieConnection) -> None:
        self.idle.discard(connection)
        self.active.discard(connection)

    def refused_plain(self) -> None:
        """Count a client that has sent a request without TLS to a port that requires TLS."""
        self.storage.statistics.refused_plain += 1
        self.log.emit(logging.WARNING, "refused a client without TLS; it must begin with START_TLS")

    def refused_user(self) -> None:
        """Count a client that was refused because its certificate belongs to a user or names no node."""
        self.storage.statistics.refused_user += 1
        self.log.emit(logging.WARNING, "refused a client because of its certificate: it is a user's, or names no node")

    def close(self) -> None:
        """Abort all connections at once. Connections in their handshake are aborted when the handshake ends.
        Outstanding answers are not sent."""
        self.is_closed = True
        for connection in list(self.connections):
            connection.abort()


class BookieConnection:
    """A connection with one client."""

    def __init__(self, service: BookieService) -> None:
        self._service = service
        self._storage = storage = service.storage
        self._statistics, self._sync_gate, self._metadata_gate = (
            storage.statistics,
            storage.sync_gate,
            storage.metadata_gate,
        )
        self._config = service.config
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(wire.PAYLOAD_MAX)
        self.answers: ResponseEncoders = wire
        self._backlog: deque[bytes] = deque()
        """Requests held back while the client does not read its answers, or no more adds fit."""
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_flush_due = False
        self._is_write_paused = False
        self._is_reading_paused = False
        self.is_closed = True
        self._has_sent_request = self.is_named = False
        """True if the client has named the bookie that it means, and it is this one."""
        self._takes_raw = service.storage.raw.is_on
        self._adds = 0
        self._add_bytes = 0
        self._is_serve_due = False
        self._transport: Stream
        self._requests = RequestHandler(self, service, service.storage, service.config)

    # The stream

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._service.is_closed:
            return self.abort()
        if self._service.is_user(transport):  # docs/protocol.md B33
            self._service.refused_user()
            return self.abort()
        if transport.get_extra_info("peercert"):  # verified in the handshake
            self._service.known.note(network_of(self._host))
        if not self._service.admit(self, self._host):
            return self.abort()
        self.is_closed = False
        self._service.connections[self] = None
        self._statistics.connections += 1
        transport.set_write_buffer_limits(high=min(UNREAD_HIGH_BYTES, self._config.connection_bytes_max))

    def data_received(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._backlog.extend(self._frames.feed(data))
        if self._backlog and not self._has_sent_request:
            self._has_sent_request = True
            self._service.note_request(self, self._host)
        self._serve()
        if self._frames.fault and not self.is_closed:
            self._close_faulty(self._frames.fault)

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.forget(self)
        if self._service.connections.pop(self, self) is None:
            self._statistics.connections -= 1
        self.is_closed = True
        self._backlog.clear()
        self._out.clear()
        self._requests.cancel_polls()

    @property
    def _host(self) -> str:
        """The client's address, without the port."""
        return str((self._transport.get_extra_info("peername") or ("?", 0))[0])

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that the client has not read."""
        return self._out_bytes + self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._serve()

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_closed = True
        self._transport.abort()

    def _close_faulty(self, reason: str) -> None:
        self._statistics.bad_requests += 1
        self._service.log.emit(
            logging.WARNING, "connection closed peer=%s reason=%s", self._transport.get_extra_info("peername"), reason
        )
        self._flush()
        self.is_closed = True
        self._transport.close()

    def _serve(self) -> None:
        """Handle received requests, as long as the client reads its answers and adds are within the limits."""
        self._is_serve_due = False
        backlog, turn, begun = self._backlog, self._service.turn, 0
        while backlog and not (
            self._is_write_paused or self.is_closed or turn.is_used_up or self._must_wait(backlog[0])
        ):
            self._handle(backlog.popleft())
            begun += 1
            if begun > UNCOUNTED_MAX:
                turn.take(1)
            if self._out_bytes > WRITE_BYTES:
                self._flush()
        if backlog and turn.is_used_up:
            turn.wait(self._serve)
        if backlog or self._is_write_paused or self._is_reading_paused or self._requests.pending:
            self._update_reading()

    # docs/protocol.md B12
    def _must_wait(self, payload: bytes) -> bool:
        """Return True if the next request must wait. Later requests then wait behind it, which keeps their order."""
        if self._adds >= self._config.connection_pending_max or self._add_bytes >= self._config.connection_bytes_max:
            return True  # continues in _added
        if self._sync_gate.is_shut:
            self._sync_gate.wait(self._serve)
            return True
        if self._metadata_gate.is_shut and self._may_ask(payload):
            self._metadata_gate.wait(self._serve)
            return True
        return False

    def _may_ask(self, payload: bytes) -> bool:
        """Return True if a request may have to wait for the metadata store. A malformed request does not."""
        may_ask = self._storage.may_ask
        if (plain := _plain_add(payload)) is not None:
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
            case BookieOperation.ADD_ENTRY:
                is_writers = add.flag != pb.AddRequest.RECOVERY_ADD
                return may_ask(add.ledger, add.master_key, add.body, is_writers=is_writers)
            case BookieOperation.READ_ENTRY:
                return read.flag == pb.ReadRequest.FENCE_LEDGER and may_ask(read.ledger, read.master_key)
            case BookieOperation.WRITE_LAC:
                return may_ask(lac.ledger, lac.master_key, lac.body)
        return False

    def _decode(self, payload: bytes) -> pb.Request | BatchRead:
        is_version_two = payload.startswith(version_two.MARK)
        return version_two.decode_request(payload) if is_version_two else wire.decode_request(payload)

    def _update_reading(self) -> None:
        if self.is_closed:
            return
        is_over = (
            self._is_write_paused
            or bool(self._backlog)
            or self._requests.pending > HARD_FACTOR * self._config.connection_pending_max
        )
        if is_over != self._is_reading_paused:
            self._is_reading_paused = is_over
            (self._transport.pause_reading if is_over else self._transport.resume_reading)()

    def send(self, frame: bytes) -> None:
        if self.is_closed:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def request_ended(self) -> None:
        """Record that a request has ended, so that another one may begin."""
        if self._is_reading_paused:
            self._update_reading()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._out and not self.is_closed:
            out, self._out, self._out_bytes = self._out, [], 0
            data = b"".join(out)
            self._transport.write(data)

    # Requests

    def _handle(self, payload: bytes) -> None:
        if payload.startswith(version_two.MARK):
            self.answers = version_two
        plain = _plain_add(payload)
        if plain is not None:
            self._add(*plain)
            return
        try:
            request = self._decode(payload)
        except BadFrame as error:
            self._close_faulty(str(error))
            return
        except BadRequest as error:
            self._statistics.bad_requests += 1
            self.send(wire.encode_status(error.txn, error.operation, Status.BAD_REQUEST))
            return
        if isinstance(request, BatchRead):
            self._requests.ask_batch(request)
            return
        header = request.header
        operation: int = header.operation
        if header.version != pb.VERSION_THREE:
            self.send(wire.encode_status(header.txn_id, operation, Status.BAD_VERSION))
        elif not self.is_named and len(request.context) and (other := self._other_cluster(request)):
            self._statistics.refused_cluster += 1
            self.send(wire.encode_status(header.txn_id, operation, Status.UNAUTHORIZED))
            self._close_faulty(f"{self._storage.bookie} is of cluster {self._service.cluster}, the client of {other}")
        elif not self.is_named and len(request.context) and not self._is_meant(request):
            self.send(wire.encode_status(header.txn_id, operation, Status.UNKNOWN_LEDGER_STATE))
            self._close_faulty(f"the client means another bookie than {self._storage.bookie}")
        elif operation == _ADD:
            add = request.add
            is_recovery = add.flag == pb.AddRequest.RECOVERY_ADD
            self._add(header.txn_id, add.ledger, add.entry, add.master_key, add.body, is_recovery)
        else:
            self._requests.ask(operation, header.txn_id, request)

    def _is_meant(self, request: pb.Request) -> bool:
        """Return False if the client means another bookie, whose disk or address this bookie may have inherited."""
        for pair in request.context:
            if pair.key == wire.BOOKIE_KEY:
                self.is_named = pair.value == self._storage.bookie
                return self.is_named
        return True

    # docs/protocol.md B32
    def _other_cluster(self, request: pb.Request) -> str:
        """Return the cluster that the client claims if it differs from the bookie's, otherwise ""."""
        for pair in request.context:
            if pair.key == wire.CLUSTER_KEY and self._service.cluster not in ("", pair.value):
                return repr(pair.value[:CLUSTER_SHOWN_MAX])
        return ""

    def _add(self, txn: int, ledger: int, entry: int, key: bytes, body: bytes, is_recovery: bool = False) -> None:
        size = len(body)
        self._adds += 1
        self._add_bytes += size
        done = partial(self._added, txn, ledger, entry, size)
        if self._takes_raw and not self.is_named and not is_recovery:
            self._storage.raw.add(ledger, entry, body, key, done=done)
            return
        self._storage.add(ledger, entry, body, key, recovery=is_recovery, done=done)

    def _added(self, txn: int, ledger: int, entry: int, size: int, status: Status) -> None:
        self._adds -= 1
        self._add_bytes -= size
        if self._backlog and not self._is_serve_due:
            self._is_serve_due = True
            self._loop.call_soon(self._serve)
        self.send(self.answers.encode_add_response(txn, status, ledger, entry))


def _plain_add(payload: bytes) -> tuple[int, int, int, bytes, bytes] | None:
    """Return an ordinary add of either version, or None for any other payload. Decoding a message would take almost
    half of the time of an add."""
    is_version_two = payload.startswith(version_two.MARK)
    return version_two.plain_add(payload) if is_version_two else wire.plain_add(payload)
