"""An access table with one user of each kind. The password of all of them is `secret`."""

from __future__ import annotations

from kvstore.access import (
    AccessTable,
    AddRole,
    AddUser,
    Change,
    GrantRight,
    GrantRole,
    Right,
    Switch,
    applied,
    encoded,
)

PASSWORD = b"secret"
HASH = encoded(PASSWORD, bytes(16), p=1)
OTHER_HASH = encoded(b"another", bytes(16), p=1)
CHANGES: tuple[Change, ...] = (
    AddUser("root", HASH),
    *(AddUser(name, HASH) for name in ("reader", "tenant", "backup", "nothing")),
    AddUser("certified"),
    *(AddRole(name) for name in ("reads", "owns", "backs")),
    GrantRight("reads", Right.READ),
    GrantRight("reads", Right.WATCH),
    *(GrantRight("owns", right, b"t/") for right in (Right.READ, Right.WRITE, Right.WATCH)),
    GrantRight("backs", Right.BACKUP),
    GrantRole("reader", "reads"),
    GrantRole("certified", "reads"),
    GrantRole("tenant", "owns"),
    GrantRole("backup", "backs"),
    Switch(True),
)


def table(*more: Change) -> AccessTable:
    """Return the table after some further changes."""
    found = AccessTable()
    for change in (*CHANGES, *more):
        found = applied(found, change)
    return found
