"""The identities and permissions of users, according to the last access table that this server has read. follow.py
delivers the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.access import EVERYTHING, NOTHING, AccessTable, Permissions, Right, Token, User, permissions_of
from kvstore.access.permissions import shown_key, shown_range
from kvstore.access.principals import ClusterNames, Principal, PrincipalKind
from kvstore.env import Stream
from kvstore.errors import AccessUnfounded, NotAuthenticated, StoreError
from kvstore.partition.state.commands import (
    Code,
    Delete,
    DeleteRange,
    Flag,
    Op,
    Put,
    Range,
    Scan,
)
from kvstore.partition.state.traits import KEYLESS, NEEDS
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.certificates import common_names
from kvstore.server.listeners import Listeners

NOBODY = ""
NOT_LOGGED_IN = "expected a user and password, a token or a client certificate, got none: access control is on"
UNFOUNDED = (
    "access control is off and other machines can reach this node, so it serves no client: create the first "
    "administrator with `kvstore access found NAME --metadata ADDRESS`, or set insecure = true in the node's file"
)
GONE = "user {} was removed or the password has changed"
TOKEN_GONE = "token {} was revoked or has expired"
REVEALING = int(Flag.RETURN_OLD | Flag.IF_VERSION)
"""Flags with which a write returns the previous record or compares its version. Such a write also requires the right
to read."""
OPERATION_NAMES = {int(code): code.name.lower() for code in Code}


class UserIdentity:
    """One user. All connections of the user share one identity, and so do all connections that use the same token.
    The permissions are always those of the newest table."""

    __slots__ = ("is_gone", "name", "password", "permissions", "read", "who", "why_unknown", "write")

    def __init__(self, name: str, permissions: Permissions, password: str = "", token: str = "") -> None:
        """`token` is the id of the token with which the user authenticated; empty for a password or a certificate."""
        self.name, self.password = name, password
        self.who = f"{name}#{token}" if token else name
        """The name in audit lines. No user name contains a #."""
        self.allow(permissions)
        self.why_unknown = NOT_LOGGED_IN
        self.is_gone = False
        """True if the identity is no longer valid: the user was removed, the password was changed, or the token was
        revoked."""

    def allow(self, permissions: Permissions) -> None:
        """Replace the permissions."""
        self.permissions = permissions
        self.read, self.write = permissions.read, permissions.write

    def end(self, why: str) -> None:
        """End the identity for good. Later tables do not mention it, so they could not withdraw its rights."""
        self.is_gone, self.why_unknown = True, why
        self.allow(NOTHING)

    def refusal_or_none(self, op: Op) -> StoreError | None:
        """Return the error with which an operation must be refused, or None if it is allowed."""
        if not self.name or self.is_gone:
            return None if self.permissions is EVERYTHING else self.unknown()
        if op.ops:
            return next((found for each in op.ops if (found := self.refusal_or_none(each)) is not None), None)
        needs = NEEDS[op.code]
        if (op.__class__ is Put or op.__class__ is Delete) and op.flags & REVEALING:
            needs = (*needs, Right.READ)
        for right in needs:
            if not self._may(right, op):
                return self.permissions.refused(right, f"{OPERATION_NAMES[op.code]} of {_shown(op)}")
        return None

    def may_do_every_operation(self) -> bool:
        """Return True if the current permissions allow every operation on every key. Every operation requires the
        right to read or to write."""
        return all(self.permissions.may_all(right, b"", b"") for right in (Right.READ, Right.WRITE))

    def _may(self, right: Right, op: Op) -> bool:
        if op.code in KEYLESS:
            return self.permissions.may_all(right, *_range_of(op))
        return self.permissions.may(right, op.key)

    def check(self, right: Right, start: bytes, end: bytes, what: str) -> None:
        """Raise NotAuthenticated if the client has not authenticated, and PermissionDenied unless the user has the
        right on all keys in [start, end). `what` names the operation in the error."""
        self.check_known()
        if not self.permissions.may_all(right, start, end):
            raise self.permissions.refused(right, f"{what} of {shown_range(start, end)}")

    def check_some(self, rights: Iterable[Right], what: str) -> None:
        """Raise NotAuthenticated if the client has not authenticated, and PermissionDenied unless the user has one
        of the rights on at least some keys. `what` names the operation in the error."""
        self.check_known()
        rights = tuple(rights)
        if not any(map(self.permissions.may_some, rights)):
            raise self.permissions.refused(rights[0], what)

    def unknown(self) -> NotAuthenticated:
        """Return the error for a client that has not authenticated."""
        return (AccessUnfounded if self.why_unknown is UNFOUNDED else NotAuthenticated)(self.why_unknown)

    def check_known(self) -> None:
        """Raise NotAuthenticated if the client has not authenticated."""
        if (not self.name or self.is_gone) and self.permissions is not EVERYTHING:
            raise self.unknown()


class Access:
    """The access table that this server applies. While `is_on` is False, no permission is checked."""

    def __init__(
        self, table: AccessTable | None = None, audit: AuditLog | None = None, *, is_wanted: bool = False
    ) -> None:
        """`audit` records refusals. `is_wanted` is True if other machines can reach this server. Then, while access
        control is off, the server refuses every client instead of serving every client (docs/design/0015)."""
        self.is_on = is_wanted
        self.is_wanted, self.is_unfounded = is_wanted, is_wanted
        self._audit = audit
        self.nobody = UserIdentity(NOBODY, NOTHING if is_wanted else EVERYTHING)
        self.nobody.why_unknown = UNFOUNDED if is_wanted else NOT_LOGGED_IN
        """The identity of clients that have not authenticated."""
        self.denied = 0
        """Number of operations and calls that were refused."""
        self._users: dict[str, User] = {}
        self._identities: dict[str, UserIdentity] = {}
        self._tokens: dict[str, tuple[Token, UserIdentity]] = {}
        """Tokens by id. Expired tokens may be among them until the table drops them."""
        self._listeners = Listeners()
        self.cluster_names = ClusterNames()
        """The names of nodes and bookies, which no user may have."""
        if table is not None:
            self.take(table)

    def take(self, table: AccessTable) -> None:
        """Apply another table from now on, and call all listeners."""
        self.is_unfounded = self.is_wanted and not table.is_on
        if self.is_unfounded:
            table = AccessTable(is_on=True)
        self.nobody.why_unknown = UNFOUNDED if self.is_unfounded else NOT_LOGGED_IN
        self.is_on = table.is_on
        self.nobody.allow(NOTHING if table.is_on else EVERYTHING)
        self._users = {each.name: each for each in table.users}
        for name, identity in list(self._identities.items()):
            user = self._users.get(name)
            if user is None or user.password != identity.password:
                identity.end(GONE.format(name))
                del self._identities[name]
            else:
                identity.allow(permissions_of(table, user) if table.is_on else EVERYTHING)
        for user in table.users:
            if user.name not in self._identities:
                permissions = permissions_of(table, user) if table.is_on else EVERYTHING
                self._identities[user.name] = UserIdentity(user.name, permissions, user.password)
        self._take_tokens(table)
        self._listeners.notify()

    def _take_tokens(self, table: AccessTable) -> None:
        before, self._tokens = self._tokens, {}
        for token in table.tokens:
            user, (known, identity) = self._users.get(token.user), before.get(token.id, (None, None))
            if user is None:
                continue
            permissions = permissions_of(table, user) if table.is_on else EVERYTHING
            if identity is None or known != token or identity.is_gone:
                identity = UserIdentity(user.name, permissions, token=token.id)
            identity.allow(permissions)
            self._tokens[token.id] = token, identity
        for id_, (_, identity) in before.items():
            if self._tokens.get(id_, (None, None))[1] is not identity:
                identity.end(TOKEN_GONE.format(id_))

    def expire(self, now_ms: int) -> None:
        """End the identities of tokens that have expired by `now_ms`, and call all listeners."""
        ended = [
            identity for token, identity in self._tokens.values() if token.expires_ms <= now_ms and not identity.is_gone
        ]
        for identity in ended:
            identity.end(TOKEN_GONE.format(identity.who.partition("#")[2]))
        if ended:
            self._listeners.notify()

    def next_expiry_ms(self) -> int | None:
        """Return the time at which the next token expires, in milliseconds since 1970, or None if no token expires."""
        return min(
            (token.expires_ms for token, identity in self._tokens.values() if not identity.is_gone), default=None
        )

    def of_token(self, id_: str, word: bytes, now_ms: int) -> UserIdentity | None:
        """Return the user of the token with this id and secret. Return None if the token is unknown, expired or
        revoked."""
        token, identity = self._tokens.get(id_, (None, None))
        if token is None or identity is None or token.expires_ms <= now_ms or not token.is_right(word):
            return None
        if identity.is_gone:
            # A wrong date ended the identity too early. Its connections are closed, but the token is still valid.
            identity = UserIdentity(token.user, self._identities[token.user].permissions, token=id_)
            self._tokens[id_] = token, identity
            self._listeners.notify()
        return identity

    def refused(self, who: str, address: str, call: str, error: StoreError) -> None:
        """Count a refusal and write it to the audit log."""
        self.denied += 1
        if self._audit is not None:
            self._audit.refused(who, address, call, error)

    def shut(self) -> None:
        """Refuse every client from now on, because the access table cannot be read."""
        self.take(AccessTable(is_on=True, users=(), roles=()))

    def on_change(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after each new table. Returns a function that removes the callback."""
        return self._listeners.add(changed)

    @property
    def has_users(self) -> bool:
        return bool(self._users)

    def user_or_none(self, name: str) -> User | None:
        return self._users.get(name)

    def identity_or_none(self, name: str) -> UserIdentity | None:
        """Return the user with this name, without any authentication, or None."""
        return self._identities.get(name)

    def principal_of(self, names: Iterable[str]) -> Principal | None:
        """Return the party that a verified certificate with these common names identifies. Nodes and bookies take
        precedence over users. Return None if the names belong to no party."""
        names = tuple(names)
        for each in names:
            if (found := self.cluster_names.principal_or_none(each)) is not None:
                return found
        return next((Principal(PrincipalKind.USER, each) for each in names if each in self._identities), None)

    def of_certificate(self, names: Iterable[str]) -> UserIdentity | None:
        """Return the user that a verified certificate with these common names identifies; None if it identifies no
        user."""
        found = self.principal_of(names)
        return self._identities.get(found.name) if found is not None and found.kind is PrincipalKind.USER else None

    def users_like_nodes(self) -> list[str]:
        """Return the users that have the name of a node or a bookie. Certificates with these names do not
        authenticate as the users."""
        return sorted(each for each in self._users if self.cluster_names.principal_or_none(each) is not None)

    def is_user(self, stream: Stream) -> bool:
        """Return True if access control is on and the peer has the certificate of a user (docs/protocol.md B33)."""
        names = common_names(stream.get_extra_info("peercert"))
        return self.is_on and self.of_certificate(names) is not None

    def statistics(self) -> dict[str, int]:
        return {
            "access_on": int(self.is_on and not self.is_unfounded),
            "access_unfounded": int(self.is_unfounded),
            "access_users": len(self._users),
            "access_tokens": len(self._tokens),
            "access_denied_total": self.denied,
        }


def _range_of(op: Op) -> tuple[bytes, bytes]:
    """Return the start and the end of the range of a keyless operation: all keys if it names no range."""
    return (op.key, op.end) if isinstance(op, (Scan, Range, DeleteRange)) else (b"", b"")


def _shown(op: Op) -> str:
    if op.code not in KEYLESS:
        return shown_key(op.key)
    return shown_range(*_range_of(op)) if isinstance(op, (Scan, Range, DeleteRange)) else "all keys"
