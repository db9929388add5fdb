"""Answers requests other than adds: reads and fences, long polls, last-add-confirmed, lists, space.

Each request is counted while it is in progress, so that no connection has too many (docs/protocol.md, B12). Recovery
requests go first and are never refused for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.limits import ClientConnection, ResponseEncoders, has_capacity, may_poll
from kvstore.bookie.directories.spread import AnyStorage
from kvstore.bookie.reader import ReadDone
from kvstore.bookie.turns import FairQueue
from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto import version_two
from kvstore.proto.availability import encode_availability
from kvstore.proto.bookkeeper import LAST_ENTRY, BookieOperation, Status
from kvstore.proto.version_two import BatchRead

_NEGATIVE = (Status.NO_LEDGER, Status.NO_ENTRY)


class RequestClient(ClientConnection, Protocol):
    """The connection of the client that sent the requests. Implemented by
    kvstore.bookie.connections.service.BookieConnection."""

    answers: ResponseEncoders
    """The encoders of its protocol version."""
    is_named: bool
    """True if the client has named the bookie that it means, and it is this one."""
    is_closed: bool

    def send(self, frame: bytes) -> None: ...

    def request_ended(self) -> None:
        """Record that a request has ended, so that another one may begin."""
        ...


class SharedLimits(Protocol):
    """The limits that all clients of a bookie share. Implemented by
    kvstore.bookie.connections.service.BookieService."""

    lists: FairQueue
    polls: int

    @property
    def connections(self) -> Mapping[Any, None]: ...


class RequestHandler:
    """Answers the requests of one client, except adds, and limits the number of requests in progress."""

    def __init__(self, client: RequestClient, shared: SharedLimits, storage: AnyStorage, config: BookieConfig) -> None:
        self.pending = 0
        """Number of requests in progress."""
        self._client, self._shared, self._storage, self._config = client, shared, storage, config
        self._statistics = storage.statistics
        self._polls: dict[object, Callable[[], None]] = {}
        """Functions that cancel the waiting long polls."""
        self._calls: dict[int, Callable[[int, pb.Request], None]] = {
            BookieOperation.READ_ENTRY: self._read,
            BookieOperation.AUTH: self._auth,
            BookieOperation.WRITE_LAC: self._write_lac,
            BookieOperation.READ_LAC: self._read_lac,
            BookieOperation.GET_BOOKIE_INFO: self._info,
            BookieOperation.FORCE_LEDGER: self._force,
            BookieOperation.LIST_ENTRIES: self._list,
        }

    def ask(self, operation: int, txn: int, request: pb.Request) -> None:
        """Answer a request that is not an add, now or later."""
        call = self._calls.get(operation)
        if call is not None:
            call(txn, request)
        else:
            self._client.send(wire.encode_status(txn, operation, Status.BAD_REQUEST))

    def cancel_polls(self) -> None:
        """Cancel all long polls, because the client has disconnected."""
        for cancel in self._polls.values():
            cancel()
        self._shared.polls -= len(self._polls)
        self._polls.clear()

    def _begin(self, *, is_priority: bool) -> bool:
        """Count a request. Return False if this connection has too many in progress."""
        if not is_priority and self.pending >= self._config.connection_pending_max:
            self._statistics.refused_overload += 1
            return False
        self.pending += 1
        return True

    def _end(self) -> None:
        self.pending -= 1
        self._client.request_ended()

    def _read(self, txn: int, request: pb.Request) -> None:
        read = request.read
        is_fence = read.flag == pb.ReadRequest.FENCE_LEDGER
        is_poll = read.HasField("previous_lac") and not is_fence
        if is_poll and read.entry != LAST_ENTRY:
            self._client.send(wire.encode_read_response(txn, Status.BAD_REQUEST, read.ledger, read.entry))
            return
        if not self._begin(is_priority=is_fence or request.header.priority > 0):
            self._client.send(
                self._client.answers.encode_read_response(txn, Status.TOO_MANY_REQUESTS, read.ledger, read.entry)
            )
            return
        done = partial(self._have_read, txn, read.ledger, is_fence)
        if is_poll:
            self._poll(read, done)
            return
        key = read.master_key if read.HasField("master_key") else None
        self._storage.read(read.ledger, read.entry, key=key, fence=is_fence, done=done)

    # docs/protocol.md B12
    def _poll(self, read: pb.ReadRequest, have_read: ReadDone) -> None:
        if not may_poll(len(self._polls), self._shared.polls):
            self._statistics.refused_overload += 1
            have_read(Status.TOO_MANY_REQUESTS, read.entry, None, -1)
            return
        poll, is_answered = object(), False

        def done(status: Status, entry: int, body: bytes | None, lac: int) -> None:
            nonlocal is_answered
            is_answered = True
            self._shared.polls -= self._polls.pop(poll, None) is not None
            have_read(status, entry, body, lac)

        cancel = self._storage.long_poll(read.ledger, read.previous_lac, read.timeout_ms, done=done)
        if not is_answered:
            self._polls[poll] = cancel
            self._shared.polls += 1

    def _have_read(
        self, txn: int, ledger: int, is_fence: bool, status: Status, entry: int, body: bytes | None, lac: int
    ) -> None:
        def answer(status: Status) -> None:
            self._end()
            fits = not body or has_capacity(self._client, len(body), self._shared.connections, is_fence=is_fence)
            if not fits:
                self._statistics.refused_overload += 1
                status = Status.TOO_MANY_REQUESTS
            max_lac = lac if status is Status.OK and not is_fence else None
            self._client.send(
                self._client.answers.encode_read_response(txn, status, ledger, entry, body if fits else None, max_lac)
            )

        self._when_deniable(status, ledger, answer)

    def ask_batch(self, asked: BatchRead) -> None:
        """Answer a batched read. The first entry is handled as in a single read; the following entries are added if
        they are stored here and fit."""

        def have_first(status: Status, _entry: int, first: bytes | None, _lac: int) -> None:
            def answer(status: Status) -> None:
                self._end()
                bodies = [] if first is None else self._batch(asked, first)
                if first is not None and not bodies:
                    self._statistics.refused_overload += 1
                    status = Status.TOO_MANY_REQUESTS
                self._client.send(version_two.encode_batch_response(asked, status, bodies))

            self._when_deniable(status, asked.ledger, answer)

        is_fence = asked.fence_key is not None
        if self._begin(is_priority=is_fence or asked.is_priority):
            self._storage.read(asked.ledger, asked.entry, key=asked.fence_key, fence=is_fence, done=have_first)
        else:
            self._client.send(version_two.encode_batch_response(asked, Status.TOO_MANY_REQUESTS, ()))

    def _batch(self, asked: BatchRead, first: bytes) -> list[bytes]:
        """Return as many entries as may be kept until the client reads them, possibly none."""
        connections, (_, size_max) = self._shared.connections, asked.limits
        is_fence = asked.fence_key is not None
        if has_capacity(self._client, max(len(first), size_max), connections):
            return self._storage.read_on(asked.ledger, asked.entry, first, asked.limits, passes_over=asked.passes_over)
        return [first] if has_capacity(self._client, len(first), connections, is_fence=is_fence) else []

    def _when_deniable(self, status: Status, ledger: int, answer: Callable[[Status], None]) -> None:
        """Answer with `status`. A client that has not named this bookie gets "not here" only if that is true of every
        bookie that it may mean; otherwise it gets UNKNOWN_LEDGER_STATE."""
        if status not in _NEGATIVE or self._client.is_named:
            answer(status)
            return

        def on_answer(may_deny: bool) -> None:
            self._statistics.refused_unknown += not may_deny
            answer(status if may_deny else Status.UNKNOWN_LEDGER_STATE)

        self._storage.admission.ask_denial(ledger, on_answer)

    def _write_lac(self, txn: int, request: pb.Request) -> None:
        part = request.write_lac
        ledger = part.ledger
        if not self._counted(txn, BookieOperation.WRITE_LAC, ledger, request):
            return

        def done(status: Status) -> None:
            self._end()
            self._client.send(wire.encode_status(txn, BookieOperation.WRITE_LAC, status, ledger))

        self._storage.write_lac(ledger, part.body, part.master_key, done=done)

    def _counted(self, txn: int, operation: BookieOperation, ledger: int, request: pb.Request) -> bool:
        """Count a request. Return False after refusing it."""
        if self._begin(is_priority=request.header.priority > 0):
            return True
        self._client.send(wire.encode_status(txn, operation, Status.TOO_MANY_REQUESTS, ledger))
        return False

    def _read_lac(self, txn: int, request: pb.Request) -> None:
        ledger = request.read_lac.ledger
        if not self._counted(txn, BookieOperation.READ_LAC, ledger, request):
            return

        def done(status: Status, lac_body: bytes | None, last_entry: bytes | None) -> None:
            def answer(status: Status) -> None:
                self._end()
                self._client.send(wire.encode_read_lac_response(txn, status, ledger, lac_body, last_entry))

            self._when_deniable(status, ledger, answer)

        self._storage.read_lac(ledger, done=done)

    def _list(self, txn: int, request: pb.Request) -> None:
        ledger = request.list_entries.ledger
        if not self._counted(txn, BookieOperation.LIST_ENTRIES, ledger, request):
            return

        def read(ended: Callable[[], None]) -> None:
            def done(status: Status, runs: Any) -> None:
                ended()
                self._have_listed(txn, ledger, status, runs)

            if self._client.is_closed:
                ended()
            else:
                self._storage.list_entries(ledger, done=done)

        self._shared.lists.add(self, read)

    def _have_listed(self, txn: int, ledger: int, status: Status, runs: Any) -> None:
        availability = encode_availability(runs) if status is Status.OK else None
        if availability is not None and not has_capacity(self._client, len(availability), self._shared.connections):
            self._statistics.refused_overload += 1
            status, availability = Status.TOO_MANY_REQUESTS, None

        def answer(status: Status) -> None:
            self._end()
            self._client.send(wire.encode_list_response(txn, status, ledger, availability))

        self._when_deniable(status, ledger, answer)

    def _force(self, txn: int, request: pb.Request) -> None:
        ledger = request.force_ledger.ledger
        if not self._counted(txn, BookieOperation.FORCE_LEDGER, ledger, request):
            return

        def done(status: Status) -> None:
            self._end()
            self._client.send(wire.encode_status(txn, BookieOperation.FORCE_LEDGER, status, ledger))

        self._storage.force(ledger, done=done)

    def _info(self, txn: int, request: pb.Request) -> None:
        requested = request.bookie_info.requested
        is_space = requested & (wire.TOTAL_CAPACITY | wire.FREE_SPACE)
        try:
            total, free = self._storage.space() if is_space else (0, 0)
        except OSError:
            self._client.send(wire.encode_status(txn, BookieOperation.GET_BOOKIE_INFO, Status.IO_ERROR))
            return
        self._client.send(
            wire.encode_info_response(
                txn,
                total if requested & wire.TOTAL_CAPACITY else None,
                free if requested & wire.FREE_SPACE else None,
                self._storage.own_ledgers.newest if requested & wire.NEWEST_LEDGER else None,
            )
        )

    def _auth(self, txn: int, _request: pb.Request) -> None:
        self._client.send(self._client.answers.encode_auth_response(txn))
