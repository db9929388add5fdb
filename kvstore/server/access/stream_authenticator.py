"""Authenticates sessions on the Redis port, by user and password or by certificate."""

from __future__ import annotations

from typing import Any, Protocol

from kvstore.env import Nursery, Stream
from kvstore.env.networks import network_of
from kvstore.errors import AccessUnfounded, NotAuthenticated, Overloaded
from kvstore.server.access.certificates import common_names
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.server.access.logins import Logins


class UnauthenticatedStream(Protocol):
    """A stream that waits for its authentication. Implemented by kvstore.server.grpc.stream.SessionStream."""

    def accept_client(self, identity: UserIdentity | None) -> None: ...
    def refuse(self, text: str) -> None: ...


class StreamAuthenticator:
    """Authenticates the sessions of one server's Redis port."""

    def __init__(self, access: Access, logins: Logins, nursery: Nursery) -> None:
        self.access, self._logins, self._nursery = access, logins, nursery

    def receive(self, handler: UnauthenticatedStream, login: list[bytes], stream: Stream) -> None:
        """Accept or refuse the client. This happens at once or, if a password must be verified, later. `login`
        contains the user and the password, or is empty."""
        if not self.access.is_on:
            return handler.accept_client(None)
        peer: Any = stream.get_extra_info("peername") or ("?", 0)
        if not login:
            found = self.access.of_certificate(common_names(stream.get_extra_info("peercert")))
            if found is not None:
                return handler.accept_client(found)
            self.access.refused("", str(peer[0]), "session", self.access.nobody.unknown())
            return handler.refuse(f"NOAUTH {self.access.nobody.why_unknown}")
        user, password = login[0].decode("utf-8", "replace"), login[1]
        known = self._logins.known_or_none(user, password)
        if known is not None:
            return handler.accept_client(known)
        self._nursery.spawn(self._log_in(handler, user, password, network_of(str(peer[0]))), name="login")
        return None

    async def _log_in(self, handler: UnauthenticatedStream, user: str, password: bytes, address: str) -> None:
        try:
            identity = await self._logins.login(user, password, address)
        except NotAuthenticated as error:
            handler.refuse(f"{'NOAUTH' if isinstance(error, AccessUnfounded) else 'WRONGPASS'} {error}")
        except Overloaded as error:
            handler.refuse(f"TRYAGAIN {error}")
        else:
            handler.accept_client(identity)
