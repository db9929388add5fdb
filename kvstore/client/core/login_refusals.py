"""Servers that do not know the user who asks. The table of rights of one may be old, or unreadable, so that its word
alone ends nothing: others may know better. Decides only."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.client.core.retries import NoServerReachable
from kvstore.errors import NotAuthenticated, StoreError, Unavailable


class LoginRefusals:
    """Addresses whose server did not know who asks when it was asked last, and why it said so first: the one whose user
    is removed while he is served says just that, and afterwards only that nobody has this name."""

    def __init__(self) -> None:
        self._said: dict[str, NotAuthenticated] = {}
        self._of_new: set[str] = set()
        """Those of them that have said it of a connection that is new, and so of the login that there is now."""

    def record(self, address: str, error: StoreError | None, *, has_served: bool = False) -> None:
        """Take in what came of asking an address; None: an answer. `has_served`: the connection had answers before, so
        its login was good, and another may be there since: a token is replaced before it expires."""
        if not isinstance(error, NotAuthenticated):
            self._said.pop(address, None)
            self._of_new.discard(address)
            return
        self._said.setdefault(address, error)
        if not has_served:
            self._of_new.add(address)

    def error_or_none(self, addresses: Collection[str], *, is_late: bool) -> NotAuthenticated | None:
        """The error of the first that said so, if all do not know who asks; once it is late, if one does not."""
        said = [error for address, error in self._said.items() if address in addresses]
        if not said:
            return None
        return said[0] if is_late or self._of_new.issuperset(addresses) else None

    def of_all(self, error: StoreError, addresses: Collection[str], *, is_late: bool) -> StoreError:
        """Choose the error by which an attempt is judged whose server `hear` was told of: that one does not know the
        user is final once all say so, or once it is late and nobody else is there. The next call asks each again."""
        if not isinstance(error, NotAuthenticated | NoServerReachable):
            return error
        why = self.error_or_none(addresses, is_late=is_late)
        if why is not None:
            self._said.clear()
            self._of_new.clear()
            return why
        return Unavailable(str(error)) if isinstance(error, NotAuthenticated) else error

    def judge(
        self, address: str, error: StoreError, addresses: Collection[str], *, has_served: bool = False
    ) -> StoreError:
        """Choose the error that an attempt ends with: Unavailable, so that the next one is asked, for one that does not
        know who asks, unless that is what all have said."""
        self.record(address, error, has_served=has_served)
        if not isinstance(error, NotAuthenticated):
            return error
        return self.error_or_none(addresses, is_late=False) or Unavailable(f"{address}: {error}")
