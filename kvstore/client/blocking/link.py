"""One server as a blocking client sees it: whoever finds the way free sends for all who wait.

There is no thread of ours. A caller queues its operation; if nobody is sending to this server it sends all that is
queued, in unary frames, until its own operation is answered, and then passes the baton to another caller who still
waits. So callers of many threads share frames, and a lone caller pays for one unary call. Under gevent the threads are
greenlets.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from kvstore.client.core.batching import answered, cut, frame_of
from kvstore.client.core.operation import Operation
from kvstore.client.core.retries import lost
from kvstore.env import Clock
from kvstore.env.tls import Tls
from kvstore.errors import NotAuthenticated, OutcomeUnknown, PermissionDenied, Retryable, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_channel
from kvstore.rpc.login import Login
from kvstore.rpc.status import from_rpc_error

logger = logging.getLogger(__name__)
GRACE_S = 0.5
"""How much longer than a frame's own time its call may take before the server counts as silent."""

Sent = tuple[Any, dict[int, Operation]]
"""A call under way, None if it could not begin, and its operations by number."""


class Waiter:
    """A caller who waits: for an answer, or for the baton."""

    __slots__ = ("_lock", "answer", "has_baton", "is_answered")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.answer: Any = None
        self.is_answered = False
        self.has_baton = False

    def set(self, answer: Any) -> None:
        self.answer, self.is_answered = answer, True
        self._wake()

    def pass_baton(self) -> None:
        self.has_baton = True
        self._wake()

    def wait(self, timeout_s: float) -> bool:
        """False if neither came in time."""
        return self._lock.acquire(timeout=max(0.0, timeout_s))

    def _wake(self) -> None:
        if self._lock.locked():
            self._lock.release()


class BlockingLink:
    """The channel to one server, and who waits for it. Thread-safe."""

    def __init__(
        self,
        address: str,
        clock: Clock,
        attempt_s: float,
        tokens: Mapping[str, int],
        guard: threading.Lock,
        tls: Tls | None,
        login: Login | None = None,
        cluster: Callable[[], str] = str,
    ) -> None:
        """`cluster`: the id of the client's, as far as it knows. Each frame names it: a channel connects again by
        itself, and another cluster's server may listen there by then."""
        self.address = address
        self.is_broken = False
        """An answer did not come: use another link."""
        self.is_ours = False
        """Its server is of the client's cluster: one of these has named its address, or it gave a topology."""
        self.stranger: NotAuthenticated | None = None
        """Why its server does nothing for this client: it does not know the user. Use another link: a newer one may
        have another login, too."""
        self.has_served = False
        """It has had answers, so its login was good once."""
        self.frames = 0
        self._clock, self._attempt_s, self._tokens, self._guard = clock, attempt_s, tokens, guard
        self._cluster = cluster
        self._channel = open_channel(address, tls, login=login)
        self._stub = kv_pb2_grpc.KVStub(self._channel)
        self._lock = threading.Lock()
        self._pending: deque[Operation] = deque()
        self._is_busy = False

    def topology(self, timeout_s: float) -> kv_pb2.TopologyResponse:
        """Raises Unavailable, and NotAuthenticated if the server does not know who asks."""
        try:
            message: kv_pb2.TopologyResponse = self._stub.Topology(kv_pb2.TopologyRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            found = from_rpc_error(error)
            if isinstance(found, NotAuthenticated):
                raise found from None
            raise Unavailable(f"{self.address} gives no topology: {found}") from None
        except ValueError:  # gRPC's word for a channel that was closed: another caller saw that the link is broken
            raise Unavailable(f"the connection to {self.address} is closed") from None
        self.has_served = True
        return message

    def run(self, operation: Operation, ring_version: int) -> tuple[Any, list[kv_pb2.Answers]]:
        """The answer to the operation or a StoreError; and the messages that this caller received for all."""
        waiter = operation.waiter = Waiter()
        received: list[kv_pb2.Answers] = []
        with self._lock:
            self._pending.append(operation)
            waiter.has_baton = not self._is_busy
            self._is_busy = True
        try:
            if not waiter.has_baton and not waiter.wait(operation.deadline - self._clock.now()):
                return self._give_up(operation), received
            if not waiter.has_baton:
                return waiter.answer, received
            while not waiter.is_answered:
                received.extend(self._send_queued(ring_version))
        except BaseException:  # KeyboardInterrupt, a timeout of gevent: a baton that is kept stops all who come
            self._give_up(operation)
            raise
        self._pass_baton()
        return waiter.answer, received

    def start_frames(self, operations: Sequence[Operation], ring_version: int) -> list[Sent]:
        """Send one caller's operations without waiting; each call is to be collected."""
        for operation in operations:
            operation.waiter = Waiter()
        queue = deque(operations)
        sent = []
        while queue:
            sent.append(self._start(cut(queue), ring_version))
        return sent

    def collect(self, sent: Sent) -> list[kv_pb2.Answers]:
        """Wait for a frame's answers and hand them to their waiters."""
        call, numbered = sent
        return self._settle(call.result, numbered) if call is not None else self._closed(numbered)

    def refuse(self, error: NotAuthenticated) -> None:
        """Its server has said that it does not know the user."""
        self.is_broken, self.stranger = True, error

    def close(self) -> None:
        """Calls under way end with an error."""
        self.is_broken = True
        self._channel.close()

    def close_when_idle(self) -> None:
        """Let a broken link go. Others may still wait for their answers on it."""
        with self._lock:
            is_idle = not self._is_busy
        if is_idle:
            self._channel.close()

    def _send_queued(self, ring_version: int) -> list[kv_pb2.Answers]:
        """In this thread from send to answers: a call that another thread completes takes half as long again."""
        with self._lock:
            operations = cut(self._pending)
        if not operations:
            return []
        try:
            frame, numbered, time_s = self._frame(operations, ring_version)
            try:
                return self._settle(lambda: self._stub.Execute(frame, timeout=time_s), numbered)
            except ValueError:  # gRPC's word for a channel that was closed
                return self._closed(numbered)
        except BaseException:  # those who wait for this caller must not
            for operation in operations:
                if not operation.waiter.is_answered:
                    operation.waiter.set(lost(operation, "its sender was interrupted"))
            raise

    def _start(self, operations: Sequence[Operation], ring_version: int) -> Sent:
        frame, numbered, time_s = self._frame(operations, ring_version)
        try:
            return self._stub.Execute.future(frame, timeout=time_s), numbered
        except ValueError:
            return None, numbered

    def _frame(
        self, operations: Sequence[Operation], ring_version: int
    ) -> tuple[kv_pb2.Frame, dict[int, Operation], float]:
        """With how long its call may take, in seconds."""
        longest = max(operation.deadline for operation in operations) - self._clock.now()
        time_s = min(max(longest, 0.001), self._attempt_s)
        with self._guard:
            frame, numbered = frame_of(
                operations,
                1,
                ring_version=ring_version,
                timeout_ms=max(1, int(time_s * 1000)),
                tokens=self._tokens,
                cluster=self._cluster(),
            )
        for operation in operations:
            operation.is_sent = True
        self.frames += 1
        return frame, numbered, time_s + GRACE_S

    def _settle(self, answers_of: Callable[[], kv_pb2.Answers], numbered: dict[int, Operation]) -> list[kv_pb2.Answers]:
        try:
            answers = answers_of()
        except grpc.RpcError as error:
            self._fail(numbered, from_rpc_error(error))
            return []
        except grpc.FutureCancelledError:
            self._fail(numbered, OutcomeUnknown("the connection was closed"))
            return []
        self.has_served = True
        try:
            for number, answer in answered(answers):
                operation = numbered.pop(number, None)
                if operation is not None:
                    operation.waiter.set(answer)
        except ValueError as error:  # columns of unequal length; what was sent may be done
            self.is_broken = True
            logger.warning("address=%s its answers cannot be read: %s", self.address, error)
        for operation in numbered.values():
            operation.waiter.set(lost(operation, f"{self.address} left it without an answer"))
        return [answers]

    def _closed(self, numbered: dict[int, Operation]) -> list[kv_pb2.Answers]:
        self._fail(numbered, Unavailable(f"the connection to {self.address} is closed"))
        return []

    def _fail(self, numbered: dict[int, Operation], error: StoreError) -> None:
        """A frame's call has failed as a whole."""
        self.is_broken = self.is_broken or isinstance(error, OutcomeUnknown | Unavailable)
        if isinstance(error, NotAuthenticated):
            self.refuse(error)
        for operation in numbered.values():
            if isinstance(error, Retryable | NotAuthenticated | PermissionDenied):
                operation.is_sent = False
                operation.waiter.set(error)
            else:
                operation.waiter.set(lost(operation, f"{self.address}: {error}"))

    def _give_up(self, operation: Operation) -> StoreError:
        """A caller stops waiting for its answer or the baton."""
        with self._lock:
            waiter: Waiter = operation.waiter
            has_baton = waiter.has_baton
            if operation in self._pending:
                self._pending.remove(operation)
            else:
                operation.is_sent = True  # or about to be
        if has_baton:
            self._pass_baton()
        return waiter.answer if waiter.is_answered else lost(operation, "the time is up")

    def _pass_baton(self) -> None:
        with self._lock:
            if self._pending:
                self._pending[0].waiter.pass_baton()
                return
            self._is_busy = False
            is_done = self.is_broken
        if is_done:
            self._channel.close()
