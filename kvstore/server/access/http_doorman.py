"""Asks at the HTTP door: 401 for whoever does not say who he is, 403 for whoever may not."""

from __future__ import annotations

from aiohttp import web

from kvstore.errors import NotAuthenticated, Overloaded, PermissionDenied, StoreError
from kvstore.server.access.certificates import common_names
from kvstore.server.access.identities import Access, Identity
from kvstore.server.access.logins import Logins, credentials_or_none, network_of
from kvstore.server.access.needs import HTTP_NEEDS, admin, nothing

ASK = {"WWW-Authenticate": 'Basic realm="kvstore", charset="UTF-8"'}


class HttpDoorman:
    """That of one node."""

    def __init__(self, access: Access, logins: Logins) -> None:
        self._access, self._logins = access, logins

    async def refusal_or_none(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a request that may not be done; None if it may."""
        need = HTTP_NEEDS.get(request.path, admin)
        if not self._access.is_on or need is nothing:
            return None
        identity = self._access.nobody
        try:
            identity = await self._identify(request)
            need(identity, None)
        except NotAuthenticated as error:
            return self._refusal(identity, request, error, 401)
        except PermissionDenied as error:
            return self._refusal(identity, request, error, 403)
        except Overloaded as error:
            return self._refusal(identity, request, error, 503)
        return None

    async def _identify(self, request: web.BaseRequest) -> Identity:
        header = request.headers.get("Authorization")
        if header is not None:
            said = credentials_or_none(header)
            if said is None:
                raise NotAuthenticated("want Authorization: Basic with user and password, or Bearer with a token")
            return await self._logins.login(*said, network_of(request.remote or "?"))
        certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
        return self._access.of_certificate(common_names(certificate)) or self._access.nobody

    def _refusal(self, identity: Identity, request: web.BaseRequest, error: StoreError, status: int) -> web.Response:
        self._access.refused(identity.who, request.remote or "?", f"HTTP {request.path[:100]}", error)
        return web.Response(text=f"{status}: {error}\n", status=status, headers=ASK if status == 401 else None)
