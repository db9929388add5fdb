"""The KV service. Converts gRPC messages to operations of the server and results to messages. It makes no decisions
about data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import grpc

from kvstore.env import Env
from kvstore.env.histogram import Histogram
from kvstore.env.networks import address_of
from kvstore.errors import OutcomeUnknown, Refused, Unavailable
from kvstore.partition.state.commands import Code, Delete, Flag, Get, Op, Put, Result
from kvstore.partition.state.traits import check_options
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.callers import caller_of, owner_of
from kvstore.rpc.calls import check_cluster
from kvstore.rpc.channels import TIMEOUT_DEFAULT_MS
from kvstore.server.feed.feeds import Feeds
from kvstore.server.feed.watch import send_watch
from kvstore.server.grpc.batch_budget import BudgetedBackend
from kvstore.server.grpc.decode import (
    batch_op,
    check_level,
    check_numbers,
    check_operation_sizes,
    request_id,
    transact_op,
)
from kvstore.server.grpc.encode import append_part, check_answer, record_message, result_message
from kvstore.server.grpc.scan import one_page, scan_pages
from kvstore.server.grpc.session import UNARY_BYTES_MAX, UNSENT_BYTES_MAX, FrameSession, Sessions, progress_message
from kvstore.server.grpc.topology import Topologies
from kvstore.server.routing.ask import ask, ask_session
from kvstore.server.routing.backend import Backend, Submits
from kvstore.server.routing.pending import check_one_partition
from kvstore.server.routing.scan_slots import ScanSlots

logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
_METHODS: dict[object, str] = {
    Code.GET: "Get",
    Code.PUT: "Put",
    Code.DELETE: "Delete",
    Code.BATCH: "Batch",
    Code.TRANSACT: "Transact",
}


class KV(kv_pb2_grpc.KVServicer):
    """The gRPC service `kvstore.v1.KV`."""

    def __init__(
        self,
        env: Env,
        backend: Backend,
        server: str,
        feeds: Feeds | None = None,
        sessions: Sessions | None = None,
        guarded: Callable[[Backend], Backend] = lambda backend: backend,
        cluster: str = "",
        scans: ScanSlots | None = None,
        caller: Callable[[], str] = lambda: "",
    ) -> None:
        """Without `feeds` there are no watches. `sessions`: also has the streams of other endpoints. `guarded`:
        returns the backend with the permissions of the caller of the current call. `cluster`: the cluster's id, by
        which clients recognise it. `scans`: the slots for scans, shared by all endpoints. `caller`: returns the user
        of the current call; empty if access control is off."""
        self._guarded, self._cluster = guarded, cluster
        self._env, self._backend, self._feeds = env, backend, feeds
        self._scans = ScanSlots(env.clock.now) if scans is None else scans
        self._caller = caller
        self._sessions = Sessions(backend, env.clock, env.slow) if sessions is None else sessions
        self.histograms = {name: Histogram(1e-6) for name in _METHODS.values()} | self._sessions.histograms
        """Duration of calls by method in seconds, including refused ones. For frames, each lane counts."""
        self._topologies = Topologies(backend, env.clock, server, cluster)

    def close(self) -> None:
        """Stop following the topology. Calls that wait for a change of the topology end when the server stops."""
        self._topologies.close()

    async def Get(self, request: kv_pb2.GetRequest, context: Context) -> kv_pb2.GetResponse:
        key = request.key
        check_operation_sizes(Code.GET, key, b"")
        check_level(request.level)
        partition = self._backend.topology.ring.partition_of(key)
        op = Get(key, request.level, _token(request.token, partition))
        record = await self._in_time(op, request.ring_version, context)
        return kv_pb2.GetResponse(record=record_message(record) if record is not None else None, **self._seal(key))

    async def Put(self, request: kv_pb2.PutRequest, context: Context) -> kv_pb2.PutResponse:
        key, value, flags = request.key, request.value, request.flags
        check_operation_sizes(Code.PUT, key, value)
        check_numbers(request.expires_ms, request.version)
        id = request_id(request.request)
        op = Put(
            key,
            value,
            request.expires_ms,
            check_options(Code.PUT, flags, request.expires_ms, request.version),
            request.version,
            id,
        )
        result = await self._in_time(op, request.ring_version, context, self._budgeted(flags))
        response = kv_pb2.PutResponse(version=0, applied=True, **self._seal(key))
        if flags & Flag.RETURN_OLD:
            response.applied, response.version, old = result
            if old is not None:
                response.old.CopyFrom(record_message(old))
        else:
            response.version = result
        return response

    async def Delete(self, request: kv_pb2.DeleteRequest, context: Context) -> kv_pb2.DeleteResponse:
        check_operation_sizes(Code.DELETE, request.key, b"")
        check_numbers(request.version)
        flags = check_options(Code.DELETE, request.flags, version=request.version)
        op = Delete(request.key, flags, request.version, request_id(request.request))
        result = await self._in_time(op, request.ring_version, context, self._budgeted(flags))
        response = kv_pb2.DeleteResponse(**self._seal(request.key))
        if request.flags & Flag.RETURN_OLD:
            response.sequence, old = result
            if old is not None:
                response.old.CopyFrom(record_message(old))
        else:
            response.sequence = result
        return response

    async def Batch(self, request: kv_pb2.BatchRequest, context: Context) -> kv_pb2.BatchResponse:
        op = batch_op(request.operations, request.flags, request_id(request.request))
        check_one_partition(op, self._backend.topology.ring.partition_of)
        result = await self._in_time(
            op, request.ring_version, context, BudgetedBackend(self._guarded(self._backend), self._sessions.batches)
        )
        response = kv_pb2.BatchResponse(results=result_message(op, result).results, **self._seal(op.key))
        check_answer(response)
        return response

    async def Transact(self, request: kv_pb2.BatchRequest, context: Context) -> kv_pb2.TransactResponse:
        op = transact_op(request.operations, request.flags, request_id(request.request))
        backend = BudgetedBackend(self._guarded(self._backend), self._sessions.batches)
        result = result_message(op, await self._in_time(op, request.ring_version, context, backend))
        response = kv_pb2.TransactResponse(results=result.results, positions=result.positions, **self._seal(op.key))
        check_answer(response)
        return response

    async def Execute(self, request: kv_pb2.Frame, context: Context) -> kv_pb2.Answers:
        session = self._sessions.open("Execute", UNARY_BYTES_MAX, backend=self._guarded(self._backend))
        try:
            self._check_cluster(request)
            session.accept(request)
            await session.wait_all_done()
            answers = kv_pb2.Answers()
            for part in session.take():
                append_part(answers, part)
            check_answer(answers)
        finally:
            session.close()
        return answers

    async def Session(  # type: ignore[override]  # gRPC takes coroutines that write to the context as well
        self, requests: AsyncIterator[kv_pb2.Frame], context: Context
    ) -> None:
        session = self._sessions.open("Session", UNSENT_BYTES_MAX, backend=self._guarded(self._backend))
        sending = self._env.nursery.spawn(_send(session, context), name="grpc session answers")
        wrong: Refused | None = None
        try:
            while (frame := await context.read()) is not grpc.aio.EOF:
                try:
                    self._check_cluster(frame)
                    session.accept(frame)
                except Refused as error:
                    wrong = error
                    break
                await session.wait_capacity()
            await session.wait_all_done()
            session.finish()
            await sending  # also before an error: earlier operations get their answers
            if wrong is not None:
                raise wrong
        finally:
            session.close()
            sending.cancel()

    async def Scan(  # type: ignore[override]  # gRPC takes coroutines that write to the context as well
        self, request: kv_pb2.ScanRequest, context: Context
    ) -> None:
        try:
            check_level(request.level)
            check_numbers(0, *request.token.values())
            check_operation_sizes(Code.SCAN, request.start, b"")
            check_operation_sizes(Code.SCAN, request.end, b"")
            async with self._scans.place(self._caller(), address_of(caller_of(context))) as place:
                backend = self._guarded(self._backend)
                async for page in scan_pages(backend, partial(ask_session, backend), request, place):
                    await place.wait_read(context.write(page))
        except grpc.aio.BaseError as error:
            logger.debug("the client of a scan disconnected: %r", error)

    async def Page(self, request: kv_pb2.PageRequest, context: Context) -> kv_pb2.PageResponse:
        check_level(request.level)
        check_numbers(0, *request.token.values())
        for bound in (request.start, request.end, request.prefix):
            check_operation_sizes(Code.SCAN, bound, b"")
        backend = self._guarded(self._backend)
        async with self._scans.place(self._caller(), address_of(caller_of(context))) as place:
            return await one_page(backend, partial(ask_session, backend), self._env.clock, request, place)

    async def Watch(  # type: ignore[override]  # gRPC takes coroutines that write to the context as well
        self, request: kv_pb2.WatchRequest, context: Context
    ) -> None:
        if self._feeds is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server has no change feed")
        try:
            await send_watch(self._feeds, request, context, owner_of(self._caller(), context))
        except grpc.aio.BaseError as error:
            logger.debug("the client of a watch disconnected: %r", error)

    async def Topology(self, request: kv_pb2.TopologyRequest, context: Context) -> kv_pb2.TopologyResponse:
        return await self._topologies.wait(request.known, request.wait_ms)

    # docs/protocol.md P12
    def _check_cluster(self, frame: kv_pb2.Frame) -> None:
        """Raise Unavailable if a frame is meant for a server of another cluster that used this address before. The
        partitions of that cluster have the same names. A server that does not know the id of its own cluster accepts
        every frame."""
        if self._cluster:
            check_cluster(frame.cluster, self._cluster)

    def _seal(self, key: bytes) -> dict[str, Any]:
        ring = self._backend.topology.ring
        progress = progress_message(self._backend, self._env.clock, ring.partition_of(key))
        return {"progress": progress, "ring_version": ring.routed}

    def _budgeted(self, flags: int) -> Submits | None:
        """Return a backend with the batch budget for a write that returns the previous record, or None for any other
        write."""
        if not flags & Flag.RETURN_OLD:
            return None
        return BudgetedBackend(self._guarded(self._backend), self._sessions.batches)

    async def _in_time(self, op: Op, ring_version: int, context: Context, backend: Submits | None = None) -> Result:
        """Execute an operation and return its result. gRPC cancels a call at its deadline; a call without a deadline
        gets the default one."""
        now = self._env.clock.now
        begun, backend = now(), backend or self._guarded(self._backend)
        try:
            if context.time_remaining() is not None:
                return await ask(backend, op, ring_version=ring_version)
            async with asyncio.timeout(TIMEOUT_DEFAULT_MS / 1000):
                return await ask(backend, op, ring_version=ring_version)
        except TimeoutError:
            kind = Unavailable if op.__class__ is Get else OutcomeUnknown
            raise kind(f"no answer within {TIMEOUT_DEFAULT_MS} ms") from None
        finally:
            self.histograms[_METHODS[op.code]].add(now() - begun)


def _token(token: Mapping[str, int], partition: str) -> int:
    """Return the sequence of a partition in a session token. Raises InvalidRequest."""
    sequence = token.get(partition, 0)
    check_numbers(sequence)
    return sequence


async def _send(session: FrameSession, context: Context) -> None:
    try:
        while not session.is_finished:
            await session.wait_answers()
            for answers in session.take():
                await context.write(answers)
    except grpc.aio.BaseError as error:
        logger.debug("the client of a session disconnected: %r", error)
    except Exception:  # the root of a task: one stream must not end the process
        logger.exception("failed to send the answers of a session")
    finally:
        session.close()  # the reader ends by itself
