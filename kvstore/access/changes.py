"""Changes of the access table: each change holds its arguments and produces a new table. Decides only.

A change that is already in effect returns the table unchanged, so a change whose outcome is unknown can be retried. A
change of an entry that does not exist raises NotThere. A caller that retries a removal treats NotThere as success.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import assert_never

from kvstore.access.table import TOKENS_OF_USER_MAX, AccessTable, Grant, Right, Role, User
from kvstore.access.tokens import TTL_MAX_MS, TTL_MIN_MS, Token, check_id
from kvstore.errors import InvalidRequest, NotThere

ADMIN = "admin"
"""The built-in role, which has the right `admin` and no other right."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A change that turns access control on or off for the whole cluster."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class FoundAdmin:
    """A change that creates the first administrator and turns access control on. Both happen in one step, so that no
    other client can act in between."""

    name: str
    password: str = field(repr=False)
    """A password hash (passwords.py)."""
    replaces_lost: bool = False
    """If True, the change is also allowed while access control is on, for when all administrator passwords are lost."""


@dataclass(frozen=True, slots=True)
class AddUser:
    """A change that creates a user. The first user of a cluster receives the role `admin`."""

    name: str
    password: str = field(default="", repr=False)
    """A password hash (passwords.py); empty if the user logs in with a certificate."""


@dataclass(frozen=True, slots=True)
class RemoveUser:
    """A change that removes a user and revokes the user's tokens."""

    name: str


@dataclass(frozen=True, slots=True)
class SetPassword:
    """A change of a user's password hash. It revokes the user's tokens."""

    name: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class GrantRole:
    """A change that gives a role to a user."""

    user: str
    role: str


@dataclass(frozen=True, slots=True)
class RevokeRole:
    """A change that takes a role from a user."""

    user: str
    role: str


@dataclass(frozen=True, slots=True)
class AddRole:
    """A change that creates a role without rights."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoveRole:
    """A change that removes a role and takes it from all users."""

    name: str


@dataclass(frozen=True, slots=True)
class GrantRight:
    """A change that gives a role a right on the keys that begin with `prefix`."""

    role: str
    right: Right
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class RevokeRight:
    """A change that takes a right from a role. `prefix` must be exactly the prefix with which the right was granted."""

    role: str
    right: Right
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class AddToken:
    """A change that creates an access token for a user, valid from `now_ms` for `ttl_ms`, both in ms."""

    id: str
    user: str
    hash: str = field(repr=False)
    ttl_ms: int
    now_ms: int
    passed_ms: int
    """Tokens that expired at or before this time are removed; 0 removes none (docs/protocol.md P31)."""


@dataclass(frozen=True, slots=True)
class RemoveToken:
    """A change that revokes an access token."""

    id: str


Change = (
    Switch
    | FoundAdmin
    | AddUser
    | RemoveUser
    | SetPassword
    | GrantRole
    | RevokeRole
    | AddRole
    | RemoveRole
    | GrantRight
    | RevokeRight
    | AddToken
    | RemoveToken
)


def applied(table: AccessTable, change: Change) -> AccessTable:
    """Return the table with the change applied. Raises InvalidRequest if the change is invalid or would leave a cluster
    with access control without an administrator, and NotThere if an entry does not exist."""
    try:
        found = _applied(table, change)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if found.is_on and not _has_admin(found):
        raise InvalidRequest(
            "expected at least one user with a password and the role admin while access control is on; add one "
            "first, because "
            "otherwise nobody could change the access table"
        )
    return found


def _applied(table: AccessTable, change: Change) -> AccessTable:
    match change:
        case Switch(is_on):
            return replace(table, is_on=is_on)
        case FoundAdmin():
            return _found(table, change)
        case AddUser():
            return _add_user(table, change)
        case RemoveUser(name):
            _user(table, name)
            users = tuple(each for each in table.users if each.name != name)
            return replace(_without_tokens_of(table, name), users=users)
        case SetPassword():
            return _set_password(table, change)
        case GrantRole(name, role):
            user = _user(table, name)
            if role != ADMIN:
                _role(table, role)
            return _with_user(table, replace(user, roles=tuple(sorted({*user.roles, role}))))
        case RevokeRole(name, role):
            return _revoke_role(table, name, role)
        case AddRole(name):
            _check_own(name)
            return table if table.role_or_none(name) is not None else _with_role(table, Role(name))
        case RemoveRole(name):
            return _remove_role(table, name)
        case GrantRight(name, right, prefix):
            _check_own(name)
            role_ = _role(table, name)
            return _with_role(table, replace(role_, grants=tuple(sorted({*role_.grants, Grant(right, prefix)}))))
        case RevokeRight(name, right, prefix):
            return _revoke_right(table, name, Grant(right, prefix))
        case AddToken() | RemoveToken():
            return _with_tokens(table, change)
        case _:
            assert_never(change)


def _found(table: AccessTable, change: FoundAdmin) -> AccessTable:
    known = table.user_or_none(change.name)
    is_done = known is not None and known.password == change.password and ADMIN in known.roles
    if table.is_on and not (is_done or change.replaces_lost):
        raise InvalidRequest(
            "access control is already on; ask an administrator to add users with `kvstore user add`, or use "
            "--replace-lost if all administrator passwords are lost"
        )
    if not change.password:
        raise InvalidRequest(f"user {change.name}: expected a password hash, got none")
    if table.is_on and known is not None and not is_done:
        table = _without_tokens_of(table, change.name)  # as with every password change
    roles = tuple(sorted({*(known.roles if known is not None else ()), ADMIN}))
    return replace(_with_user(table, User(change.name, change.password, roles)), is_on=True)


def _add_user(table: AccessTable, change: AddUser) -> AccessTable:
    known = table.user_or_none(change.name)
    if known is not None:
        if known.password == change.password:
            return table
        raise InvalidRequest(f"user {change.name} already exists; change the password with `user passwd`")
    # As in etcd, where the first user has to be root. Otherwise nobody could grant anything.
    roles = () if table.users else (ADMIN,)
    return _with_user(table, User(change.name, change.password, roles))


def _revoke_role(table: AccessTable, name: str, role: str) -> AccessTable:
    user = _user(table, name)
    if role not in user.roles:
        raise NotThere(f"user {name} does not have the role {role}; its roles: {', '.join(user.roles) or 'none'}")
    return _with_user(table, replace(user, roles=tuple(each for each in user.roles if each != role)))


def _remove_role(table: AccessTable, name: str) -> AccessTable:
    _check_own(name)
    _role(table, name)
    users = tuple(replace(each, roles=tuple(role for role in each.roles if role != name)) for each in table.users)
    return replace(table, users=users, roles=tuple(each for each in table.roles if each.name != name))


def _revoke_right(table: AccessTable, name: str, grant: Grant) -> AccessTable:
    _check_own(name)
    role = _role(table, name)
    if grant not in role.grants:
        raise NotThere(f"role {name} does not have the right {grant.right} on exactly the prefix {grant.prefix!r}")
    return _with_role(table, replace(role, grants=tuple(each for each in role.grants if each != grant)))


def _set_password(table: AccessTable, change: SetPassword) -> AccessTable:
    """Set the password and revoke the user's tokens: if the old password leaked, the tokens may have leaked too."""
    if not change.password:
        raise InvalidRequest(f"user {change.name}: expected a password hash, got none")
    user = _user(table, change.name)
    if user.password == change.password:
        return table
    return _without_tokens_of(_with_user(table, replace(user, password=change.password)), change.name)


def _with_tokens(table: AccessTable, change: AddToken | RemoveToken) -> AccessTable:
    if isinstance(change, AddToken):
        return _add_token(table, change)
    check_id(change.id)
    if all(each.id != change.id for each in table.tokens):
        raise NotThere(f"no token {change.id}; `kvstore token list` shows all tokens")
    return replace(table, tokens=tuple(each for each in table.tokens if each.id != change.id))


def _add_token(table: AccessTable, change: AddToken) -> AccessTable:
    _user(table, change.user)
    if not TTL_MIN_MS <= change.ttl_ms <= TTL_MAX_MS:
        raise InvalidRequest(f"expected a token lifetime of 1 second to 1 year, got {change.ttl_ms} ms")
    known = next((each for each in table.tokens if each.id == change.id), None)
    if known is not None:
        if (known.user, known.hash) == (change.user, change.hash):
            return table  # added by an earlier attempt
        raise InvalidRequest(f"token {change.id} already exists; use another id")
    kept = [each for each in table.tokens if each.expires_ms > change.passed_ms]
    if sum(each.user == change.user for each in kept) >= TOKENS_OF_USER_MAX:
        raise InvalidRequest(f"user {change.user} has {TOKENS_OF_USER_MAX} tokens, the maximum; revoke one first")
    token = Token(change.id, change.user, change.hash, change.now_ms + change.ttl_ms)
    return replace(table, tokens=tuple(sorted([*kept, token], key=lambda each: each.id)))


def _without_tokens_of(table: AccessTable, user: str) -> AccessTable:
    return replace(table, tokens=tuple(each for each in table.tokens if each.user != user))


def _has_admin(table: AccessTable) -> bool:
    admins = {ADMIN} | {role.name for role in table.roles if any(each.right is Right.ADMIN for each in role.grants)}
    return any(user.password and admins & set(user.roles) for user in table.users)


def _user(table: AccessTable, name: str) -> User:
    found = table.user_or_none(name)
    if found is None:
        raise NotThere(f"no user {name[:80]!r}; `kvstore user list` shows all users")
    return found


def _role(table: AccessTable, name: str) -> Role:
    found = table.role_or_none(name)
    if found is None:
        raise NotThere(f"no role {name[:80]!r}; `kvstore role list` shows all roles")
    return found


def _check_own(name: str) -> None:
    if name == ADMIN:
        raise InvalidRequest("the role admin is built in; choose another name")


def _with_user(table: AccessTable, user: User) -> AccessTable:
    others = [each for each in table.users if each.name != user.name]
    return replace(table, users=tuple(sorted([*others, user], key=lambda each: each.name)))


def _with_role(table: AccessTable, role: Role) -> AccessTable:
    others = [each for each in table.roles if each.name != role.name]
    return replace(table, roles=tuple(sorted([*others, role], key=lambda each: each.name)))
