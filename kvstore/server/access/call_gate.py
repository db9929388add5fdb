"""Authenticates and authorizes gRPC calls when they begin and while they last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from kvstore.env.networks import address_of
from kvstore.errors import NotAuthenticated, StoreError
from kvstore.rpc.callers import caller_of
from kvstore.rpc.status import abort
from kvstore.server.access.guard import Guard
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.server.access.logins import Logins, credentials_or_none
from kvstore.server.access.needs import RPC_NEEDS, admin
from kvstore.server.routing.backend import Backend

AUTHORIZATION = "authorization"
WAITING = frozenset(("/kvstore.v1.Feed/Changes",))
"""Unary methods that wait for changes but make none. Any other unary call that has begun runs to its end: its work
may already be done by then, and a refusal would claim that it is not done."""
_caller: ContextVar[UserIdentity | None] = ContextVar("caller", default=None)


class _RevocableCall:
    """A call that is aborted when its caller loses the permission."""

    __slots__ = ("check", "refused", "task")

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check
        self.task = asyncio.current_task()
        self.refused: StoreError | None = None


class CallGate:
    """The kvstore.rpc.gate.Gate of one server's gRPC port."""

    def __init__(self, access: Access, logins: Logins) -> None:
        self._access, self._logins = access, logins
        self._revocable: dict[_RevocableCall, None] = {}
        self.close = access.on_change(self._recheck)

    @property
    def is_on(self) -> bool:
        return self._access.is_on

    def caller(self) -> str:
        """Return the user of the current call, with the token; empty if access control is off."""
        identity = _caller.get()
        return identity.who if identity is not None and self._access.is_on else ""

    def user(self) -> str:
        """Return the name of the user of the current call, without the token; empty if access control is off."""
        identity = _caller.get()
        return identity.name if identity is not None and self._access.is_on else ""

    def guarded(self, backend: Backend) -> Backend:
        """Wrap the backend so that it checks the permissions of the current call's user."""
        if not self._access.is_on:
            return backend
        return Guard(self._access, _caller.get() or self._access.nobody, backend, caller_of())

    @asynccontextmanager
    async def passage(self, method: str, request: Any, context: Any, *, lasts: bool) -> AsyncIterator[None]:
        need = RPC_NEEDS.get(method, admin)
        identity = self._access.nobody
        try:
            if self._access.is_on:
                identity = await self._identify(context)
            need(identity, request)
            if lasts:
                # Send the metadata before the call may be cancelled: otherwise metadata in flight would be sent again
                # with the status, which gRPC refuses, and the client would wait forever.
                await context.send_initial_metadata(())
                need(identity, request)  # the access table may have changed
        except StoreError as error:
            self._note(identity.who, context, method, error)
            await abort(context, error)
        _caller.set(identity)
        if not lasts and method not in WAITING:
            yield
            return
        call = _RevocableCall(lambda: need(identity, request))
        self._revocable[call] = None
        try:
            yield
        except asyncio.CancelledError:
            if call.refused is None or call.task is None:
                raise
            call.task.uncancel()
            self._note(identity.who, context, method, call.refused)
            await abort(context, call.refused)
        finally:
            self._revocable.pop(call, None)

    async def _identify(self, context: Any) -> UserIdentity:
        """Identify the caller by the `authorization` header, or else by the certificate. Without either, the caller
        is nobody. Raises NotAuthenticated, Overloaded."""
        for name, value in context.invocation_metadata() or ():
            if name == AUTHORIZATION:
                credentials = credentials_or_none(value) if isinstance(value, str) else None
                if credentials is None:
                    raise NotAuthenticated(
                        "expected authorization: Basic with user and password in base64, or Bearer with a token"
                    )
                return await self._logins.login(*credentials, address_of(caller_of(context)))
        names = context.auth_context().get("x509_common_name") or ()
        found = self._access.of_certificate(each.decode("utf-8", "replace") for each in names)
        if found is not None:
            self._logins.note_authenticated(address_of(caller_of(context)))
        return found or self._access.nobody

    def _note(self, user: str, context: Any, method: str, error: StoreError) -> None:
        self._access.refused(user, caller_of(context), method.rpartition(".")[2], error)

    def _recheck(self) -> None:
        """Apply a new access table: abort the calls that are no longer allowed."""
        for call in list(self._revocable):
            try:
                call.check()
            except StoreError as error:
                if call.refused is None and call.task is not None:
                    call.refused = error
                    call.task.cancel()
