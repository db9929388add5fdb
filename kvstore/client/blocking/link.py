"""One server as a blocking client sees it: one caller at a time sends for all callers that wait.

Callers are worker threads (kvstore.rpc.workers). A caller queues its operation. If no other caller sends to this
server, it sends all queued operations in unary frames until its own is answered. Then it passes the baton to another
waiting caller. So callers share frames, and a single caller pays for one unary call.

A sender that is still inside gRPC after its call's own time hangs. The callers that wait for it break the link, and the
engine opens another one, with its own channel.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import grpc

from kvstore.client.core.batching import answered, cut, frame_of
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.retries import lost
from kvstore.client.core.routing import Routing
from kvstore.env import Clock
from kvstore.env.tls import Tls
from kvstore.errors import NotAuthenticated, OutcomeUnknown, PermissionDenied, Retryable, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc import workers
from kvstore.rpc.channels import open_channel
from kvstore.rpc.login import Login
from kvstore.rpc.status import from_rpc_error

logger = logging.getLogger(__name__)
GRACE_S = 0.5
"""How much longer than a frame's own time its call may take before the server counts as silent, in seconds."""
HANGS_S = 1.0
"""Time after GRACE_S at which a sender counts as hanging, in seconds. A sender that was only slow loses nothing: its
answer counts, and another link is used from then on."""

CLOSE_S = 2.0
"""How long a caller waits for gRPC to close a channel."""

Sent = tuple[Any, dict[int, ClientOperation], float]
"""A call in flight, None if it could not begin; its operations by number; its maximum time in seconds."""


class CallWaiter:
    """A caller that waits for an answer or for the baton."""

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
        """Wait. Returns False if neither came in time."""
        return self._lock.acquire(timeout=max(0.0, timeout_s))

    def _wake(self) -> None:
        if self._lock.locked():
            self._lock.release()


class BlockingLink:
    """The channel to one server, and its waiting callers. Thread-safe."""

    def __init__(
        self,
        address: str,
        clock: Clock,
        attempt_s: float,
        routing: Routing,
        tokens: Mapping[str, int],
        guard: threading.Lock,
        tls: Tls | None,
        login: Login | None = None,
    ) -> None:
        """`guard` is the client's lock, which guards `routing` and `tokens`."""
        self.address = address
        self.is_broken = False
        """True if an answer did not come, so that another link must be used."""
        self.is_ours = False
        """True if the server belongs to the client's cluster: a server has named its address, or it has sent a
        topology."""
        self.login_error: NotAuthenticated | None = None
        """Error with which the server rejected the login. Another link must be used, which may have another login."""
        self.has_served = False
        """True if it has received answers, so that its login was accepted once."""
        self.frames = 0
        self._clock, self._attempt_s = clock, attempt_s
        self._routing, self._tokens, self._guard = routing, tokens, guard
        self._channel = open_channel(address, tls, login=login)
        self._stub = kv_pb2_grpc.KVStub(self._channel)
        self._lock = threading.Lock()
        self._pending: deque[ClientOperation] = deque()
        self._due_at = inf
        """Time by which the caller with the baton must return from gRPC. Infinite: nobody has the baton."""

    @property
    def is_busy(self) -> bool:
        """True if a caller has the baton."""
        return self._due_at < inf

    def topology(self, timeout_s: float) -> kv_pb2.TopologyResponse:
        """Return the server's topology. Raises Unavailable, and NotAuthenticated if the server rejects the login."""
        try:
            message: kv_pb2.TopologyResponse = self._stub.Topology(kv_pb2.TopologyRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            found = from_rpc_error(error)
            if isinstance(found, NotAuthenticated):
                raise found from None
            raise Unavailable(f"{self.address} did not describe the cluster: {found}") from None
        except ValueError:  # gRPC raises it for a closed channel: another caller saw that the link is broken
            raise Unavailable(f"the connection to {self.address} is closed") from None
        self.has_served = True
        return message

    def run(self, operation: ClientOperation) -> tuple[Any, list[kv_pb2.Answers]]:
        """Return the answer to the operation or a StoreError, and the messages that this caller received for all."""
        waiter = operation.waiter = CallWaiter()
        received: list[kv_pb2.Answers] = []
        with self._lock:
            self._pending.append(operation)
            waiter.has_baton = not self.is_busy
            if waiter.has_baton:
                self._due_at = self._when_due()
        try:
            if not self._wait(waiter, operation.deadline):
                return self._give_up(operation), received
            if not waiter.has_baton:
                return waiter.answer, received
            while not waiter.is_answered:
                received.extend(self._send_queued())
        except BaseException:  # a bug here: a baton that is not passed on blocks all callers
            self._give_up(operation)
            raise
        self._pass_baton()
        return waiter.answer, received

    def _when_due(self) -> float:
        """Return the time by which a frame that is sent now must have ended."""
        return self._clock.now() + self._attempt_s + GRACE_S + HANGS_S

    def _wait(self, waiter: CallWaiter, deadline: float) -> bool:
        """Wait for the answer or the baton. Returns False at the deadline, or if the sender hangs; the link is broken
        then."""
        while not waiter.has_baton and not waiter.is_answered:
            now, due_at = self._clock.now(), self._due_at
            if now >= due_at:
                logger.warning("call hangs in gRPC, opening another connection address=%s", self.address)
                self.is_broken = True
            if now >= min(deadline, due_at):
                return False
            waiter.wait(min(deadline, due_at) - now)
        return True

    def start_frames(self, operations: Sequence[ClientOperation]) -> list[Sent]:
        """Send one caller's operations without waiting. Each call must be collected."""
        for operation in operations:
            operation.waiter = CallWaiter()
        queue = deque(operations)
        sent = []
        while queue:
            sent.append(self._start(cut(queue)))
        return sent

    def collect(self, sent: Sent) -> list[kv_pb2.Answers]:
        """Wait for a frame's answers and pass them to their waiters."""
        call, numbered, time_s = sent
        if call is None:
            return self._closed(numbered)
        return self._settle(lambda: call.result(timeout=time_s + HANGS_S), numbered)

    def refuse(self, error: NotAuthenticated) -> None:
        """Record that the server rejects the login."""
        self.is_broken, self.login_error = True, error

    def close(self) -> None:
        """Close the channel. Calls in flight end with an error. Raises Overloaded."""
        self.is_broken = True
        workers.run_within(self._channel.close, CLOSE_S)

    def close_when_idle(self) -> None:
        """Close a broken link, unless callers still wait for answers on it."""
        with self._lock:
            is_busy = self.is_busy
        if not is_busy:
            self.close()

    def _send_queued(self) -> list[kv_pb2.Answers]:
        """Send queued operations in this thread and wait for the answers: a call that another thread completes takes
        half as long again."""
        with self._lock:
            operations = cut(self._pending)
        if not operations:
            return []
        self._due_at = self._when_due()
        try:
            frame, numbered, time_s = self._frame(operations)
            try:
                return self._settle(lambda: self._stub.Execute(frame, timeout=time_s), numbered)
            except ValueError:  # gRPC raises it for a closed channel
                return self._closed(numbered)
        except BaseException:  # callers that wait for this one must not wait forever
            for operation in operations:
                if not operation.waiter.is_answered:
                    operation.waiter.set(lost(operation, "its sender was interrupted"))
            raise

    def _start(self, operations: Sequence[ClientOperation]) -> Sent:
        frame, numbered, time_s = self._frame(operations)
        try:
            return self._stub.Execute.future(frame, timeout=time_s), numbered, time_s
        except ValueError:
            return None, numbered, time_s

    # docs/protocol.md M16
    def _frame(self, operations: Sequence[ClientOperation]) -> tuple[kv_pb2.Frame, dict[int, ClientOperation], float]:
        """Return a frame, its operations by number, and the maximum time of its call in seconds.

        The frame names the ring that the client knows now: its sender may have waited while the ring changed, and other
        callers have queued since. It names the cluster, because a channel reconnects by itself, and another cluster's
        server may listen there by then."""
        longest = max(operation.deadline for operation in operations) - self._clock.now()
        time_s = min(max(longest, 0.001), self._attempt_s)
        with self._guard:
            frame, numbered = frame_of(
                operations,
                1,
                ring_version=self._routing.ring_version,
                timeout_ms=max(1, int(time_s * 1000)),
                tokens=self._tokens,
                cluster=self._routing.cluster,
            )
        for operation in operations:
            operation.is_sent = True
        self.frames += 1
        return frame, numbered, time_s + GRACE_S

    def _settle(
        self, answers_of: Callable[[], kv_pb2.Answers], numbered: dict[int, ClientOperation]
    ) -> list[kv_pb2.Answers]:
        try:
            answers = answers_of()
        except grpc.RpcError as error:
            self._fail(numbered, from_rpc_error(error))
            return []
        except grpc.FutureCancelledError:
            self._fail(numbered, OutcomeUnknown("the connection was closed"))
            return []
        except grpc.FutureTimeoutError:
            self._fail(numbered, OutcomeUnknown("a call hangs in gRPC"))
            return []
        self.has_served = True
        try:
            for number, answer in answered(answers):
                operation = numbered.pop(number, None)
                if operation is not None:
                    operation.waiter.set(answer)
        except ValueError as error:  # columns of unequal length; the operations may have been carried out
            self.is_broken = True
            logger.warning("cannot read answers address=%s error=%s", self.address, error)
        for operation in numbered.values():
            operation.waiter.set(lost(operation, f"{self.address} did not answer it"))
        return [answers]

    def _closed(self, numbered: dict[int, ClientOperation]) -> list[kv_pb2.Answers]:
        self._fail(numbered, Unavailable(f"the connection to {self.address} is closed"))
        return []

    def _fail(self, numbered: dict[int, ClientOperation], error: StoreError) -> None:
        """Answer all operations of a frame whose call failed."""
        self.is_broken = self.is_broken or isinstance(error, OutcomeUnknown | Unavailable)
        if isinstance(error, NotAuthenticated):
            self.refuse(error)
        for operation in numbered.values():
            if isinstance(error, Retryable | NotAuthenticated | PermissionDenied):
                operation.is_sent = False
                operation.waiter.set(error)
            else:
                operation.waiter.set(lost(operation, f"{self.address}: {error}"))

    def _give_up(self, operation: ClientOperation) -> StoreError:
        """Stop waiting for an answer or the baton."""
        with self._lock:
            waiter: CallWaiter = operation.waiter
            has_baton = waiter.has_baton
            if operation in self._pending:
                self._pending.remove(operation)
            else:
                operation.is_sent = True  # or is about to be
        if has_baton:
            self._pass_baton()
        return waiter.answer if waiter.is_answered else lost(operation, "the time is up")

    def _pass_baton(self) -> None:
        with self._lock:
            if self._pending:
                self._due_at = self._when_due()
                self._pending[0].waiter.pass_baton()
                return
            self._due_at = inf
            is_done = self.is_broken
        if is_done:
            self.close()
