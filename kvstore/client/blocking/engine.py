"""Carries operations to servers, with retries: the state that Client's methods share.

Everything here runs in worker threads (kvstore.rpc.workers): a caller hands its operations to a worker and waits. So no
exception that strikes the caller's thread can leave a lock, a request id or a link held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Any, TypeVar

from kvstore.client.blocking.admission import AdmissionQueue
from kvstore.client.blocking.link import CLOSE_S, BlockingLink
from kvstore.client.core import forks
from kvstore.client.core.address_backoff import AddressBackoff
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.fanout import Answers
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.operations import as_seconds, decode, names_its_partition
from kvstore.client.core.retries import (
    NoServerReachable,
    deadline_error,
    final_error_or_none,
    is_hint,
    may_need_new_topology,
    pause_s,
    pauses,
)
from kvstore.client.core.routing import Routing
from kvstore.client.core.session import ClientState
from kvstore.client.core.values import Level, Token
from kvstore.env.library_env import LibraryEnv
from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    Moved,
    NotAuthenticated,
    OtherCluster,
    OutcomeUnknown,
    Overloaded,
    StoreError,
    Unavailable,
)
from kvstore.proto import kv_pb2
from kvstore.rpc import workers

T = TypeVar("T")
logger = logging.getLogger(__name__)
REREAD_S = 10.0
"""Interval at which the topology is read without a reason, in seconds."""
TOPOLOGY_S_MIN = 0.25
"""Minimum time that a server gets to send its topology, in seconds."""
CHUNK = 500
"""Operations of one caller that are sent at once."""
LATE_S = 2.0
"""How much longer than its `timeout_s` a caller waits for its worker, in seconds."""
AGAIN_S = 0.02
"""Maximum pause, in seconds, before the reads are repeated that one message could not hold; random, half of this on
average."""


class BlockingEngine:
    """The state of one client, for any number of threads."""

    def __init__(self, env: LibraryEnv, config: ClientConfig) -> None:
        self.env = env
        self._config = config
        self.seen = ClientState(env.random, config.cluster)
        self.routing = self.seen.routing
        self._make_locks()
        self._links: dict[str, BlockingLink] = {}
        self._backoff, self._refusals = AddressBackoff(), LoginRefusals()
        self._counts: Counter[str] = Counter()
        self._read_at = 0.0
        self._reader: tuple[float, BlockingLink | None] | None = None
        """The caller that reads the topology now: its deadline, and the link that it uses."""
        self._favourite = env.random.randrange(1 << 16)
        self._why_closed, self.is_forked = "the client is closed", False
        forks.watch(self)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        """Guards everything here. Never held while a thread waits."""
        self._admission = AdmissionQueue(self._lock, self.env.clock)
        self._closing = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def open(self) -> None:
        """Read the topology from the first endpoint that returns one. Raises Unavailable, NotAuthenticated."""
        timeout_s = self._config.timeout_s
        try:
            workers.run(self._open_all, timeout_s + LATE_S)
        except workers.Late:
            raise Unavailable(f"no server returned a topology within {timeout_s:g} s") from None

    def _open_all(self) -> None:
        deadline = self.env.clock.now() + self._config.timeout_s
        waits = pauses(self.env.random)
        failure: StoreError = NoServerReachable()
        while (found := self._read_topology()) is not None:
            if isinstance(found, NotAuthenticated):
                raise found
            failure = failure if isinstance(found, NoServerReachable) else found
            left = deadline - self.env.clock.now()
            if left <= 0:
                raise failure if isinstance(failure, OtherCluster) else Unavailable(str(failure))
            self._pause(min(next(waits), left))

    def close(self) -> None:
        workers.run_within(self._close, CLOSE_S)

    def _close(self) -> None:
        with self._lock:
            self._closing.set()
            links, self._links = list(self._links.values()), {}
            self._admission.close()
        for link in links:
            link.close()

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        self._make_locks()  # a thread that does not exist in the child may hold them
        forks.keep(*self._links.values())
        self._links = {}
        self._why_closed, self.is_forked = forks.FORKED, True
        self._closing.set()

    def check_caller(self) -> None:
        """Raise InvalidRequest in the child of a fork."""
        forks.check(self)

    def check_closing(self) -> None:
        """Do nothing: any thread may close the client, also in the child of a fork."""

    def time_ms(self) -> int:
        with self._lock:
            return self.seen.time_ms

    def absorb(self, token: Token) -> None:
        with self._lock:
            self.seen.absorb(token)

    def watchers_of(self, key: bytes | None) -> list[str]:
        """Return the servers to ask for a watch, the best first."""
        with self._lock:
            return self.routing.watchers_of(key, self.env.random, self._config.endpoints)

    def check(self, message: kv_pb2.TopologyResponse, address: str) -> None:
        """Raise Unavailable for a topology of another cluster."""
        with self._lock:
            self.routing.check(message, address)

    def statistics(self) -> dict[str, float]:
        with self._lock:
            frames = sum(link.frames for link in self._links.values())
            return {
                **self._counts,
                "links": len(self._links),
                "frames": frames,
                "ring_version": self.routing.ring_version,
            }

    # ── one operation ──

    def run(self, operation: ClientOperation, timeout_s: float | None) -> Any:
        """Return the result of an operation. Raises StoreError."""
        wait_s = self._config.timeout_s if timeout_s is None else as_seconds(timeout_s)
        return self._run_in_worker([operation], wait_s, lambda: self._run(operation, wait_s))

    def run_all(self, wanted: Sequence[ClientOperation], timeout_s: float | None) -> list[Any]:
        """Return the results in order. The first error is raised after all have ended."""
        wait_s = self._config.timeout_s if timeout_s is None else as_seconds(timeout_s)
        return self._run_in_worker(wanted, wait_s, lambda: self._run_all(wanted, wait_s)) if wanted else []

    def _run_in_worker(self, operations: Sequence[ClientOperation], timeout_s: float, carry: Callable[[], T]) -> T:
        """Run operations in a worker, and wait until the last of their deadlines. Raises StoreError."""
        job, until = workers.Job(carry), self.env.clock.now() + timeout_s
        workers.start(job)  # also for a caller that is a worker, because sessions and watches call from one
        while True:
            try:
                return job.wait(until + LATE_S - self.env.clock.now())
            except workers.Late:
                now = self.env.clock.now()
                until = max(operation.deadline for operation in operations)  # moves while servers answer
                if until + LATE_S <= now:
                    raise _out_of_reach(operations, timeout_s) from None

    def _run(self, operation: ClientOperation, timeout_s: float) -> Any:
        self._begin(operation, timeout_s, may_wait=True)
        try:
            answer = self._attempt(operation)
            if isinstance(answer, StoreError):
                answer = self._retry(operation, answer, timeout_s)
            return decode(operation, answer)
        finally:
            self._admission.end([operation])

    def _run_all(self, wanted: Sequence[ClientOperation], timeout_s: float) -> list[Any]:
        results: list[Any] = []
        left = iter(wanted)
        while chunk := list(islice(left, CHUNK)):
            while chunk:
                # Only the first operation may wait for a slot: a caller that waits while it holds slots of others could
                # wait forever.
                begun = [chunk.pop(0)]
                self._begin(begun[0], timeout_s, may_wait=True)
                try:
                    while chunk and self._begin(chunk[0], timeout_s, may_wait=False):
                        begun.append(chunk.pop(0))
                    results.extend(self._run_begun(begun, timeout_s))
                finally:
                    self._admission.end(begun)
        for result in results:
            if isinstance(result, StoreError):
                raise result
        return results

    def run_whole(self, wanted: Sequence[ClientOperation], timeout_s: float | None) -> Answers:
        """Return the results of a call on all partitions, or Moved if a range has moved, so that the call
        starts over."""
        try:
            return self.run_all(wanted, timeout_s)
        except Moved as moved:
            return moved

    def _run_begun(self, operations: list[ClientOperation], timeout_s: float) -> Iterator[Any]:
        wanted = operations
        while True:
            since = self.env.clock.now()
            self._send_together(wanted)
            refused = [each for each in wanted if _did_not_fit(each)]
            if not 0 < len(refused) < len(wanted) or self.is_closed:
                break
            self._pause(self.env.random.uniform(0, AGAIN_S))
            with self._lock:
                _prepare_retry(operations, refused, self.env.clock.now() + timeout_s, self.routing)
                self._counts["failed_Overloaded"] += len(refused)
                self._counts["retries"] += len(refused)
            wanted = refused
        for operation in operations:
            answer = _answer(operation)
            try:
                if isinstance(answer, StoreError):
                    answer = self._retry(operation, answer, timeout_s, since)
                yield decode(operation, answer)
            except StoreError as error:
                yield error

    def _send_together(self, operations: Sequence[ClientOperation]) -> None:
        """Send operations in one frame per link, and wait for the answers."""
        frames: dict[int, tuple[BlockingLink, list[ClientOperation]]] = {}
        for operation in operations:
            link = self._choose(operation)
            if link is not None:
                frames.setdefault(id(link), (link, []))[1].append(operation)
        sent = [(link, link.start_frames(group)) for link, group in frames.values()]
        for link, calls in sent:
            for call in calls:
                self._absorb(link, link.collect(call))

    def _attempt(self, operation: ClientOperation) -> Any:
        """Return the answer, or a StoreError."""
        operation.is_sent = False
        link = self._choose(operation)
        if link is None:
            return Unavailable("the client is closed") if self.is_closed else NoServerReachable()
        answer, received = link.run(operation)
        if isinstance(answer, NotAuthenticated):
            link.refuse(answer)
        self._absorb(link, received)
        return answer

    def _retry(self, operation: ClientOperation, error: StoreError, timeout_s: float, since: float = inf) -> Any:
        """Retry until there is an answer that is not an error, or a final error, which is raised. `since`: start of the
        failed attempt; a topology that was read later is not read again for it."""
        waits = pauses(self.env.random)
        while True:
            left = operation.deadline - self.env.clock.now()
            with self._lock:
                self._counts[f"failed_{type(error).__name__}"] += 1
                everybody = self.routing.everybody(self._config.endpoints)
                error = self._refusals.of_all(error, everybody, is_late=left <= 0)
                final = final_error_or_none(operation, error)
                self.routing.learn_from(error)
            if final is not None:
                raise final
            if left <= 0 or self.is_closed:
                raise deadline_error(operation, error, timeout_s)
            if not is_hint(error):
                self._pause(min(pause_s(error, waits), left))
                if may_need_new_topology(error) and self._read_at <= since:
                    self._read_topology((operation.deadline + self.env.clock.now()) / 2)
            with self._lock:
                self._counts["retries"] += 1
                self.routing.redirect(operation)
            since = self.env.clock.now()
            answer = self._attempt(operation)
            if not isinstance(answer, StoreError):
                return answer
            error = answer

    # ── room ──

    def _begin(self, operation: ClientOperation, timeout_s: float, *, may_wait: bool) -> bool:
        """Begin an operation. Returns False if there is no free slot and it may not wait. Raises Unavailable."""
        now = self.env.clock.now()
        operation.deadline = now + timeout_s
        if now - self._read_at > REREAD_S:
            self._read_topology(now + timeout_s / 2)
        with self._lock:
            if self.is_closed:
                raise InvalidRequest(self._why_closed)
            if not operation.partition:
                operation.partition = self.routing.partition_of(operation.key)
            numbering = self.seen.numberings[operation.partition]
            if self._admission.begin(numbering, operation):
                return True
            if not may_wait:
                return False
            waiter = self._admission.enqueue(numbering, operation)
        has_begun = self._admission.wait(numbering, waiter, operation)
        if self.is_closed:
            raise InvalidRequest(self._why_closed)
        if not has_begun:
            raise Unavailable(f"too many operations in flight; nothing was sent within {timeout_s:g} s")
        return True

    # ── where to ──

    def _choose(self, operation: ClientOperation) -> BlockingLink | None:
        """Return the link to the best server for an operation that is not in backoff."""
        with self._lock:
            self.routing.strengthen(operation)
            may_follow = operation.is_read and operation.level in (Level.SESSION, Level.STALE)
            turn = self._favourite + operation.retries
            candidates = self.routing.candidates(
                operation.partition, self._config.endpoints, follow=may_follow, turn=turn
            )
            found = (self._open(address) for address in candidates)
            return next((link for link in found if link is not None and link.is_ours), None)

    def _open(self, address: str) -> BlockingLink | None:
        link = self._links.get(address)
        if link is not None:
            link.is_ours = link.is_ours or self.routing.is_ours(address)
            return link
        if self.is_closed or self._backoff.is_backing_off(address, self.env.clock.now()):
            return None
        attempt_s = 2 * self._config.silence_s
        config, clock = self._config, self.env.clock
        try:
            link = BlockingLink(
                address,
                clock,
                attempt_s,
                self.routing,
                self.seen.tokens,
                self._lock,
                config.tls,
                config.login,
            )
        except (OSError, ConfigError) as error:
            if not self.routing.is_known:
                raise  # the caller that opens the client gets the error
            logger.warning("cannot connect address=%s reason=%s", address, error)  # files that are being replaced
            self._backoff.note_failure(address, clock.now())
            return None
        link.is_ours = self.routing.is_ours(address)
        self._links[address] = link
        return link

    def _absorb(self, link: BlockingLink, received: Sequence[kv_pb2.Answers]) -> None:
        """Use what came with answers, and drop a broken link."""
        with self._lock:
            for answers in received:
                if self.seen.absorb_answers(answers):
                    self._read_at = 0.0
            if received and link.login_error is None:
                self._backoff.reset(link.address)
            if received or link.login_error is not None:
                self._refusals.record(link.address, link.login_error, has_served=link.has_served)
            if not link.is_broken or self._links.get(link.address) is not link:
                return
            del self._links[link.address]
            self._backoff.note_failure(link.address, self.env.clock.now())
            self._counts["link_breaks"] += 1
        link.close_when_idle()

    def _read_topology(self, until: float = inf) -> StoreError | None:
        """Read the topology from the first server that answers, unless another caller does so. Returns None, or the
        error: NotAuthenticated if a server rejected the login. Connected servers come first, because another one may be
        down and use up the caller's time."""
        now = self.env.clock.now()
        with self._lock:
            reader = self._reader
            if reader is not None and now < reader[0] and self.routing.is_known:
                return None
            self._reader = now + LATE_S, None
            known = self.routing.everybody(self._config.endpoints)
            addresses = sorted(known, key=lambda each: each not in self._links)
        if reader is not None and reader[1] is not None and now >= reader[0]:  # gRPC does not return to that caller
            reader[1].is_broken = True
            self._absorb(reader[1], ())
        try:
            failure: StoreError = NoServerReachable()
            for address in addresses:
                left = until - self.env.clock.now()
                if left <= 0:
                    break
                with self._lock:
                    link = self._open(address)
                if link is None:
                    continue
                attempt_s = min(self._config.connect_timeout_s, max(left, TOPOLOGY_S_MIN))
                self._reader = self.env.clock.now() + attempt_s + LATE_S, link
                try:
                    message = link.topology(attempt_s)
                    self.check(message, address)
                except (
                    NotAuthenticated
                ) as error:  # another server may accept the login: this one's table may be old or unreadable
                    failure = error
                    link.refuse(error)
                    self._absorb(link, ())
                    continue
                except Unavailable as error:
                    failure = failure if isinstance(failure, NotAuthenticated) else error
                    link.is_broken = True
                    self._absorb(link, ())
                    continue
                with self._lock:
                    self.seen.learn(message)
                    link.is_ours = True
                    self._read_at = self.env.clock.now()
                self._drop_foreign_links()
                return None
            return failure
        finally:
            self._reader = None

    def _drop_foreign_links(self) -> None:
        """End links to servers that have left the cluster. Nobody asks them, so nobody would find them broken."""
        with self._lock:
            gone = [link for address, link in self._links.items() if not self.routing.is_ours(address)]
            for link in gone:
                link.is_broken = True
                del self._links[link.address]
        for link in gone:
            link.close_when_idle()

    def pause(self, seconds: float) -> None:
        """Sleep before the next attempt of a transaction, at most until the client is closed."""
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        """Sleep until the pause is over or the client is closed."""
        if seconds > 0:
            self._closing.wait(seconds)


def _out_of_reach(operations: Sequence[ClientOperation], timeout_s: float) -> StoreError:
    """Return the error of a caller whose worker has not returned. The worker may still send a write, so its outcome is
    unknown."""
    if all(operation.is_read for operation in operations):
        return Unavailable(f"no answer within {timeout_s:g} s")
    return OutcomeUnknown(f"no answer within {timeout_s:g} s; the write may still be carried out")


def _answer(operation: ClientOperation) -> Any:
    """Return the answer of an operation that was sent together with others, or a StoreError."""
    return operation.waiter.answer if operation.waiter else NoServerReachable()


def _did_not_fit(operation: ClientOperation) -> bool:
    """Return True for a read of a key that a server refused because the message was full: it can hold few large values.
    A server that refuses writes is overloaded and gets time instead."""
    return operation.is_read and not names_its_partition(operation) and isinstance(_answer(operation), Overloaded)


def _prepare_retry(
    operations: Sequence[ClientOperation], refused: Sequence[ClientOperation], until: float, routing: Routing
) -> None:
    """Prepare `refused` to be sent again. The server has made progress, so the time of unanswered operations starts
    again, up to `until`."""
    for operation in operations:
        if isinstance(_answer(operation), StoreError):
            operation.deadline = until
    for operation in refused:
        final = final_error_or_none(operation, _answer(operation))
        assert final is None, "an overloaded read is retried"
        routing.redirect(operation)
        operation.waiter = None
