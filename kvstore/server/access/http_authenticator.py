"""Authenticates and authorizes requests to the HTTP port: the status is 401 without a login and 403 without a
permission. Also identifies callers of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kvstore.env.networks import network_of
from kvstore.errors import NotAuthenticated, Overloaded, PermissionDenied, StoreError
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, text_response
from kvstore.server.access.certificates import common_names
from kvstore.server.access.guard import Guard
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.server.access.logins import Logins, credentials_or_none
from kvstore.server.access.needs import HTTP_NEEDS, admin, nothing
from kvstore.server.routing.backend import Backend

CHALLENGE = {"WWW-Authenticate": 'Basic realm="kvstore", charset="UTF-8"'}


class HttpAuthenticator:
    """Authenticates the requests of one node's HTTP port."""

    def __init__(self, access: Access, logins: Logins) -> None:
        self._access, self._logins = access, logins

    @property
    def is_on(self) -> bool:
        """True if access control is on."""
        return self._access.is_on

    async def refusal_or_none(self, request: HttpRequest) -> HttpResponse | None:
        """Return the response that refuses a request, or None if the request is allowed."""
        need = HTTP_NEEDS.get(request.path, admin)
        if not self._access.is_on or need is nothing:
            return None
        identity = self._access.nobody
        try:
            identity = await self.identify(request)
            need(identity, None)
        except NotAuthenticated as error:
            return self._refusal(identity, request, error, 401)
        except PermissionDenied as error:
            return self._refusal(identity, request, error, 403)
        except Overloaded as error:
            return self._refusal(identity, request, error, 503)
        return None

    async def identify(self, request: HttpRequest) -> UserIdentity:
        """Identify the caller by the `authorization` header, or else by the certificate. Without either, or while
        access control is off, the caller is nobody. Raises NotAuthenticated, Overloaded."""
        if not self._access.is_on:
            return self._access.nobody
        header = request.headers.get("Authorization")
        if header is not None:
            credentials = credentials_or_none(header)
            if credentials is None:
                raise NotAuthenticated("expected Authorization: Basic with user and password, or Bearer with a token")
            return await self._logins.login(*credentials, network_of(request.remote))
        found = self._access.of_certificate(common_names(request.connection.certificate))
        if found is not None:
            self._logins.note_authenticated(network_of(request.remote))
        return found or self._access.nobody

    async def owner_of(self, request: HttpRequest) -> str:
        """Return whose share of a limit an allowed request uses: that of its user, or that of the client's network if
        the request has no user."""
        with suppress(NotAuthenticated, Overloaded):  # the access table has changed meanwhile
            return (await self.identify(request)).name or network_of(request.remote)
        return network_of(request.remote)

    def may_open(self, identity: UserIdentity, path: str) -> bool:
        """Return True if the caller may open the page at `path`."""
        try:
            HTTP_NEEDS.get(path, admin)(identity, None)
        except StoreError:
            return not self._access.is_on
        return True

    def guarded(self, identity: UserIdentity, request: HttpRequest, backend: Backend) -> Backend:
        """Wrap the backend so that it checks the permissions of the caller."""
        return Guard(self._access, identity, backend, request.remote) if self._access.is_on else backend

    def refused(self, identity: UserIdentity | None, request: HttpRequest, call: str, error: StoreError) -> None:
        """Count a refusal and write it to the audit log. `identity` is None if the caller is unknown."""
        self._access.refused("" if identity is None else identity.who, request.remote, call, error)

    def on_change(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after each change of permissions. Returns a function that removes the callback."""
        return self._access.on_change(changed)

    def _refusal(self, identity: UserIdentity, request: HttpRequest, error: StoreError, status: int) -> HttpResponse:
        if not _is_challenge(request, error):
            self.refused(identity, request, f"HTTP {request.path[:100]}", error)
        return text_response(f"{status}: {error}\n", status, CHALLENGE if status == 401 else {})


def _is_challenge(request: HttpRequest, error: StoreError) -> bool:
    """Return True if a browser may have opened a page before it asks its user to log in. That is no refusal."""
    is_page = request.path in ("/", "/ui") or request.path.startswith("/ui/")
    has_login = request.headers.get("Authorization") is not None
    return type(error) is NotAuthenticated and request.method == "GET" and is_page and not has_login
