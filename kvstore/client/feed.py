"""The change feed in pages, for blocking readers such as streaming sources.

A reader keeps one sequence for each partition and requests the changes behind it. Nothing is lost or duplicated while
it continues from the `next` of each page. `Client.watch` does all of this by itself; this module is for readers that
keep positions in their own place.

    with FeedReader("kv://host:7401") as feed:
        for each in feed.positions():
            page = feed.changes(each.partition, each.oldest)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc

from kvstore.backoff import delays
from kvstore.client.core import forks
from kvstore.client.core.config import ClientConfig, as_config
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.watching import POSITION_MAX, checked_positions, is_count
from kvstore.env.library_env import library_env
from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    NotAuthenticated,
    OtherCluster,
    OutcomeUnknown,
    Retryable,
    StoreError,
    Unavailable,
)
from kvstore.proto import feed_pb2, feed_pb2_grpc
from kvstore.rpc import workers
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error, is_answered

CLOSED = "the reader is closed"
CLOSE_S, LATE_S = 2.0, 2.0
"""How long `close` waits for gRPC, and how long a call may exceed its `timeout_s`, in seconds."""
LONG_SHARES = 3
"""Share of a long call's time that one server may use before the next one is asked: one third."""
UINT32_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1


class PartitionFeed(NamedTuple):
    """The bounds of one partition's feed."""

    partition: str
    oldest: int
    """Lowest position from which the feed can still be read."""
    latest: int
    """Position behind everything that was acknowledged before the call."""
    ended: bool
    """True if the partition has left the ring: nothing follows `latest`."""
    servers: tuple[str, ...]
    """Addresses (`host:port`) of the servers that read the feed at the lowest cost, the best first."""
    cluster: str = ""
    """Id of the cluster to which the positions belong; empty if the server did not report it."""
    gone: bool = False
    """True if the partition has left and its log can no longer be read. `oldest` and `latest` are 0."""

    @property
    def oldest_watch(self) -> int:
        """Lowest position from which a watch can continue. A watch also needs records that the log may have lost
        together with the change at `oldest`."""
        return self.oldest + 1 if self.oldest else 0


class FeedReader:
    """Reads the change feed in pages. Any number of threads may use one reader.

    Create it after a fork; a reader that was opened before a fork refuses calls in the child. Every call asks all
    servers until `timeout_s`.

    Args:
        cluster: A URL like `kv://host:port,host:port`, or a `ClientConfig`.
        identity: Id of the cluster that the servers must belong to. Empty: the one that the configuration names, or
            else that of the server that answers `positions` first.

    Raises:
        PositionTrimmed: If the log no longer reaches back to a position.
        InvalidRequest: If an argument is wrong.
        Unavailable: If no server has answered in time.
    """

    def __init__(self, cluster: str | ClientConfig, identity: str = "") -> None:
        self._config = as_config(cluster)
        self._identity = identity or self._config.cluster
        self._env = library_env("kvstore feed")
        self._lock = threading.Lock()
        self._open: dict[str, tuple[grpc.Channel, feed_pb2_grpc.FeedStub]] = {}
        """Channel and stub by address. They are created together, because gRPC crashes the process if a stub is made
        for a closed channel."""
        self._closing = threading.Event()
        self.is_forked = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        self._lock, self._closing = (
            threading.Lock(),
            threading.Event(),
        )  # a thread that does not exist in the child may hold them
        forks.keep(*self._open.values())
        self._open, self.is_forked = {}, True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Calls in flight and later calls end with an error."""
        workers.run_within(self._close, CLOSE_S)

    def _close(self) -> None:
        with self._lock:
            self._closing.set()
            closed, self._open = self._open, {}
        for channel, _ in closed.values():
            channel.close()

    def positions(self, *, timeout_s: float | None = None) -> list[PartitionFeed]:
        """Return the bounds of all partitions' feeds, sorted by partition id. Costs one round trip.

        Read a partition that is new to the reader from position 0. If it is `gone`, the reader has missed its changes.

        Args:
            timeout_s: Maximum time for the call, in seconds.
        """
        request = feed_pb2.PositionsRequest()

        def ask(stub: feed_pb2_grpc.FeedStub, left_s: float) -> feed_pb2.PositionsResponse:
            found: feed_pb2.PositionsResponse = stub.Positions(request, timeout=left_s)
            self._learn(found.cluster)
            return found

        response: feed_pb2.PositionsResponse = self._ask(ask, (), timeout_s, is_long=True)
        return [
            PartitionFeed(
                each.partition,
                each.oldest,
                each.latest,
                each.ended,
                tuple(each.servers),
                response.cluster,
                each.gone,
            )
            for each in response.partitions
        ]

    def changes(
        self,
        partition: str,
        after: int,
        *,
        servers: Sequence[str] = (),
        until: int = 0,
        rows_max: int = 0,
        bytes_max: int = 0,
        wait_ms: int = 0,
        start: bytes = b"",
        end: bytes = b"",
        keys_only: bool = False,
        timeout_s: float | None = None,
    ) -> feed_pb2.ChangesResponse:
        """Return a page of the changes behind `after`, in columns (see feed.proto). Costs one round trip.

        Args:
            partition: Id of the partition.
            after: Return changes with a higher sequence than this.
            servers: Addresses to ask first, in this order.
            until: Return changes up to this sequence. 0: no bound.
            rows_max: Maximum number of changes. 0: the server's default.
            bytes_max: Maximum bytes of keys and values. 0: the server's default.
            wait_ms: How long the server waits for a change if there is none, in milliseconds.
            start: First key of the range to read.
            end: First key behind the range to read. Empty: no bound.
            keys_only: Return empty values.
            timeout_s: Maximum time for the call in addition to `wait_ms`, in seconds.

        Returns:
            The page. Empty columns mean that the range has no changes up to its `next`.

        Raises:
            PositionTrimmed: If the log no longer reaches back to `after`.
            InvalidRequest: If an argument is out of range.
        """
        _check(POSITION_MAX, after=after, until=until)
        _check(UINT32_MAX, rows_max=rows_max, bytes_max=bytes_max, wait_ms=wait_ms)
        request = feed_pb2.ChangesRequest(
            partition=partition,
            after=after,
            until=until,
            rows_max=rows_max,
            bytes_max=bytes_max,
            wait_ms=wait_ms,
            start=start,
            end=end,
            keys_only=keys_only,
            cluster=self._identity,
        )
        page: feed_pb2.ChangesResponse = self._ask(
            lambda stub, left_s: stub.Changes(request, timeout=left_s), servers, timeout_s, wait_ms / 1000
        )
        return page

    def hold(self, name: str, positions: Mapping[str, int], ttl_s: float, *, timeout_s: float | None = None) -> int:
        """Keep the changes behind some positions readable, however old they get, and return the deadline.

        A second call with the same name moves the positions and the deadline.

        Args:
            name: Name of the hold.
            positions: Sequences by partition.
            ttl_s: How long the changes are kept, in seconds. 0: release them.
            timeout_s: Maximum time for the call, in seconds.

        Returns:
            The deadline, in milliseconds since 1970.

        Raises:
            PositionTrimmed: If the log no longer reaches back to a position.
            InvalidRequest: If an argument is out of range.
            OutcomeUnknown: If the hold may have been made.
        """
        if not 0 <= ttl_s * 1000 <= UINT64_MAX:  # false for NaN, too
            raise InvalidRequest(f"expected `ttl_s` to be 0 or more, got {ttl_s!r}")
        request = feed_pb2.HoldRequest(
            name=name,
            positions=checked_positions("positions", positions),
            ttl_ms=int(ttl_s * 1000),
            cluster=self._identity,
        )
        response: feed_pb2.HoldResponse = self._ask(
            lambda stub, left_s: stub.Hold(request, timeout=left_s), (), timeout_s, is_long=True, is_read=False
        )
        return response.deadline_ms

    def _learn(self, cluster: str) -> None:
        """Remember the cluster of the first answer. Raises OtherCluster for another cluster, where the same positions
        are other changes."""
        if not cluster:
            return
        with self._lock:
            self._identity = self._identity or cluster
        if cluster != self._identity:
            raise OtherCluster(
                f"{cluster!r} is another cluster: expected a server of {self._identity!r}; check the addresses"
            )

    def _ask(
        self,
        call: Callable[[feed_pb2_grpc.FeedStub, float], Any],
        servers: Sequence[str],
        timeout_s: float | None,
        wait_s: float = 0.0,
        *,
        is_long: bool = False,
        is_read: bool = True,
    ) -> Any:
        """Return the first answer of a server. All of these calls may be repeated. `is_long`: the call takes longer the
        more partitions there are, and starts over when it is repeated. `is_read`: the call leaves no outcome unknown.
        """
        patience_s = wait_s + (self._config.timeout_s if timeout_s is None else timeout_s)

        def ask() -> Any:
            return self._ask_all(call, servers, patience_s, wait_s, is_long=is_long, is_read=is_read)

        try:
            return workers.run(ask, patience_s + LATE_S)
        except workers.Late:
            kind = Unavailable if is_read else OutcomeUnknown
            raise kind(f"no server answered within {patience_s:g} s; a call hangs in gRPC") from None

    def _ask_all(
        self,
        call: Callable[[feed_pb2_grpc.FeedStub, float], Any],
        servers: Sequence[str],
        patience_s: float,
        wait_s: float,
        *,
        is_long: bool,
        is_read: bool,
    ) -> Any:
        attempt_s = wait_s + 2 * self._config.silence_s
        if is_long:
            attempt_s = max(attempt_s, patience_s / LONG_SHARES)
        deadline = self._env.clock.now() + patience_s
        failure: StoreError = Unavailable(f"no server answered within {patience_s:g} s")
        addresses, refusals = list(dict.fromkeys((*servers, *self._config.endpoints))), LoginRefusals()
        answered: StoreError | None = None
        """The last answer of a server that accepted the login."""
        unknown: OutcomeUnknown | None = None
        for address in self._turns(addresses):
            left_s = deadline - self._env.clock.now()
            if left_s <= 0:
                break
            has_served = address in self._open
            try:
                return call(self._stub(address), min(left_s, attempt_s))
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if is_answered(error) and not isinstance(failure, NotAuthenticated):
                    answered = failure
                if isinstance(failure, OutcomeUnknown) and not is_read:
                    unknown = failure
                self._forget(address, error)
            except ValueError:  # gRPC raises it for a channel that was closed meanwhile
                raise unknown or Unavailable(CLOSED) from None
            except Unavailable as error:
                if self._closing.is_set():
                    raise unknown or error from None
                answered = failure = Unavailable(f"{address}: {error}")  # an answer of another cluster
            except (OSError, ConfigError) as error:  # a certificate or password file may be missing for a moment
                failure = Unavailable(f"{address}: {error}")
            failure = refusals.judge(address, failure, addresses, has_served=has_served)
            if not isinstance(failure, Retryable | OutcomeUnknown):
                raise unknown or failure
        # The time of the last call may have ended together with the caller's, so its error counts least.
        failure = unknown or answered or refusals.error_or_none(addresses, is_late=True) or failure
        raise Unavailable(str(failure)) if isinstance(failure, OutcomeUnknown) and is_read else failure

    def _turns(self, addresses: Sequence[str]) -> Iterator[str]:
        """Yield all addresses again and again, with pauses between the rounds."""
        for pause in delays(self._env.random, first_s=0.02, cap_s=0.5):
            yield from addresses
            self._closing.wait(pause)

    def _forget(self, address: str, error: Any) -> None:
        """Drop a channel that does not connect, so that the next call opens another one: a channel keeps the
        certificates and the login with which it was opened. Calls of other threads on it end by themselves."""
        of_channel = error.code() is grpc.StatusCode.UNAVAILABLE and not is_answered(error)
        if of_channel or error.code() is grpc.StatusCode.UNAUTHENTICATED:
            with self._lock:
                self._open.pop(address, None)

    def _stub(self, address: str) -> feed_pb2_grpc.FeedStub:
        with self._lock:
            forks.check(self)
            if self._closing.is_set():
                raise Unavailable(CLOSED)
            found = self._open.get(address)
            if found is None:
                channel = open_channel(address, self._config.tls, login=self._config.login)
                found = self._open[address] = channel, feed_pb2_grpc.FeedStub(channel)
            return found[1]


def _check(most: int, **numbers: object) -> None:
    """Raise InvalidRequest for a number that the request cannot carry. protobuf's own error is not one of ours."""
    for name, number in numbers.items():
        if not is_count(number, most):
            raise InvalidRequest(f"expected `{name}` to be a whole number from 0 to {most}, got {number!r}")
