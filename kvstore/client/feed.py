"""The change feed in pages, for blocking readers, as streaming sources are: `with FeedReader(cluster) as feed`.

A reader keeps one sequence for each partition, and gets what stands behind it. Nothing is lost or doubled while it goes
on from each page's `next`; `KV.Watch` (Client.watch) does that by itself, this is for those who keep positions in a
place of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc

from kvstore.backoff import delays
from kvstore.client.core import forks
from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.watching import POSITION_MAX, checked_positions, is_count
from kvstore.env.library_env import library_env
from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    NotAuthenticated,
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
"""How long `close` waits for gRPC; how much longer than its `timeout_s` a call waits for it."""
LONG_SHARES = 3
"""A server that does not answer a call that takes long gets no more of its time."""
UINT32_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1


class PartitionFeed(NamedTuple):
    """Where the feed of one partition begins and ends."""

    partition: str
    oldest: int
    """The least position that can still be read from."""
    latest: int
    """Nothing that was acknowledged before the call stands behind it."""
    ended: bool
    """It has left the ring: nothing follows `latest`."""
    servers: tuple[str, ...]
    """host:port of those who read it best, the best first."""
    cluster: str = ""
    """The identity of the cluster, in which alone its positions mean something. Empty: the server did not tell."""
    gone: bool = False
    """It has left, and its log cannot be read any more; `oldest` and `latest` are 0."""


class FeedReader:
    """Reads the change feed in pages. Any number of threads may use it. Make it after a fork: in a child
    calls of one that was made before are refused. Calls raise errors of
    `kvstore.errors`, after trying all servers for `timeout_s`: PositionTrimmed, InvalidRequest at once, else
    Unavailable."""

    def __init__(self, cluster: str | ClientConfig, identity: str = "") -> None:
        """`identity`: of which cluster the servers must be. Empty: the one that the configuration names, else the one
        whose server answers `positions` first."""
        self._config = parse_url(cluster) if isinstance(cluster, str) else cluster
        self._identity = identity or self._config.cluster
        self._env = library_env("kvstore feed")
        self._lock = threading.Lock()
        self._open: dict[str, tuple[grpc.Channel, feed_pb2_grpc.FeedStub]] = {}
        """By address. Made together: gRPC crashes the process when a stub is made of a channel that is closed."""
        self._closing = threading.Event()
        self.is_forked = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        self._lock, self._closing = threading.Lock(), threading.Event()  # a thread that is not here may hold them
        forks.keep(*self._open.values())
        self._open, self.is_forked = {}, True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections. Calls under way end with an error, and so do later ones."""
        workers.run_within(self._close, CLOSE_S)

    def _close(self) -> None:
        with self._lock:
            self._closing.set()
            closed, self._open = self._open, {}
        for channel, _ in closed.values():
            channel.close()

    def positions(self, *, timeout_s: float | None = None) -> list[PartitionFeed]:
        """The feeds of all partitions, in the order of their ids. One that is new to a reader is read from 0; if it is
        `gone`, the reader has missed what stood there."""
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
        """The page of changes behind `after` (and up to `until`), in columns; see feed.proto. Empty columns: there are
        none in [start, end) up to its `next`. `servers` are asked first, in turn. Raises PositionTrimmed,
        InvalidRequest."""
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
        """Keep what stands behind `positions` for `ttl_s`, however old it gets; again under the same name moves both.
        0 seconds: give it back. Returns the deadline, in milliseconds since 1970. Raises PositionTrimmed,
        InvalidRequest, OutcomeUnknown."""
        if not 0 <= ttl_s * 1000 <= UINT64_MAX:  # also if it is no number
            raise InvalidRequest(f"want `ttl_s` from 0 on, got {ttl_s!r}")
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
        """Raises Unavailable for another cluster than the first: the same positions are other changes there."""
        if not cluster:
            return
        with self._lock:
            self._identity = self._identity or cluster
        if cluster != self._identity:
            raise Unavailable(f"a server of another cluster listens there: want {self._identity}, got {cluster}")

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
        """The first answer of a server. All of these calls may be repeated. `is_long`: one takes longer, the more
        partitions there are, and begins from the front when it is repeated. `is_read`: one leaves nothing unknown."""
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
        said: StoreError | None = None
        """What a server that knows who asks has answered."""
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
                    said = failure
                if isinstance(failure, OutcomeUnknown) and not is_read:
                    unknown = failure
                self._forget(address, error)
            except ValueError:  # gRPC's word for a channel that was closed meanwhile
                raise Unavailable(CLOSED) from None
            except Unavailable as error:
                if self._closing.is_set():
                    raise
                failure = Unavailable(f"{address}: {error}")
            except (OSError, ConfigError) as error:  # a file of a certificate or a password may be away for a moment
                failure = Unavailable(f"{address}: {error}")
            failure = refusals.judge(address, failure, addresses, has_served=has_served)
            if not isinstance(failure, Retryable | OutcomeUnknown):
                raise failure
        # The last call's time may have ended with the caller's: what it says counts least.
        failure = unknown or said or refusals.error_or_none(addresses, is_late=True) or failure
        raise Unavailable(str(failure)) if isinstance(failure, OutcomeUnknown) and is_read else failure

    def _turns(self, addresses: Sequence[str]) -> Iterator[str]:
        """All addresses, again and again, with pauses between the rounds."""
        for pause in delays(self._env.random, first_s=0.02, cap_s=0.5):
            yield from addresses
            self._closing.wait(pause)

    def _forget(self, address: str, error: Any) -> None:
        """Have the next call open another channel where this one does not come through: its certificates and its login
        are those of the time when it was opened. Calls of other threads end on it by themselves."""
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
    """Raises InvalidRequest for what does not fit in the request: protobuf's own word is none of our errors."""
    for name, number in numbers.items():
        if not is_count(number, most):
            raise InvalidRequest(f"want `{name}` as a whole number from 0 to {most}, got {number!r}")
