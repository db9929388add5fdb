"""Serves the key browser. It reads with the rights of its viewer, by the operations and within the limits of any other
client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from kvstore.env.networks import network_of
from kvstore.env.ports import Clock
from kvstore.errors import InvalidRequest, NotAuthenticated, PermissionDenied, StoreError
from kvstore.partition.state.commands import Get, Record
from kvstore.proto import kv_pb2
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, text_response
from kvstore.server.access.http_authenticator import CHALLENGE, HttpAuthenticator
from kvstore.server.access.identities import UserIdentity
from kvstore.server.grpc.scan import one_page
from kvstore.server.routing.ask import ask_session
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.server.ui import keys
from kvstore.server.ui.cells import Fact
from kvstore.server.ui.pages import HEADERS, MENU, Pages

READ_S = 5.0
"""Time within which the partitions must answer."""


class KeyPages:
    """The pages of keys of one server."""

    def __init__(
        self,
        clock: Clock,
        server: str,
        backend: Backend,
        scans: ScanSlots,
        authenticator: HttpAuthenticator,
        pages: Pages,
    ) -> None:
        self._clock, self._server, self._backend, self._scans = clock, server, backend, scans
        self._authenticator, self._pages = authenticator, pages
        self._pages_of: dict[str, Callable[[HttpRequest, UserIdentity], Awaitable[HttpResponse]]] = {
            "keys": self._keys,
            "key": self._key,
            "sessions": self._sessions,
        }

    async def page(self, name: str, request: HttpRequest) -> HttpResponse:
        """Return one of KEYS."""
        try:
            identity = await self._authenticator.identify(request)
        except NotAuthenticated as error:
            return text_response(f"401: {error}\n", 401, {**HEADERS, **CHALLENGE})
        except StoreError as error:
            return text_response(f"503: {error}\n", 503, HEADERS)
        key = keys.bytes_parameter(request.target, "key")
        place = self._place_of(key, identity) if key else []
        try:
            async with asyncio.timeout(READ_S):
                return await self._pages_of[name](request, identity)
        except InvalidRequest as error:
            return text_response(f"400: {error}\n", 400, HEADERS)
        except StoreError as error:
            return self._html(identity, keys.unread_page(name, str(error) or repr(error), place), 503)
        except TimeoutError:
            why = f"the partition did not answer within {READ_S:g} s"
            return self._html(identity, keys.unread_page(name, why, place), 503)

    async def _keys(self, request: HttpRequest, identity: UserIdentity) -> HttpResponse:
        prefix = keys.bytes_parameter(request.target, "prefix")
        try:
            found = await self._read(request, identity, prefix, keys.PAGE_KEYS)
        except PermissionDenied as error:
            return self._html(identity, keys.refused_page(prefix, str(error), identity.read), 403)
        return self._html(identity, keys.keys_page(prefix, found, self._clock.date_ms()))

    async def _sessions(self, request: HttpRequest, identity: UserIdentity) -> HttpResponse:
        tag = keys.bytes_parameter(request.target, "tag")
        prefix = b"{%b}/" % tag if tag else b"{"
        try:
            found = await self._read(request, identity, prefix, keys.COORDINATION_KEYS)
        except PermissionDenied as error:
            page = keys.sessions_page(tag, kv_pb2.PageResponse(), 0)
            return self._html(identity, {**page, "tables": [], "refusal": str(error)}, 403)
        return self._html(identity, keys.sessions_page(tag, found, self._clock.date_ms()))

    async def _key(self, request: HttpRequest, identity: UserIdentity) -> HttpResponse:
        key = keys.bytes_parameter(request.target, "key")
        if not key:
            raise InvalidRequest("expected ?key= with a key, got none")
        backend = self._authenticator.guarded(identity, request, self._backend)
        try:
            found = await ask_session(backend, Get(key))
        except PermissionDenied as error:
            return self._html(identity, keys.refused_page(b"", str(error), identity.read), 403)
        record = None if found is None else Record(*found)  # a plain tuple if another node leads the partition
        page = keys.key_page(key, record, request.parameter("form"), self._clock.date_ms())
        page["facts"] += self._place_of(key, identity)
        return self._html(identity, page, 404 if record is None else 200)

    async def _read(
        self, request: HttpRequest, identity: UserIdentity, prefix: bytes, limit: int
    ) -> kv_pb2.PageResponse:
        """Return a page of the keys with a prefix. Raises StoreError."""
        backend = self._authenticator.guarded(identity, request, self._backend)
        asked = kv_pb2.PageRequest(prefix=prefix, limit=limit, page_token=request.parameter("after"))
        async with self._scans.place(identity.name, network_of(request.remote)) as place:
            return await one_page(backend, partial(ask_session, backend), self._clock, asked, place)

    def _place_of(self, key: bytes, identity: UserIdentity) -> list[Fact]:
        return keys.place_of(key, self._backend.topology, is_linked=self._may_open(identity, "/ui/partition"))

    def _may_open(self, identity: UserIdentity, path: str) -> bool:
        return self._authenticator.may_open(identity, path)

    def _html(self, identity: UserIdentity, page: Mapping[str, Any], status: int = 200) -> HttpResponse:
        menu = [(path, label) for path, label in MENU if self._may_open(identity, path)]
        return self._pages.html("keys.html", {"server": self._server, "menu": menu, **page}, status=status)
