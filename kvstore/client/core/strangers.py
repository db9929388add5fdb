"""Servers that do not know the user who asks. The table of rights of one may be old, or unreadable, so that its word
alone ends nothing: others may know better. Decides only."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.client.core.retries import Nobody
from kvstore.errors import NotAuthenticated, StoreError, Unavailable


class Strangers:
    """Addresses whose server did not know who asks when it was asked last, and why it said so first: the one whose user
    is removed while he is served says just that, and afterwards only that nobody has this name."""

    def __init__(self) -> None:
        self._said: dict[str, NotAuthenticated] = {}

    def hear(self, address: str, error: StoreError | None) -> None:
        """Take in what came of asking an address; None: an answer."""
        if isinstance(error, NotAuthenticated):
            self._said.setdefault(address, error)
        else:
            self._said.pop(address, None)

    def why_or_none(self, addresses: Collection[str], *, is_late: bool) -> NotAuthenticated | None:
        """The error of the first that said so, if all do not know who asks; once it is late, if one does not."""
        said = [error for address, error in self._said.items() if address in addresses]
        if not said:
            return None
        return said[0] if is_late or len(said) == len(addresses) else None

    def of_all(self, error: StoreError, addresses: Collection[str], *, is_late: bool) -> StoreError:
        """Choose the error by which an attempt is judged whose server `hear` was told of: that one does not know the
        user is final once all say so, or once it is late and nobody else is there. The next call asks each again."""
        if not isinstance(error, NotAuthenticated | Nobody):
            return error
        why = self.why_or_none(addresses, is_late=is_late)
        if why is not None:
            self._said.clear()
            return why
        return Unavailable(str(error)) if isinstance(error, NotAuthenticated) else error

    def judge(self, address: str, error: StoreError, addresses: Collection[str]) -> StoreError:
        """Choose the error that an attempt ends with: Unavailable, so that the next one is asked, for one that does not
        know who asks, unless that is what all have said."""
        self.hear(address, error)
        if not isinstance(error, NotAuthenticated):
            return error
        return self.why_or_none(addresses, is_late=False) or Unavailable(f"{address}: {error}")
