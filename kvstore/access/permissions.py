"""The permissions of one user, in the form in which they are checked. Decides only."""

from __future__ import annotations

from kvstore.access.changes import ADMIN
from kvstore.access.ranges import Ranges
from kvstore.access.table import AccessTable, Right, User
from kvstore.errors import PermissionDenied

SHOWN_BYTES = 64
"""Bytes of a key shown in an error."""


class Permissions:
    """The permissions of a user. Immutable: a change creates a new instance."""

    __slots__ = ("is_admin", "ranges", "read", "user", "write")

    def __init__(self, user: str, prefixes: dict[Right, list[bytes]]) -> None:
        self.user = user
        self.ranges = {right: Ranges(prefixes.get(right, ())) for right in Right}
        self.is_admin = bool(self.ranges[Right.ADMIN])
        self.read, self.write = self.ranges[Right.READ].prefixes, self.ranges[Right.WRITE].prefixes
        """Prefixes for `startswith`, where each call counts."""

    def may(self, right: Right, key: bytes) -> bool:
        """Return True if the user has the right on a key."""
        return key.startswith(self.ranges[right].prefixes)

    def may_all(self, right: Right, start: bytes, end: bytes) -> bool:
        """Return True if the user has the right on all keys in [start, end). An empty `end` means up to the last
        key."""
        return self.ranges[right].covers(start, end)

    def may_some(self, right: Right) -> bool:
        """Return True if the user has the right on any key, or at all."""
        return bool(self.ranges[right])

    def refused(self, right: Right, what: str) -> PermissionDenied:
        """Return the error for a denied request."""
        return PermissionDenied(f"user {self.user} lacks the right {right} for {what}")


NOTHING = Permissions("-", {})
EVERYTHING = Permissions("-", {right: [b""] for right in Right})


def permissions_of(table: AccessTable, user: User) -> Permissions:
    """Return the permissions that the user's roles give. A role that does not exist gives none."""
    prefixes: dict[Right, list[bytes]] = {}
    for name in user.roles:
        if name == ADMIN:
            prefixes.setdefault(Right.ADMIN, []).append(b"")
        role = table.role_or_none(name)
        for grant in role.grants if role is not None else ():
            prefixes.setdefault(grant.right, []).append(grant.prefix)
    return Permissions(user.name, prefixes)


def shown_key(key: bytes) -> str:
    """Format a key for an error message."""
    text = ascii(key[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    return f"key {text}{'…' if len(key) > SHOWN_BYTES else ''}"


def shown_range(start: bytes, end: bytes) -> str:
    """Format a key range for an error message."""
    return f"keys from {shown_key(start)[4:]} to {shown_key(end)[4:] if end else 'the last'}"
