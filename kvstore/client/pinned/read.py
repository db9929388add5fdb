"""Reads one split of a pinned store page by page. If a replica fails, another one continues behind the last page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from kvstore.client.core.scanning import scan_bounds
from kvstore.client.pinned.pins import Split
from kvstore.env.library_env import library_env
from kvstore.errors import ConfigError, NoSuchPin, NotAuthenticated, OutcomeUnknown, Retryable, StoreError, Unavailable
from kvstore.proto import data_pb2, data_pb2_grpc, pinned_page
from kvstore.proto.pinned_page import PageColumns, PinnedRow
from kvstore.rpc import workers
from kvstore.rpc.channels import open_channel, paging
from kvstore.rpc.login import Login
from kvstore.rpc.status import from_rpc_error

PATIENCE_S = 30.0
STREAM_S = 30.0
"""Maximum time of one stream, in seconds. A reader that needs longer for its pages continues with another stream."""
HANGS_S, CLOSE_S = 5.0, 2.0
"""How much longer than a call's own time a reader waits for gRPC, and how long for a channel to close, in seconds."""
PAUSE_S = 0.2
"""Pause between two rounds through the replicas, in seconds."""


@dataclass(frozen=True, slots=True)
class SplitPage:
    """Some records in the order of (token, key)."""

    columns: PageColumns = field(repr=False)
    last: bytes
    """Pass it as `after` to continue behind this page."""
    ends: bool
    """True if nothing follows."""

    @classmethod
    def of(cls, message: data_pb2.PinnedPage) -> SplitPage:
        """Return the page of a message. Raises Corrupted."""
        return cls(pinned_page.columns_of(message), message.last, message.ends)

    def rows(self) -> Iterator[PinnedRow]:
        """Iterate over the records. For columns see kvstore.client.pinned.arrow."""
        return pinned_page.rows_of(self.columns)


def read_pinned(
    split: Split,
    *,
    start: bytes = b"",
    end: bytes = b"",
    prefix: bytes = b"",
    keys_only: bool = False,
    intents_only: bool = False,
    after: bytes = b"",
    page_bytes: int = 0,
    patience_s: float = PATIENCE_S,
    login: Login | None = None,
) -> Iterator[SplitPage]:
    """Iterate over the pages of a split: always the same records in the same order.

    The range is [start, end), or all keys that begin with `prefix`. A replica that fails is replaced by another one.
    Costs one stream, in which the server sends page after page.

    Args:
        split: The split, from `PinnedStore.splits`.
        start: First key of the range.
        end: First key behind the range. Empty: no bound.
        prefix: Prefix of the keys, instead of `start` and `end`.
        keys_only: Return empty values.
        intents_only: Return only what committed intents of transactions write, which is what the log up to the position
            lacks. This includes keys that they delete, and records that have expired.
        after: Continue behind this page: its `last`.
        page_bytes: Size of a page, in bytes. 0: the server's default.
        patience_s: How long to continue without a page from any replica, in seconds.
        login: The login. None: that of the environment. Splits carry none, because they are pickled and sent to others.

    Raises:
        NoSuchPin: If no replica keeps the position any more.
        StoreError: The error of the last replica, after `patience_s`. The pages returned before it are correct.
    """
    start, end = scan_bounds(start, end, prefix)
    request = data_pb2.ReadPinnedRequest(
        id=split.pin,
        partition=split.partition,
        ledger=split.position.ledger,
        entry=split.position.entry,
        first_token=split.first,
        last_token=split.last,
        start=start,
        end=end,
        after=after,
        keys_only=keys_only,
        intents_only=intents_only,
        page_bytes=page_bytes,
    )
    return _read(split, request, patience_s, login)


def _read(
    split: Split, request: data_pb2.ReadPinnedRequest, patience_s: float, login: Login | None
) -> Iterator[SplitPage]:
    clock = library_env("kvstore pinned").clock
    attempts = _Attempts(split.replicas)
    failing_since: float | None = None
    while True:
        address = attempts.address
        try:
            for page in _stream(address, split, request, login):
                failing_since = None
                attempts.succeeded()
                request.after = page.last or request.after
                yield page
                if page.ends:
                    return
            failure: StoreError = Unavailable(f"{address} has ended the stream before the last page")
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
        except Unavailable as error:
            failure = error
        except (OSError, ConfigError) as error:  # a certificate or password file may be missing for a moment
            failure = Unavailable(f"{address}: {error}")
        now = clock.now()
        failing_since = now if failing_since is None else failing_since
        if not isinstance(failure, Retryable | OutcomeUnknown | NotAuthenticated):
            raise failure
        is_round_over = attempts.failed(failure)
        if attempts.is_gone or now - failing_since > patience_s:
            raise failure
        if is_round_over:
            threading.Event().wait(PAUSE_S)


def _stream(
    address: str, split: Split, request: data_pb2.ReadPinnedRequest, login: Login | None
) -> Iterator[SplitPage]:
    """Yield the pages of one stream. Workers make all calls into gRPC. Raises grpc.RpcError, OSError, ConfigError."""
    channel = open_channel(address, split.tls, paging(), login)
    # Not in `begin`, which may run when the channel is closed: making a stub of a closed channel crashes the process.
    stub = data_pb2_grpc.DataStub(channel)

    def begin() -> Iterator[data_pb2.PinnedPage]:
        call: Iterator[data_pb2.PinnedPage] = stub.ReadPinned(request, timeout=STREAM_S)
        return call

    try:
        call = workers.run(begin, HANGS_S)
        while (message := workers.run(lambda: next(call, None), STREAM_S + HANGS_S)) is not None:
            yield SplitPage.of(message)
    except workers.Late:
        raise Unavailable(f"{address}: a call hangs in gRPC") from None
    finally:
        workers.run_within(channel.close, CLOSE_S)  # which cancels the call


class _Attempts:
    """Chooses the replica to ask next, and keeps the errors of all replicas since the last page."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        if not addresses:
            raise NoSuchPin("no replica is known that keeps the pinned position")
        self._addresses = addresses
        self._at = 0
        self._failures: dict[str, StoreError] = {}

    @property
    def address(self) -> str:
        return self._addresses[self._at]

    @property
    def is_gone(self) -> bool:
        """True if all replicas have answered that they do not keep the position, or have rejected the login."""
        return all(isinstance(self._failures.get(each), NoSuchPin | NotAuthenticated) for each in self._addresses)

    def succeeded(self) -> None:
        self._failures.clear()

    def failed(self, failure: StoreError) -> bool:
        """Move to the next replica. Return True if all have been asked."""
        self._failures[self.address] = failure
        self._at = (self._at + 1) % len(self._addresses)
        return self._at == 0
