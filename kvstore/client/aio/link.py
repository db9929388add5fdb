"""One connection to one server: a session stream, and everything that is owed on it. Connects once, breaks once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto

import grpc

from kvstore.client.core.batching import cut, frame_of, settled
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.operation import Operation
from kvstore.client.core.retries import lost
from kvstore.client.core.routing import Routing
from kvstore.env.events import is_cancelled
from kvstore.env.library_env import LibraryEnv
from kvstore.errors import StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import TIMEOUT_MAX_MS, open_aio_channel

logger = logging.getLogger(__name__)

GATHER_SHARE = 4
"""Operations wait for company until they are this part of those under way,"""
GATHER_RTT_SHARE = 8
"""but no longer than this part of the time that answers take,"""
GATHER_MIN_S, GATHER_MAX_S = 0.002, 0.02
"""within these bounds."""
LATE = Unavailable("the time is up")
"""What a waiter gets whose deadline has passed."""
_FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError, EOFError)


class State(Enum):
    CONNECTING = auto()
    UP = auto()
    DOWN = auto()


class Link:
    """`changed` is called when the link comes up and when it breaks; `heard` with each message of answers."""

    def __init__(
        self,
        address: str,
        env: LibraryEnv,
        config: ClientConfig,
        routing: Routing,
        tokens: Mapping[str, int],
        *,
        changed: Callable[[Link], None],
        heard: Callable[[kv_pb2.Answers], None],
    ) -> None:
        self.address = address
        self.state = State.CONNECTING
        self.known = 0
        """The number of the topology that this server gave last."""
        self.frames = 0
        self.operations = 0
        self._env, self._config, self._routing, self._tokens = env, config, routing, tokens
        self._changed, self._heard = changed, heard
        self._pending: deque[Operation] = deque()
        self._open: dict[int, Operation] = {}
        self._next = 1
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        """No longer connecting."""
        self._heard_at = env.clock.now()
        self._is_probing = False
        self._is_overdue = False
        self._timer: asyncio.TimerHandle | None = None
        self._sample = (0, 0.0)
        """One operation under way, and when it was sent."""
        self._answer_s = 0.0
        """How long answers take, about."""
        self._channel = open_aio_channel(address, config.tls)
        self._stub = kv_pb2_grpc.KVStub(self._channel)
        env.nursery.spawn(self._run(), name=f"link {address}")

    def send(self, operation: Operation) -> None:
        """Queue an operation; those of one turn of the event loop share a frame. Its waiter gets what comes of it."""
        self._pending.append(operation)
        self._wake.set()

    async def wait_up(self) -> None:
        """Raises Unavailable if the connection fails."""
        await self._settled.wait()
        if self.state is State.DOWN:
            raise Unavailable(f"{self.address} cannot be reached")

    async def topology(self, *, known: int, wait_ms: int, timeout_s: float) -> kv_pb2.TopologyResponse:
        """The server's topology, another than `known` or the same after `wait_ms`. Raises Unavailable."""
        request = kv_pb2.TopologyRequest(known=known, wait_ms=wait_ms)
        try:
            message: kv_pb2.TopologyResponse = await self._stub.Topology(request, timeout=timeout_s + wait_ms / 1000)
        except _FAILURES as error:
            raise Unavailable(f"{self.address} gives no topology: {_text(error)}") from None
        except asyncio.CancelledError:
            if self.state is not State.DOWN or is_cancelled():
                raise
            # Nobody cancelled us: a channel that closes does it to whoever waits for a call on it.
            raise Unavailable(f"{self.address} is gone") from None
        self.known = message.known
        return message

    def tick(self, now: float) -> None:
        """Give up what is too late, and look after a server that is silent."""
        for operation in (*self._open.values(), *self._pending):
            if operation.deadline <= now:
                _answer(operation, LATE)  # it stays open: the server still owes an answer
        if not self._open:
            self._heard_at = now
        elif now - self._heard_at > self._config.silence_s and not self._is_probing and self.state is State.UP:
            self._is_probing = True
            self._env.nursery.spawn(self._probe(), name=f"probe {self.address}")

    def fall(self, why: str) -> None:
        """The connection is gone, or given up. Everything that is owed ends with an error."""
        if self.state is State.DOWN:
            return
        self.state = State.DOWN
        logger.info("link down address=%s open=%d why=%s", self.address, len(self._open), why)
        owed = [*self._open.values(), *self._pending]
        self._open.clear()
        self._pending.clear()
        self._settled.set()
        self._wake.set()
        self._changed(self)
        for operation in owed:
            _answer(operation, lost(operation, f"{self.address}: {why}"))

    @property
    def owed(self) -> int:
        return len(self._open) + len(self._pending)

    async def _run(self) -> None:
        call = self._stub.Session()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await call.wait_for_connection()
                await call.initial_metadata()
            if self.state is State.CONNECTING:
                self.state = State.UP
                self._settled.set()
                self._env.nursery.spawn(self._read(call), name=f"answers of {self.address}")
                self._changed(self)
                await self._write(call)
        except _FAILURES as error:
            self.fall(_text(error))
        finally:
            self.fall("closed")
            call.cancel()
            await self._channel.close()

    async def _write(self, call: grpc.aio.StreamStreamCall[kv_pb2.Frame, kv_pb2.Answers]) -> None:
        while self.state is State.UP:
            self._wake.clear()
            while self._pending and not self._should_gather():
                operations = [each for each in cut(self._pending) if not each.waiter.done()]
                if operations:
                    await call.write(self._frame(operations))
            await self._wake.wait()

    def _should_gather(self) -> bool:
        """Whether few operations wait compared with those under way: the answers to those will soon bring more.

        Without this, small frames bring small answers, which bring small frames.
        """
        if len(self._pending) * GATHER_SHARE >= len(self._open) or self._is_overdue:
            self._is_overdue = False
            return False
        if self._timer is None:
            wait_s = min(max(self._answer_s / GATHER_RTT_SHARE, GATHER_MIN_S), GATHER_MAX_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)
        return True

    def _on_timer(self) -> None:
        self._timer = None
        self._is_overdue = bool(self._pending)
        self._wake.set()

    def _frame(self, operations: list[Operation]) -> kv_pb2.Frame:
        now = self._env.clock.now()
        longest = max(operation.deadline for operation in operations) - now
        frame, numbered = frame_of(
            operations,
            self._next,
            ring_version=self._routing.ring_version,
            timeout_ms=min(max(1, int(longest * 1000)), TIMEOUT_MAX_MS),
            tokens=self._tokens,
        )
        if not self._open:
            self._heard_at = now
        if self._sample[0] not in self._open:
            self._sample = (self._next, now)
        self._next += len(numbered)
        self._open |= numbered
        for operation in operations:
            operation.is_sent = True
        self.frames += 1
        self.operations += len(operations)
        return frame

    async def _read(self, call: grpc.aio.StreamStreamCall[kv_pb2.Frame, kv_pb2.Answers]) -> None:
        try:
            while True:
                answers = await call.read()
                if not isinstance(answers, kv_pb2.Answers):
                    raise EOFError("the server ended the session")
                self._heard_at = self._env.clock.now()
                self._heard(answers)
                for operation, answer in settled(answers, self._open):
                    if operation is not None and not operation.waiter.done():
                        operation.waiter.set_result(answer)
                self._measure()
                if self._pending:
                    self._wake.set()
        except _FAILURES as error:
            self.fall(_text(error))

    def _measure(self) -> None:
        """Learn how long answers take, from one operation at a time."""
        number, sent_at = self._sample
        if number and number not in self._open:
            self._answer_s += (self._heard_at - sent_at - self._answer_s) / 8
            self._sample = (0, 0.0)

    async def _probe(self) -> None:
        """Ask a silent server whether it lives: a stopped process keeps its connections."""
        try:
            await self.topology(known=0, wait_ms=0, timeout_s=self._config.silence_s)
            self._heard_at = self._env.clock.now()
        except StoreError as error:
            self.fall(f"silent: {error}")
        finally:
            self._is_probing = False


def _answer(operation: Operation, answer: object) -> None:
    if not operation.waiter.done():
        operation.waiter.set_result(answer)


def _text(error: BaseException) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
