"""The rights of one user, as they are asked for. Decides only."""

from __future__ import annotations

from kvstore.access.changes import ADMIN
from kvstore.access.ranges import Ranges
from kvstore.access.table import AccessTable, Right, User
from kvstore.errors import PermissionDenied

SHOWN_BYTES = 64
"""Of a key in an error."""


class Permissions:
    """The rights of a user, for as long as his roles stay. Immutable: a change makes another."""

    __slots__ = ("is_admin", "ranges", "read", "user", "write")

    def __init__(self, user: str, prefixes: dict[Right, list[bytes]]) -> None:
        self.user = user
        self.ranges = {right: Ranges(prefixes.get(right, ())) for right in Right}
        self.is_admin = bool(self.ranges[Right.ADMIN])
        self.read, self.write = self.ranges[Right.READ].prefixes, self.ranges[Right.WRITE].prefixes
        """For `startswith`, where each call counts."""

    def may(self, right: Right, key: bytes) -> bool:
        """Whether the user has the right on a key."""
        return key.startswith(self.ranges[right].prefixes)

    def may_all(self, right: Right, start: bytes, end: bytes) -> bool:
        """Whether he has it on all keys in [start, end); `end` empty: to the last."""
        return self.ranges[right].covers(start, end)

    def may_some(self, right: Right) -> bool:
        """Whether he has it on any key, or at all."""
        return bool(self.ranges[right])

    def refused(self, right: Right, what: str) -> PermissionDenied:
        """The error for what he may not."""
        return PermissionDenied(f"user {self.user} lacks the right {right} for {what}")


NOTHING = Permissions("-", {})
EVERYTHING = Permissions("-", {right: [b""] for right in Right})


def permissions_of(table: AccessTable, user: User) -> Permissions:
    """The rights that his roles give him. A role that is not there gives none."""
    prefixes: dict[Right, list[bytes]] = {}
    for name in user.roles:
        if name == ADMIN:
            prefixes.setdefault(Right.ADMIN, []).append(b"")
        role = table.role_or_none(name)
        for grant in role.grants if role is not None else ():
            prefixes.setdefault(grant.right, []).append(grant.prefix)
    return Permissions(user.name, prefixes)


def shown_key(key: bytes) -> str:
    """A key as errors name it."""
    text = ascii(key[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    return f"key {text}{'…' if len(key) > SHOWN_BYTES else ''}"


def shown_range(start: bytes, end: bytes) -> str:
    """A range as errors name it."""
    return f"keys from {shown_key(start)[4:]} to {shown_key(end)[4:] if end else 'the last'}"
