"""One connection to one server, and the operations that await its answers. A link connects once and breaks once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from operator import attrgetter, methodcaller
from typing import Any

import grpc

from kvstore.client.aio.connections import (
    FAILURES,
    AnyAnswers,
    AnyFrame,
    FrameConnection,
    GrpcConnection,
    StreamConnection,
    login_error_or_none,
    text_of,
)
from kvstore.client.core.batching import (
    COMPACT_OPERATIONS_MAX,
    FRAME_OPERATIONS_MAX,
    answered,
    compact_frame_of,
    cut,
    frame_of,
    single_frame_of,
)
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.retries import lost
from kvstore.client.core.routing import Routing
from kvstore.client.core.stream_endpoints import StreamEndpoints, stream_endpoint_in
from kvstore.env.events import is_cancelled
from kvstore.env.library_env import LibraryEnv
from kvstore.env.ports import Transport
from kvstore.errors import ConfigError, NotAuthenticated, OtherCluster, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.proto.session_stream import full_name, knows_no_clusters
from kvstore.rpc.channels import TIMEOUT_MAX_MS, aio_opener
from kvstore.rpc.login import login_of_environment

logger = logging.getLogger(__name__)

GATHER_SHARE = 4
"""Over gRPC, operations wait to be batched until they are this share of the operations in flight,"""
GATHER_RTT_SHARE = 8
"""but no longer than this share of the time that answers take,"""
GATHER_MIN_S, GATHER_MAX_S = 0.002, 0.02
"""within these bounds, in seconds."""
LOOKUP_SHARE = 0.8
"""Share of the connect timeout for the lookup of the server's name."""
KEEPALIVE_S = 10.0
"""Silence, in seconds, after which a server that owes no answer is probed."""
LATE = Unavailable("the time is up")
"""Answer of a waiter whose deadline has passed."""


_deadline_of, _waiter_of = attrgetter("deadline"), attrgetter("waiter")
_is_over = methodcaller("done")
_MakeFrame = Callable[..., tuple[AnyFrame, dict[int, ClientOperation]]]


class LinkState(Enum):
    CONNECTING = auto()
    UP = auto()
    DOWN = auto()


class AsyncLink:
    """A connection to one server. Calls `changed` when the link comes up and when it breaks, and `on_answers` with each
    message of answers."""

    def __init__(
        self,
        address: str,
        env: LibraryEnv,
        config: ClientConfig,
        routing: Routing,
        tokens: Mapping[str, int],
        transport: Transport,
        stream_endpoints: StreamEndpoints,
        *,
        changed: Callable[[AsyncLink], None],
        on_answers: Callable[[AnyAnswers], None],
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.known = 0
        """Number of the last topology that this server returned."""
        self.frames = 0
        self.operations = 0
        self._env, self._config, self._routing, self._tokens = env, config, routing, tokens
        self._transport, self._stream_endpoints = transport, stream_endpoints
        self._changed, self._on_answers_received = changed, on_answers
        self._loop = asyncio.get_running_loop()
        self._now = env.clock.now
        self._pending: deque[ClientOperation] = deque()
        self._open: dict[int, ClientOperation] = {}
        self._next = 1
        self._connection: FrameConnection | None = None
        """The open connection; None unless the link is up."""
        self._is_flush_due = False
        self._is_single = False
        """True if the last frame had one operation."""
        self._settled, self._down = asyncio.Event(), asyncio.Event()
        """Set when the link no longer connects; set when the link is down."""
        self._received_at = self._now()
        self._probed_at: float | None = None
        """Time at which a silent server was probed."""
        self._why_down = ""
        self.login_error: NotAuthenticated | None = None
        """Error with which the server rejected the login."""
        self._is_overdue = False
        self._timer: asyncio.TimerHandle | None = None
        self._sample = (0, 0.0)
        """Number of one operation in flight, and the time it was sent."""
        self._answer_s = 0.0
        """Moving average of the answer time, in seconds."""
        self._open_channel = aio_opener(address, config.tls, config.login)
        self._stub: Any
        """Set once the server's address is known."""
        env.nursery.spawn(self._run(), name=f"link {address}")

    def send(self, operation: ClientOperation) -> None:
        """Queue an operation. Operations of one turn of the event loop share a frame. A single operation that follows a
        frame with a single operation is sent at once. The waiter receives the outcome."""
        self._pending.append(operation)
        if self._is_single and not self._open and not self._is_flush_due:
            self.flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    async def wait_up(self) -> None:
        """Wait until the link is up. Raises Unavailable if the connection fails, OtherCluster if the server belongs to
        another cluster, NotAuthenticated if it rejects the login."""
        await self._settled.wait()
        if self.state is LinkState.DOWN:
            kind = OtherCluster if self.address in self._routing.foreign else Unavailable
            raise self.login_error or kind(f"{self.address} cannot be reached: {self._why_down}")

    async def topology(self, *, known: int, wait_ms: int, timeout_s: float) -> kv_pb2.TopologyResponse:
        """Return the server's topology once it differs from `known`, or after `wait_ms`. Raises Unavailable, and
        NotAuthenticated if the server rejects the login."""
        request = kv_pb2.TopologyRequest(known=known, wait_ms=wait_ms)
        try:
            message: kv_pb2.TopologyResponse = await self._stub.Topology(request, timeout=timeout_s + wait_ms / 1000)
        except FAILURES as error:
            raise login_error_or_none(error) or Unavailable(
                f"{self.address} did not describe the cluster: {text_of(error)}"
            ) from None
        except asyncio.CancelledError:
            if self.state is not LinkState.DOWN or is_cancelled():
                raise
            # Nobody cancelled this task: a channel that closes cancels the tasks that wait for a call on it.
            raise Unavailable(f"{self.address} is gone") from None
        try:
            self._routing.check(message, self.address)
        except Unavailable as error:
            self.disconnect(str(error))
            raise
        self.known = message.known
        return message

    def tick(self, now: float) -> None:
        """End operations that are past their deadline, and probe a silent server."""
        for operation in (*self._open.values(), *self._pending):
            if operation.deadline <= now:
                _answer(operation, LATE)  # it stays open: the server still owes an answer
        silence_s = self._config.silence_s
        if self._connection is None:
            return
        if self._probed_at is not None:
            if now - self._probed_at > silence_s:
                self.disconnect(f"no sign of life within {silence_s:g} s after a silence")
        elif now - self._received_at > (silence_s if self._open else max(silence_s, KEEPALIVE_S)):
            self._probed_at = now
            answer = self._connection.probe()
            if answer is not None:
                self._env.nursery.spawn(self._wait_probe(answer), name=f"probe {self.address}")

    def disconnect(self, why: str) -> None:
        """End the connection. All pending operations end with an error."""
        if self.state is LinkState.DOWN:
            return
        self.state, self._why_down = LinkState.DOWN, why
        logger.info("link down address=%s open=%d why=%s", self.address, len(self._open), why)
        owed = [*self._open.values(), *self._pending]
        self._open.clear()
        self._pending.clear()
        self._settled.set()
        self._down.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._changed(self)
        for operation in owed:
            _answer(operation, lost(operation, f"{self.address}: {why}"))

    @property
    def operations_pending(self) -> int:
        return len(self._open) + len(self._pending)

    @property
    def is_stream(self) -> bool:
        """True if the link is up and uses the server's Redis port."""
        return self._connection is not None and self._connection.is_compact

    # ── connecting ──

    async def _run(self) -> None:
        connection: FrameConnection | None = None
        channel: grpc.aio.Channel | None = None
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                channel = await self._open_channel(LOOKUP_SHARE * self._config.connect_timeout_s)
                self._stub = kv_pb2_grpc.KVStub(channel)
                connection = await self._connected()
            if self.state is LinkState.CONNECTING:
                self.state, self._connection = LinkState.UP, connection
                self._received_at = self._now()
                self._settled.set()
                self._changed(self)
                self.flush()
                await self._down.wait()
        except (*FAILURES, OSError, Unavailable) as error:
            self.login_error = login_error_or_none(error)
            self.disconnect(text_of(error))
        finally:
            self.disconnect("closed")
            if connection is not None:
                connection.close()
            if channel is not None:
                await channel.close()

    async def _connected(self) -> FrameConnection:
        """Open a stream on the server's Redis port, or a gRPC session if the server has no streams."""
        endpoint, is_checked = self._stream_endpoints.endpoint_or_none(self.address), False
        if endpoint is None:
            endpoint, is_checked = stream_endpoint_in(await self._checked_topology()), True
        has_failed = False
        if endpoint is not None and self._stream_endpoints.may_try(self.address, self._now()):
            try:
                async with asyncio.timeout(self._config.connect_timeout_s / 2):
                    return await self._open_stream(*endpoint)
            except (OSError, EOFError, ConfigError) as error:
                has_failed = True
                logger.info("no stream address=%s why=%s", endpoint[1], text_of(error))
        if not is_checked:
            await self._checked_topology()
        session = GrpcConnection(self, self._stub, self._env.nursery, self._config.silence_s)
        try:
            await session.open()
        except BaseException:
            session.close()
            raise
        if has_failed:
            self._stream_endpoints.bar(self.address, self._now())
        return session

    async def _checked_topology(self) -> kv_pb2.TopologyResponse:
        """Return the server's topology. Raises gRPC errors, and Unavailable if the server belongs to another
        cluster."""
        message: kv_pb2.TopologyResponse = await self._stub.Topology(kv_pb2.TopologyRequest())
        self._routing.check(message, self.address)
        return message

    async def _open_stream(self, server: str, address: str) -> StreamConnection:
        """Open a stream. Raises OSError, EOFError, ConfigError."""
        login, name = self._config.login or login_of_environment(), full_name(server, self._routing.cluster)
        try:
            stream = StreamConnection(self, name, login)
            await stream.open(self._transport, address)
        except EOFError as error:
            if name == server or not knows_no_clusters(str(error), server):
                raise
            stream = StreamConnection(self, server, login)
            await stream.open(self._transport, address)
        return stream

    # ── sending ──

    def flush(self) -> None:
        """Send pending operations, as many as the connection accepts."""
        self._is_flush_due = False
        connection, pending = self._connection, self._pending
        if connection is None:
            return
        if len(pending) == 1 and connection.is_compact and connection.is_ready and pending[0].options is None:
            operation = pending.popleft()
            try:
                self._send_single(operation, connection)
            except Exception as error:  # noqa: BLE001  # see _unsendable
                self._unsendable([operation], error)
            return
        make, most = (
            (compact_frame_of, COMPACT_OPERATIONS_MAX) if connection.is_compact else (frame_of, FRAME_OPERATIONS_MAX)
        )
        while pending and connection.is_ready and (connection.is_compact or not self._should_gather()):
            operations = cut(pending, most)
            if any(map(_is_over, map(_waiter_of, operations))):  # past the deadline, or abandoned by their callers
                operations = [each for each in operations if not each.waiter.done()]
            if operations:
                try:
                    connection.send(self._frame(operations, make))
                except Exception as error:  # noqa: BLE001  # see _unsendable
                    self._unsendable(operations, error)

    def _unsendable(self, operations: list[ClientOperation], error: Exception) -> None:
        """Answer operations for which no frame could be made. The server owes them nothing, so no answer would ever
        come."""
        why = f"a frame of {len(operations)} operations cannot be sent: {type(error).__name__}"
        logger.error("address=%s %s", self.address, why, exc_info=error)
        gone = set(map(id, operations))
        self._open = {number: each for number, each in self._open.items() if id(each) not in gone}
        for operation in operations:
            _answer(operation, lost(operation, f"{self.address}: {why}"))

    def _send_single(self, operation: ClientOperation, connection: FrameConnection) -> None:
        """Send a single operation at the lowest cost."""
        if operation.waiter.done():
            return
        now, number, open_ = self._now(), self._next, self._open
        if not open_:
            self._received_at = now
        left_ms = int((operation.deadline - now) * 1000)
        frame = single_frame_of(
            operation,
            number,
            ring_version=self._routing.ring_version,
            timeout_ms=1 if left_ms < 1 else TIMEOUT_MAX_MS if left_ms > TIMEOUT_MAX_MS else left_ms,
            token=self._tokens.get(operation.partition, 0),
        )
        self._next = number + 1
        self._is_single = True
        open_[number] = operation
        operation.is_sent = True
        self.frames += 1
        self.operations += 1
        connection.send(frame)

    def _should_gather(self) -> bool:
        """Return True if few operations are pending compared with those in flight, whose answers will soon bring more.

        Without this delay, small frames bring small answers, which bring small frames.
        """
        if len(self._pending) * GATHER_SHARE >= len(self._open) or self._is_overdue:
            self._is_overdue = False
            return False
        if self._timer is None:
            wait_s = min(max(self._answer_s / GATHER_RTT_SHARE, GATHER_MIN_S), GATHER_MAX_S)
            self._timer = self._loop.call_later(wait_s, self._on_timer)
        return True

    def _on_timer(self) -> None:
        self._timer = None
        self._is_overdue = bool(self._pending)
        self.flush()

    def _frame(self, operations: list[ClientOperation], make: _MakeFrame) -> AnyFrame:
        now = self._now()
        longest = max(map(_deadline_of, operations)) - now
        cluster = (
            {"cluster": self._routing.cluster} if make is frame_of else {}
        )  # a stream has named the cluster in its hello
        frame, numbered = make(
            operations,
            self._next,
            ring_version=self._routing.ring_version,
            timeout_ms=min(max(1, int(longest * 1000)), TIMEOUT_MAX_MS),
            tokens=self._tokens,
            **cluster,
        )
        if not self._open:
            self._received_at = now
        if make is frame_of and self._sample[0] not in self._open:
            self._sample = (self._next, now)
        self._next += len(numbered)
        self._is_single = False
        self._open |= numbered
        for operation in operations:
            operation.is_sent = True
        self.frames += 1
        self.operations += len(operations)
        return frame

    # ── hearing ──

    def take(self, answers: AnyAnswers) -> None:
        """Take a message of answers."""
        self._received_at, self._probed_at = self._now(), None
        self._on_answers_received(answers)
        pop = self._open.pop
        for number, answer in answered(answers):
            operation = pop(number, None)
            if operation is not None:
                try:
                    operation.waiter.set_result(answer)
                except asyncio.InvalidStateError:
                    """The caller has gone. Checking each waiter first would cost another call."""
        if self._sample[0]:
            self._measure()
        if self._pending and not self._is_flush_due:
            self.flush()

    def _measure(self) -> None:
        """Update the average answer time from one operation at a time."""
        number, sent_at = self._sample
        if number and number not in self._open:
            self._answer_s += (self._received_at - sent_at - self._answer_s) / 8
            self._sample = (0, 0.0)

    async def _wait_probe(self, answer: Awaitable[object]) -> None:
        """Wait for a sign of life beside the connection, because a stopped process keeps its connections open."""
        try:
            await answer
            self._received_at, self._probed_at = self._now(), None
        except FAILURES as error:
            self.disconnect(f"silent: {text_of(error)}")


def _answer(operation: ClientOperation, answer: object) -> None:
    if not operation.waiter.done():
        operation.waiter.set_result(answer)
