"""Servers that reject the client's login. One server's table of users may be old or unreadable, so its refusal alone is
not final: other servers may accept the login. Decides only."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.client.core.retries import NoServerReachable
from kvstore.errors import NotAuthenticated, StoreError, Unavailable


class LoginRefusals:
    """Addresses whose server rejected the login when it was asked last, with the first error of each. The first error
    counts because a server that removes a user names the removal once, and later says only that no such user exists."""

    def __init__(self) -> None:
        self._refusals: dict[str, NotAuthenticated] = {}
        self._of_new: set[str] = set()
        """Addresses that rejected the login of a new connection, that is the login as it is now."""

    def record(self, address: str, error: StoreError | None, *, has_served: bool = False) -> None:
        """Record the result of asking an address; `error` None is an answer. `has_served`: the connection had answers
        before, so its login was accepted once and may have been replaced since."""
        if not isinstance(error, NotAuthenticated):
            self._refusals.pop(address, None)
            self._of_new.discard(address)
            return
        self._refusals.setdefault(address, error)
        if not has_served:
            self._of_new.add(address)

    def error_or_none(self, addresses: Collection[str], *, is_late: bool) -> NotAuthenticated | None:
        """Return the first login error if all addresses reject the login; once it is late, if one of them does."""
        refusals = [error for address, error in self._refusals.items() if address in addresses]
        if not refusals:
            return None
        return refusals[0] if is_late or self._of_new.issuperset(addresses) else None

    def of_all(self, error: StoreError, addresses: Collection[str], *, is_late: bool) -> StoreError:
        """Choose the error of an attempt whose result was recorded. A rejected login is final once all servers reject
        it, or once it is late and no other server can be reached. The next call asks every server again."""
        if not isinstance(error, NotAuthenticated | NoServerReachable):
            return error
        why = self.error_or_none(addresses, is_late=is_late)
        if why is not None:
            self._refusals.clear()
            self._of_new.clear()
            return why
        return Unavailable(str(error)) if isinstance(error, NotAuthenticated) else error

    def judge(
        self, address: str, error: StoreError, addresses: Collection[str], *, has_served: bool = False
    ) -> StoreError:
        """Record the error of an attempt, and return the error to act on: Unavailable for a rejected login, so that the
        next server is asked, unless all servers have rejected it."""
        self.record(address, error, has_served=has_served)
        if not isinstance(error, NotAuthenticated):
            return error
        return self.error_or_none(addresses, is_late=False) or Unavailable(f"{address}: {error}")
