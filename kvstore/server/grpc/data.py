"""The Data service: pins, and reads at pinned positions.

All reads of a server take turns in slices of less than a millisecond, and the event loop has at least as much time for
everything else in between. So many concurrent reads delay an operation no longer than one does, and no operation waits
for two of them. If processors are scarce, slices are longer, because an operation then waits longer than a slice for
its own process to run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from kvstore.env import Env
from kvstore.env.shared_slots import SharedSlots
from kvstore.errors import InvalidRequest, NoSuchPin, NotCaughtUp, Unavailable
from kvstore.partition.leading.batch_delay import STARVED_FULL
from kvstore.partition.state.engine import ViewClosed
from kvstore.partition.state.pinned_scan import PinnedScan
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import data_pb2, data_pb2_grpc
from kvstore.ring.hashing import TOKENS
from kvstore.rpc.callers import owner_of
from kvstore.rpc.calls import Few, check_cluster
from kvstore.server.feed.pinned_outcomes import PinnedOutcomes
from kvstore.server.feed.pins import PinKeeper, PinsSource
from kvstore.types import EntryId, LedgerId, PartitionId, Position

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
PAGE_BYTES, PAGE_BYTES_MAX = 512 << 10, 2 << 20
STREAMS_MAX = 64
"""Maximum number of concurrent pinned reads. A further read displaces the oldest one of the user or network with the
most reads, or is refused if no other has more than its own."""
SLICE_S, SLICE_STARVED_S, PAUSE_S = 0.0007, 0.0014, 0.001
"""Seconds for which all reads together may hold the event loop, normally and when processors are scarce, and seconds
for which they then leave it alone. A timer is no finer than the pause."""
CATCH_UP_S, POLL_S = 2.0, 0.01
"""Seconds for which a read waits until this replica has reached its position, and the polling interval."""


class DataSource(PinsSource, Protocol):
    """The node behind the service."""

    cluster: str

    def state_of(self, partition: PartitionId) -> ReplicaState | None:
        """Return the state of the local replica, or None."""
        ...


class Data(data_pb2_grpc.DataServicer):
    """The gRPC service `kvstore.v1.Data`: pins, and reads at pinned positions."""

    def __init__(self, env: Env, source: DataSource, caller: Callable[[], str] = lambda: "") -> None:
        """`caller` returns the user of the current call; empty if access control is off."""
        self._env, self._source, self._caller = env, source, caller
        self._keeper = PinKeeper(env, source)
        self._outcomes = PinnedOutcomes(source)
        self._turn = asyncio.Lock()
        self._reads = SharedSlots(STREAMS_MAX, "concurrent pinned reads")
        self._surveys = Few("calls of Pins")

    async def close(self) -> None:
        await self._keeper.close()

    async def Pin(self, request: data_pb2.PinRequest, context: Context) -> data_pb2.PinResponse:
        check_cluster(request.cluster, self._source.cluster)
        return await self._keeper.pin(request)

    async def Renew(self, request: data_pb2.RenewRequest, context: Context) -> data_pb2.RenewResponse:
        check_cluster(request.cluster, self._source.cluster)
        return await self._keeper.renew(request)

    async def Unpin(self, request: data_pb2.UnpinRequest, context: Context) -> data_pb2.UnpinResponse:
        return await self._keeper.unpin(request.id)

    async def Pins(self, request: data_pb2.PinsRequest, context: Context) -> data_pb2.PinsResponse:
        with self._surveys.place(context):
            return await self._keeper.listed()

    async def ReadPinned(  # type: ignore[override]  # gRPC takes coroutines that write to the context as well
        self, request: data_pb2.ReadPinnedRequest, context: Context
    ) -> None:
        try:
            owner = owner_of(self._caller(), context)
            async with self._reads.place(owner), aclosing(self.pages(request)) as pages:
                async for page in pages:
                    await context.write(page)
        except grpc.aio.BaseError as error:
            log.debug("the client of a pinned read disconnected: %r", error)

    async def pages(self, request: data_pb2.ReadPinnedRequest) -> AsyncGenerator[data_pb2.PinnedPage]:
        """Yield the pages of a read at a pinned position. Raises StoreError."""
        held, state = await self._held(request)
        try:
            await self._outcomes.resolve(held)
            scan = scan_of(held, request)
            ends = False
            while not ends:
                while not await self._slice(scan):
                    pass
                _trust(state)  # docs/protocol.md P5: the replica may have been barred meanwhile
                page = scan.page()
                ends = page.ends
                yield page
        except ViewClosed:
            raise NoSuchPin(f"partition {request.partition}: pin {request.id!r} has ended at this server") from None
        except OSError as error:
            raise Unavailable(f"partition {request.partition}: {error}") from error

    async def _slice(self, scan: PinnedScan) -> bool:
        """Read for one time slice. Return True if a page is ready to be sent."""
        clock = self._env.clock
        async with self._turn:
            until = clock.now() + (SLICE_STARVED_S if self._env.starved() >= STARVED_FULL else SLICE_S)
            while not (is_ready := scan.step()) and clock.now() < until:
                pass
            await asyncio.sleep(PAUSE_S)
        return is_ready

    async def _held(self, request: data_pb2.ReadPinnedRequest) -> tuple[PinnedView, ReplicaState]:
        """Return the pinned view and its replica's state, after waiting until the local replica has reached the
        pinned position. Raises NoSuchPin, NotCaughtUp."""
        partition = PartitionId(request.partition)
        position = Position(LedgerId(request.ledger), EntryId(request.entry))
        until = self._env.clock.now() + CATCH_UP_S
        while True:
            state = self._source.state_of(partition)
            if state is None:
                raise NoSuchPin(f"partition {partition} has no replica at this server")
            _trust(state)
            if state.position is not None and state.position >= position:
                state.pinned_views.expire(self._env.clock.passed_ms())
                return state.pinned_views.get(request.id, position), state
            if self._env.clock.now() >= until:
                raise NotCaughtUp(f"partition {partition}: this replica has not reached position {tuple(position)} yet")
            await asyncio.sleep(POLL_S)


def _trust(state: ReplicaState) -> None:
    """Raise NoSuchPin if the replica may be damaged, so that the reader asks another replica."""
    if state.is_suspect:
        raise NoSuchPin(f"partition {state.partition}: the replica at this server may be damaged")


def scan_of(held: PinnedView, request: data_pb2.ReadPinnedRequest) -> PinnedScan:
    """Return the scan that a request asks for. Raises InvalidRequest."""
    first = request.first_token if request.HasField("first_token") else 0
    last = request.last_token if request.HasField("last_token") else TOKENS - 1
    if first > last:
        raise InvalidRequest(f"expected first_token <= last_token, got {first} and {last}")
    if request.after and not (request.after.startswith(b"d") and len(request.after) >= 5):
        raise InvalidRequest(f"expected the `last` of a page as `after`, got {request.after[:16].hex()}")
    return PinnedScan(
        held,
        TokenSpan(first, last),
        start=request.start,
        end=request.end,
        after=request.after,
        keys_only=request.keys_only,
        intents_only=request.intents_only,
        page_bytes=min(request.page_bytes or PAGE_BYTES, PAGE_BYTES_MAX),
    )
