"""One server as a blocking client sees it: one caller at a time sends for all callers that wait.

Callers are worker threads (kvstore.rpc.workers). A caller queues its operation. If no other caller sends to this
server, it sends all that is queued, in unary frames, until its own operation is answered. Then it passes the baton to
another caller that still waits. So callers share frames, and a lone caller pays for one unary call.

A sender that is still inside gRPC after its call's own time hangs. The callers that wait for it break the link: the
engine opens another one, with a channel of its own.
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
"""How much longer than a frame's own time its call may take before the server counts as silent."""
HANGS_S = 1.0
"""A sender that gRPC keeps for so much longer hangs. A sender that was only slow loses nothing: its answer counts, and
another link is used from then on."""

CLOSE_S = 2.0
"""How long a caller waits for gRPC to close a channel."""

Sent = tuple[Any, dict[int, ClientOperation], float]
"""A call under way, None if it could not begin; its operations by number; how many seconds it may take."""


class CallWaiter:
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
        self.login_error: NotAuthenticated | None = None
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
        self._pending: deque[ClientOperation] = deque()
        self._due_at = inf
        """When the caller that has the baton must have come back from gRPC. Infinite: nobody has it."""

    @property
    def is_busy(self) -> bool:
        """True if a caller has the baton."""
        return self._due_at < inf

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

    def run(self, operation: ClientOperation, ring_version: int) -> tuple[Any, list[kv_pb2.Answers]]:
        """The answer to the operation or a StoreError; and the messages that this caller received for all."""
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
                received.extend(self._send_queued(ring_version))
        except BaseException:  # a fault of ours: a baton that is kept stops all who come
            self._give_up(operation)
            raise
        self._pass_baton()
        return waiter.answer, received

    def _when_due(self) -> float:
        """When a frame that is sent now must have ended."""
        return self._clock.now() + self._attempt_s + GRACE_S + HANGS_S

    def _wait(self, waiter: CallWaiter, deadline: float) -> bool:
        """Wait for the answer or the baton. Returns False at the deadline, or if the sender hangs: the link is broken
        then."""
        while not waiter.has_baton and not waiter.is_answered:
            now, due_at = self._clock.now(), self._due_at
            if now >= due_at:
                logger.warning("address=%s a call hangs in gRPC; another connection takes its place", self.address)
                self.is_broken = True
            if now >= min(deadline, due_at):
                return False
            waiter.wait(min(deadline, due_at) - now)
        return True

    def start_frames(self, operations: Sequence[ClientOperation], ring_version: int) -> list[Sent]:
        """Send one caller's operations without waiting; each call is to be collected."""
        for operation in operations:
            operation.waiter = CallWaiter()
        queue = deque(operations)
        sent = []
        while queue:
            sent.append(self._start(cut(queue), ring_version))
        return sent

    def collect(self, sent: Sent) -> list[kv_pb2.Answers]:
        """Wait for a frame's answers and hand them to their waiters."""
        call, numbered, time_s = sent
        if call is None:
            return self._closed(numbered)
        return self._settle(lambda: call.result(timeout=time_s + HANGS_S), numbered)

    def refuse(self, error: NotAuthenticated) -> None:
        """Its server has said that it does not know the user."""
        self.is_broken, self.login_error = True, error

    def close(self) -> None:
        """Calls under way end with an error. Raises Overloaded."""
        self.is_broken = True
        workers.run_within(self._channel.close, CLOSE_S)

    def close_when_idle(self) -> None:
        """Let a broken link go. Others may still wait for their answers on it."""
        with self._lock:
            is_busy = self.is_busy
        if not is_busy:
            self.close()

    def _send_queued(self, ring_version: int) -> list[kv_pb2.Answers]:
        """In this thread from send to answers: a call that another thread completes takes half as long again."""
        with self._lock:
            operations = cut(self._pending)
        if not operations:
            return []
        self._due_at = self._when_due()
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

    def _start(self, operations: Sequence[ClientOperation], ring_version: int) -> Sent:
        frame, numbered, time_s = self._frame(operations, ring_version)
        try:
            return self._stub.Execute.future(frame, timeout=time_s), numbered, time_s
        except ValueError:
            return None, numbered, time_s

    def _frame(
        self, operations: Sequence[ClientOperation], ring_version: int
    ) -> tuple[kv_pb2.Frame, dict[int, ClientOperation], float]:
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
        except ValueError as error:  # columns of unequal length; what was sent may be done
            self.is_broken = True
            logger.warning("address=%s its answers cannot be read: %s", self.address, error)
        for operation in numbered.values():
            operation.waiter.set(lost(operation, f"{self.address} left it without an answer"))
        return [answers]

    def _closed(self, numbered: dict[int, ClientOperation]) -> list[kv_pb2.Answers]:
        self._fail(numbered, Unavailable(f"the connection to {self.address} is closed"))
        return []

    def _fail(self, numbered: dict[int, ClientOperation], error: StoreError) -> None:
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

    def _give_up(self, operation: ClientOperation) -> StoreError:
        """A caller stops waiting for its answer or the baton."""
        with self._lock:
            waiter: CallWaiter = operation.waiter
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
                self._due_at = self._when_due()
                self._pending[0].waiter.pass_baton()
                return
            self._due_at = inf
            is_done = self.is_broken
        if is_done:
            self.close()
