"""The HTTP/JSON gateway: the operations of the other endpoints for HTTP clients, on the node's HTTP port.

routes.py lists the routes, requests.py reads requests, answers.py encodes results; this module executes them. The
backend, permissions, errors and request ids are those of gRPC. Everything that a client can make the gateway hold is
bounded (capacity.py), and every wait for a client has a time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from msgspec import UNSET

from kvstore.access import Right
from kvstore.env import Env
from kvstore.env.histogram import Histogram
from kvstore.env.networks import network_of
from kvstore.env.turn_budget import TurnBudget
from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    OutcomeUnknown,
    PermissionDenied,
    StoreError,
    Unavailable,
)
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state.commands import Code, Delete, Op, Put, Transact
from kvstore.partition.state.traits import READS
from kvstore.proto.page_token import PageToken
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, MalformedBody, path_and_query
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.access.identities import UserIdentity
from kvstore.server.access.needs import HTTP_NEEDS, admin
from kvstore.server.feed.feeds import Feeds
from kvstore.server.gateway import answers, bodies, requests, routes
from kvstore.server.gateway.answers import WithStatus
from kvstore.server.gateway.capacity import GatewayCapacity, RequestBytes
from kvstore.server.gateway.openapi import document
from kvstore.server.gateway.ranges import count_range, delete_range
from kvstore.server.gateway.requests import RING, ParsedRequest
from kvstore.server.gateway.routes import Body, ResponseKind, Route
from kvstore.server.gateway.watches import HttpWatches
from kvstore.server.grpc.batch_budget import BatchBudget, BudgetedBackend
from kvstore.server.grpc.encode import MESSAGE_BYTES, answer_too_large
from kvstore.server.grpc.scan import scan_pages
from kvstore.server.grpc.session import progress_of
from kvstore.server.routing.ask import ask_session
from kvstore.server.routing.backend import Backend, Submits
from kvstore.server.routing.pending import check_one_partition
from kvstore.server.routing.scan_slots import ScanSlot, ScanSlots

OWN_SITE = frozenset(("none", "same-origin"))
"""Values of Sec-Fetch-Site with which a browser may write: its user typed the address, or the page is from this
server. A site is a registered domain, so `same-site` also covers other hosts and ports and is not enough."""
JSON_BYTES_MAX = 2 << 20
"""Maximum size of a JSON body in bytes. The limit exists because a body is parsed in one turn of the event loop."""
TURN_BYTES = 128 << 10
"""Number of bytes of the JSON bodies of batches that are parsed in one turn of the event loop. The last body may exceed
it: 2 MiB take 70 ms."""
BODY_S = 30.0
"""Time in seconds within which a body must arrive."""
REQUESTS_SHARE, WATCHES_SHARE = 2, 4
"""Divisors of the connection limit of the HTTP port. Half of the connections may have requests in flight and a quarter
may have watches, so some are always left for health checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCall:
    """A request with the identity of its caller and its parsed parameters."""

    request: HttpRequest
    identity: UserIdentity
    asked: ParsedRequest
    token: Mapping[str, int]
    """Sequences that the client has seen, by partition. Under RING: the version of its ring."""
    backend: Backend
    """The backend, with the permissions of the caller."""
    held: RequestBytes

    @property
    def as_base64(self) -> bool:
        return bool(self.asked.get(routes.ENCODING) == "base64")

    @property
    def timeout_ms(self) -> int:
        return int(self.asked.get(routes.TIMEOUT))


class Gateway:
    """Answers the HTTP requests of one server. It serves until `close`."""

    def __init__(
        self, env: Env, backend: Backend, server: str, feeds: Feeds, batches: BatchBudget,
        authenticator: HttpAuthenticator, connections_max: int, scans: ScanSlots | None = None,
    ) -> None:  # fmt: skip
        """`batches` is the memory budget for the reads of batches, and `scans` are the slots for scans; both are
        shared by all endpoints. `connections_max` is the connection limit of the HTTP port."""
        self._env, self._backend, self._server, self._authenticator = env, backend, server, authenticator
        self._batches, self._turn = batches, TurnBudget(TURN_BYTES)
        self._watches = HttpWatches(feeds, authenticator, max(1, connections_max // WATCHES_SHARE))
        self._scans = ScanSlots(env.clock.now) if scans is None else scans
        self._capacity = GatewayCapacity(max(1, connections_max // REQUESTS_SHARE))
        self._is_closing = False
        self._document = document()
        self._histograms = {
            each.name: Histogram(1e-6) for each in routes.ROUTES if each.answer is not ResponseKind.EVENTS
        }
        self._do: dict[str, Callable[[GatewayCall], Awaitable[HttpResponse]]] = {
            "get": self._read,
            "meta": self._read,
            **dict.fromkeys(("put", "delete", "increment", "append", "expire"), self._write),
            "batch": self._batch,
            "transaction": self._batch,
            "scan": self._scan,
            "count": self._count,
            "delete_range": self._delete_range,
            "cluster": self._cluster,
            "openapi": self._openapi,
        }

    def close(self) -> None:
        """Refuse new requests and end all watches. Requests in flight continue to their end."""
        self._is_closing = True
        self._watches.close()

    def statistics(self) -> dict[str, Any]:
        """Return the gateway's numbers for the server's metrics."""
        return {
            "http_request_s": self._histograms,
            "http_requests": self._capacity.requests,
            "http_watches": len(self._watches.slots),
            "http_overloaded_total": self._capacity.refused + self._watches.slots.refused,
        }

    async def answer(self, request: HttpRequest) -> None:
        """Answer a request whose path is below /v1/. Returns after the response has been sent."""
        began = self._env.clock.now()
        path, query = path_and_query(request.target)
        route: Route | None = None
        try:
            route, key = _route_of(path, request)
            self._check_origin(request, route)
            if self._is_closing:
                raise Unavailable("the node is stopping; use another node")
            if route.answer is ResponseKind.EVENTS:
                await self._watch(request, route, query)
                return
            with self._capacity.request(network_of(request.remote)) as held:
                reply = await self._reply(request, route, key, query, held)
                held.take(len(reply.body), must=route.is_write)
                self._measure(route, key, began)
                await _send(request, reply)
        except StoreError as error:
            if route is not None:
                self._measure(route, "", began)
            await _send(request, answers.error_reply(error))

    def _measure(self, route: Route, key: str, began: float) -> None:
        if route.name not in self._histograms:
            return
        took, slow = self._env.clock.now() - began, self._env.slow
        self._histograms[route.name].add(took)
        if took > slow.limit_s:
            bytes_ = requests.unquoted(key)
            partition = self._backend.topology.ring.partition_of(bytes_) if bytes_ else ""
            slow.note("endpoint", route.name.upper(), took, key=bytes_, partition=partition)

    # ── admission ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_origin(self, request: HttpRequest, route: Route) -> None:
        """Raise PermissionDenied for a request from a page of another site, because the page must not use the login
        or the machine of the person who reads it."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site") or "none"
        if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
            got = f"Origin {origin[:60]!r}"
        elif origin is None and site not in OWN_SITE and request.method not in ("GET", "HEAD"):
            got = f"Sec-Fetch-Site {site[:60]!r}"
        else:
            return
        error = PermissionDenied(f"expected no request from a page of another site, got {got}")
        self._authenticator.refused(None, request, _call_of(route), error)
        raise error

    async def _admitted(self, request: HttpRequest, route: Route) -> UserIdentity:
        """Authenticate the caller, check the caller's permissions, and return the caller's identity. Raises
        NotAuthenticated, PermissionDenied, Overloaded."""
        identity: UserIdentity | None = None
        try:
            identity = await self._authenticator.identify(request)
            # the permissions of a watch are checked once its range is known
            if route.answer is not ResponseKind.EVENTS:
                HTTP_NEEDS.get(route.template, admin)(identity, None)
        except StoreError as error:
            self._authenticator.refused(identity, request, _call_of(route), error)
            raise
        return identity

    async def _reply(
        self, request: HttpRequest, route: Route, key: str, query: str, held: RequestBytes
    ) -> HttpResponse:
        _check_coding(request)
        identity = await self._admitted(request, route)
        asked = requests.read(route, key, query, request.headers)
        token = requests.token_of(asked.given.get(routes.TOKEN.key, ""), routes.TOKEN.name)
        backend = self._authenticator.guarded(identity, request, self._backend)
        call = GatewayCall(request=request, identity=identity, asked=asked, token=token, backend=backend, held=held)
        if not asked.key:
            return await self._do[route.name](call)
        try:
            return await self._do[route.name](call)
        except StoreError as error:
            partition = self._backend.topology.ring.partition_of(asked.key)
            reply = answers.error_reply(error, partition)
            return reply._replace(headers={**reply.headers, **self._seal(token, asked.key)})

    def _seal(self, token: Mapping[str, int], key: bytes, positions: Sequence[tuple[str, int]] = ()) -> dict[str, str]:
        """Return headers with the session token and the time of the key's partition. `positions` of a transaction are
        added to the token.

        The token names the latest ring that the server or the client knows. If the server knows an older ring than the
        client, it keeps the sequences of partitions that its ring does not have, because the client's ring may have
        them.
        """
        ring, known_ring = self._backend.topology.ring, token.get(RING, 0)
        partition = ring.partition_of(key)
        sequence, time_ms = progress_of(self._backend, self._env.clock, partition)
        seen = {each: number for each, number in token.items() if each in ring.partitions or known_ring > ring.routed}
        for name, reached in (*positions, (partition, sequence)):
            seen[name] = max(reached, seen.get(name, 0))
        seen[RING] = max(ring.routed, known_ring)
        return {"Kvstore-Token": requests.token_text(seen), "Kvstore-Time-Ms": str(time_ms)}

    # ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, call: GatewayCall) -> HttpResponse:
        asked, code = call.asked, Code.GET if call.asked.route.name == "get" else Code.META
        await self._no_body(call)
        partition = self._backend.topology.ring.partition_of(asked.key)
        level = routes.LEVELS.index(asked.get(routes.LEVEL))
        op = requests.read_op(asked, code, level, call.token.get(partition, 0))
        record = await self._in_time(call, op, call.backend)
        headers = {**self._seal(call.token, asked.key), "Vary": "Accept"}
        if not _is_wanted(asked, 0 if record is None else record[1]):
            return HttpResponse(304, b"", {**headers, **answers.record_headers(record)})
        if record is None:
            reply = answers.absent_reply(partition)
            return reply._replace(headers=headers)
        headers |= answers.record_headers(record)
        if code == Code.META:
            return HttpResponse(200, b"", {**headers, "Content-Length": str(record[0])}, answers.RAW)
        if answers.wants_json(call.request.headers.get("Accept")):
            return answers.json_reply(answers.item_of(record, asked.key, as_base64=call.as_base64), headers=headers)
        return HttpResponse(200, record[0], headers, answers.RAW)

    async def _write(self, call: GatewayCall) -> HttpResponse:
        asked = call.asked
        if not call.request.body.is_complete:
            requests.write_op(asked, b"")  # report a malformed request before its body arrives
        value = await self._value(call) if asked.route.body is Body.VALUE else await self._no_body(call)
        op = requests.write_op(asked, value)  # the whole body has arrived: now the leader decides the condition
        backend = BudgetedBackend(call.backend, self._batches)
        result = await self._in_time(call, op, backend, requests.versions_of(asked))
        outcome = answers.outcome_of(op, result, as_base64=call.as_base64)
        headers = self._seal(call.token, asked.key)
        if isinstance(outcome, bodies.Written) and outcome.applied is not False:
            headers["ETag"] = answers.tag_of(outcome.version)
        return answers.json_reply(outcome, headers=headers)

    async def _batch(self, call: GatewayCall) -> HttpResponse:
        if call.request.content_type != answers.JSON:
            raise WithStatus(415, f"expected Content-Type: {answers.JSON}, got {call.request.content_type[:60]!r}")
        body = await self._body(call, JSON_BYTES_MAX)
        await self._turn.begin(len(body))
        op = requests.batch_of(call.asked, body)
        if not isinstance(op, Transact):
            check_one_partition(op, self._backend.topology.ring.partition_of)
        result = await self._in_time(call, op, BudgetedBackend(call.backend, self._batches))
        reply = answers.batch_reply(op, result, as_base64=call.as_base64)
        if len(reply.body) > MESSAGE_BYTES_MAX:
            raise answer_too_large(len(reply.body))
        positions = result[1] if isinstance(op, Transact) else ()
        return reply._replace(headers=self._seal(call.token, op.key, positions))

    async def _in_time(self, call: GatewayCall, op: Op, backend: Submits, versions: Sequence[int] = ()) -> Any:
        """Execute the operation and return its result. Raises an error at the timeout of the request. A disconnect of
        the client does not cancel the operation.

        `versions` are the versions that the condition accepts. If there are several, the gateway tries one after the
        other under one request id, because a refused attempt has no effect (docs/protocol.md P13).
        """
        until = self._env.clock.now() + call.timeout_ms / 1000
        try:
            while True:
                left_s = until - self._env.clock.now()
                try:
                    return await ask_session(backend, op, ring_version=call.token.get(RING, 0), within_s=left_s)
                except ConditionFailed as error:
                    if not (isinstance(op, (Put, Delete)) and requests.is_next(versions, op, error.version)):
                        raise
                    op = requests.with_version(op, error.version)
        except TimeoutError:
            kind = Unavailable if op.code in READS else OutcomeUnknown
            raise kind(f"no answer within {call.timeout_ms} ms") from None

    # ── all partitions ────────────────────────────────────────────────────────────────────────────────────────────────

    def _scan_slot(self, call: GatewayCall) -> AbstractAsyncContextManager[ScanSlot]:
        return self._scans.place(call.identity.name, network_of(call.request.remote))

    async def _scan(self, call: GatewayCall) -> HttpResponse:
        await self._no_body(call)
        page = requests.scan_of(call.asked, call.token)
        found: list[tuple[bytes, Any]] = []
        size, next_ = 0, None
        try:
            async with asyncio.timeout(call.timeout_ms / 1000), self._scan_slot(call) as place:
                if page.end and page.start >= page.end:
                    return answers.page_reply((), None, as_base64=call.as_base64, keys_only=page.keys_only)
                async for message in scan_pages(call.backend, partial(ask_session, call.backend), page, place):
                    found += zip(message.keys, message.records, strict=True)
                    size += message.ByteSize()
                    call.held.take(message.ByteSize())
                    if size >= MESSAGE_BYTES or len(found) >= page.limit:
                        next_ = PageToken(found[-1][0] + b"\0", page.end).encode()
                        break
        except TimeoutError:
            raise Unavailable(f"no answer within {call.timeout_ms} ms") from None
        return answers.page_reply(found, next_, as_base64=call.as_base64, keys_only=page.keys_only)

    async def _count(self, call: GatewayCall) -> HttpResponse:
        await self._no_body(call)
        bounds, level = requests.bounds_of(call.asked), routes.LEVELS.index(call.asked.get(routes.LEVEL))
        ask = partial(ask_session, call.backend)
        try:
            async with asyncio.timeout(call.timeout_ms / 1000), self._scan_slot(call):
                count = await count_range(call.backend, ask, bounds, level, call.token)
        except TimeoutError:
            raise Unavailable(f"no answer within {call.timeout_ms} ms") from None
        return answers.json_reply(bodies.Counted(count))

    async def _delete_range(self, call: GatewayCall) -> HttpResponse:
        await self._no_body(call)
        wanted, timeout_s = requests.deletion_of(call.asked), call.timeout_ms / 1000
        try:  # check the permission for an empty range too
            call.identity.check(Right.WRITE, *wanted.bounds, "delete_range")
        except StoreError as error:
            self._authenticator.refused(call.identity, call.request, _call_of(call.asked.route), error)
            raise
        until = self._env.clock.now() + timeout_s / 2
        try:
            async with asyncio.timeout(timeout_s), self._scan_slot(call) as place:
                deleted, next_ = await delete_range(
                    call.backend, self._env.clock, wanted, place, until=until, take=call.held.take
                )
        except TimeoutError:
            raise OutcomeUnknown(
                f"no answer within {call.timeout_ms} ms; some of the keys may have been deleted"
            ) from None
        return answers.json_reply(bodies.DeletedRange(deleted, UNSET if next_ is None else next_))

    async def _cluster(self, call: GatewayCall) -> HttpResponse:
        await self._no_body(call)
        topology = self._backend.topology
        partitions = []
        for each in sorted(topology.ring.partitions):
            sequence, time_ms = progress_of(self._backend, self._env.clock, each)
            leader = topology.leaders.get(each, ("", 0))[0]
            partitions.append(bodies.PartitionState(each, leader, sequence, time_ms))
        servers = [bodies.ServerState(each, found.http) for each, found in sorted(topology.servers.items())]
        return answers.json_reply(bodies.ClusterState(self._server, topology.ring.routed, partitions, servers))

    async def _openapi(self, call: GatewayCall) -> HttpResponse:
        await self._no_body(call)
        return HttpResponse(200, self._document, content_type=answers.JSON)

    async def _watch(self, request: HttpRequest, route: Route, query: str) -> None:
        identity = await self._admitted(request, route)
        asked = requests.read(route, "", query, request.headers)
        watch = requests.watch_of(asked)
        check = partial(HTTP_NEEDS.get(route.template, admin), identity, watch)
        note = partial(self._authenticator.refused, identity, request, _call_of(route))
        try:
            check()
        except StoreError as error:
            note(error)
            raise
        await self._watches.serve(request, asked, watch, check, note, identity.name)

    # ── bodies ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _value(self, call: GatewayCall) -> bytes:
        """Read and return the value that a request carries. Raises InvalidRequest, Overloaded."""
        if call.request.content_type != answers.JSON:
            return await self._body(call, VALUE_BYTES_MAX)
        read = bodies.read(await self._body(call, JSON_BYTES_MAX), bodies.ValueBody)
        value = bodies.bytes_of(read.value, read.value_base64, "value")
        if len(value) > VALUE_BYTES_MAX:
            _refuse_size(VALUE_BYTES_MAX, len(value))
        return value

    async def _no_body(self, call: GatewayCall) -> bytes:
        """Raise InvalidRequest if the request has a body, because it would be ignored."""
        if call.request.body.exists:
            raise InvalidRequest(f"expected no body for {call.asked.route.name}, got one; use query parameters")
        return b""

    async def _body(self, call: GatewayCall, most: int) -> bytes:
        """Read and return the body. Its size is checked against `most` bytes as it arrives. Raises InvalidRequest,
        Overloaded."""
        request = call.request
        if encoding := request.headers.get("Content-Encoding"):
            raise WithStatus(415, f"expected no Content-Encoding, got {encoding[:60]!r}")
        if (length := request.body.length or 0) > most:
            _refuse_size(most, length)
        body = request.body
        if not body.is_complete and (request.headers.get("expect") or "").lower() == "100-continue":
            request.connection.send_continue()
        try:
            if body.is_complete:  # nothing to wait for, so no timer
                return await self._arrived(call, most)
            async with asyncio.timeout(BODY_S):
                return await self._arrived(call, most)
        except TimeoutError:
            raise WithStatus(408, f"expected the body within {BODY_S:g} s, but it did not arrive") from None
        except (ConnectionError, MalformedBody) as error:
            raise InvalidRequest(str(error)) from None

    async def _arrived(self, call: GatewayCall, most: int) -> bytes:
        """Return the body once it has arrived."""
        data = bytearray()
        while chunk := await call.request.body.read():
            if len(data) + len(chunk) > most:
                _refuse_size(most, len(data) + len(chunk))
            call.held.take(len(chunk))
            data += chunk
        return bytes(data)


def _refuse_size(most: int, found: int) -> NoReturn:
    raise WithStatus(413, f"expected a body of at most {most} bytes, got {found} or more")


def _check_coding(request: HttpRequest) -> None:
    """Raise InvalidRequest if the request has a transfer coding that the gateway cannot decode. Otherwise the
    encoded bytes would be stored as the value (RFC 9112, 6.1)."""
    codings = [each.strip() for line in request.headers.all("transfer-encoding") for each in line.split(",")]
    if [each.lower() for each in codings if each] not in ([], ["chunked"]):
        raise WithStatus(501, f"expected no Transfer-Encoding except chunked, got {', '.join(codings)[:60]!r}")


def _call_of(route: Route) -> str:
    """Return the name under which the audit log records the route."""
    return f"HTTP {route.method} {route.template}"


def _route_of(path: str, request: HttpRequest) -> tuple[Route, str]:
    """Return the route of a request and the percent-encoded key from its path. Raises InvalidRequest."""
    found = routes.template_of(path)
    if found is None:
        raise WithStatus(404, f"expected a route of /v1/openapi.json, got {path[:60]!r}")
    methods = routes.TEMPLATES[found[0]]
    route = methods.get(request.method)
    if route is None:
        raise WithStatus(405, f"expected {' or '.join(methods)}, got {request.method[:20]}", Allow=", ".join(methods))
    return route, found[1]


def _is_wanted(asked: ParsedRequest, version: int) -> bool:
    """Return True if a read must return the record, False if the client already has it. `version` is 0 if the key
    does not exist. Raises ConditionFailed, InvalidRequest."""
    match_ = asked.given.get(routes.IF_MATCH.key)
    if match_ is not None:
        is_met = version > 0 if match_.strip() == "*" else version in requests.strong_versions_of(match_)
        if not is_met:
            raise ConditionFailed(version)
    none_match = asked.given.get(routes.IF_NONE_MATCH.key)
    if none_match is None or not version:
        return True
    return none_match.strip() != "*" and version not in requests.weak_versions_of(none_match)


async def _send(request: HttpRequest, reply: HttpResponse) -> None:
    """Send a response and wait until the client has taken it. The request counts as in flight until then."""
    await request.respond(reply._replace(headers={**answers.COMMON, **reply.headers}))
