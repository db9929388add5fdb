"""The permissions of one user, in the form in which requests are checked. Decides only."""

from __future__ import annotations

from kvstore.access.changes import ADMIN
from kvstore.access.ranges import Ranges
from kvstore.access.table import AccessTable, Right, User
from kvstore.errors import PermissionDenied

SHOWN_BYTES = 64
"""Maximum number of bytes of a key that an error message shows."""


class Permissions:
    """The permissions of one user. Immutable: each change of the access table creates new instances."""

    __slots__ = ("is_admin", "ranges", "read", "user", "write")

    def __init__(self, user: str, prefixes: dict[Right, list[bytes]]) -> None:
        self.user = user
        self.ranges = {right: Ranges(prefixes.get(right, ())) for right in Right}
        self.is_admin = bool(self.ranges[Right.ADMIN])
        self.read, self.write = self.ranges[Right.READ].prefixes, self.ranges[Right.WRITE].prefixes
        """Prefixes for `startswith`, where each call counts."""

    def may(self, right: Right, key: bytes) -> bool:
        """Return True if the user has the right on the key."""
        return key.startswith(self.ranges[right].prefixes)

    def may_all(self, right: Right, start: bytes, end: bytes) -> bool:
        """Return True if the user has the right on all keys in [start, end). An empty `end` means up to the last
        key."""
        return self.ranges[right].covers(start, end)

    def may_some(self, right: Right) -> bool:
        """Return True if the user has the right on any key. For ADMIN, return True if the user has the right."""
        return bool(self.ranges[right])

    def refused(self, right: Right, what: str) -> PermissionDenied:
        """Return the error for a request that lacks `right`. `what` names the keys or the request in the message."""
        return PermissionDenied(f"user {self.user} lacks the right {right} for {what}")


NOTHING = Permissions("-", {})
EVERYTHING = Permissions("-", {right: [b""] for right in Right})


def permissions_of(table: AccessTable, user: User) -> Permissions:
    """Return the permissions that the user has through roles. A role that is missing from the table gives none."""
    prefixes: dict[Right, list[bytes]] = {}
    for name in user.roles:
        if name == ADMIN:
            prefixes.setdefault(Right.ADMIN, []).append(b"")
        role = table.role_or_none(name)
        for grant in role.grants if role is not None else ():
            prefixes.setdefault(grant.right, []).append(grant.prefix)
    return Permissions(user.name, prefixes)


def shown_name(name: bytes) -> str:
    """Format the name of a key or a channel for an error message, truncated to SHOWN_BYTES."""
    text = ascii(name[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    return f"{text}{'…' if len(name) > SHOWN_BYTES else ''}"


def shown_key(key: bytes) -> str:
    """Format a key for an error message."""
    return f"key {shown_name(key)}"


def shown_range(start: bytes, end: bytes) -> str:
    """Format the key range [start, end) for an error message. An empty `end` means up to the last key."""
    return f"keys from {shown_name(start)} to {shown_name(end) if end else 'the last'}"
