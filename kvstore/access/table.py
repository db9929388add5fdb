"""The access table: users, roles, rights, access tokens, and whether access control is on. Decides only; its values are
valid by construction. kvstore/meta/tables/access.py stores the table."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.access.passwords import fault_of_hash
from kvstore.access.tokens import Token

USERS_MAX = 1_000
ROLES_MAX = 256
GRANTS_MAX = 64
"""Maximum number of rights of one role."""
ROLES_OF_USER_MAX = 32
TOKENS_MAX = 1_000
TOKENS_OF_USER_MAX = 32
PREFIX_BYTES_MAX = 1_024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")


class Right(StrEnum):
    """A right on the keys that begin with a prefix. The right ADMIN applies to the cluster and to no keys."""

    READ = "read"
    WRITE = "write"
    WATCH = "watch"
    ADMIN = "admin"
    BACKUP = "backup"


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """A right on the keys that begin with a prefix."""

    right: Right
    prefix: bytes = b""
    """An empty prefix means all keys."""

    def __post_init__(self) -> None:
        if len(self.prefix) > PREFIX_BYTES_MAX:
            raise ValueError(f"expected a prefix of at most {PREFIX_BYTES_MAX} bytes, got {len(self.prefix)}")
        if self.right is Right.ADMIN and self.prefix:
            raise ValueError("expected no prefix with the right admin, which concerns the whole cluster")


@dataclass(frozen=True, slots=True)
class Role:
    """A named set of rights."""

    name: str
    grants: tuple[Grant, ...] = ()
    """Sorted, without duplicates."""

    def __post_init__(self) -> None:
        check_name("role", self.name)
        if len(self.grants) > GRANTS_MAX:
            raise ValueError(f"role {self.name}: expected at most {GRANTS_MAX} rights, got {len(self.grants)}")


@dataclass(frozen=True, slots=True)
class User:
    """A user account: how the user logs in, and the user's roles."""

    name: str
    password: str = field(default="", repr=False)
    """A password hash (kvstore/access/passwords.py). If it is empty, the user can log in only with a certificate that
    has this common name."""
    roles: tuple[str, ...] = ()
    """Sorted, without duplicates."""

    def __post_init__(self) -> None:
        check_name("user", self.name)
        if self.password and (fault := fault_of_hash(self.password)):
            raise ValueError(f"user {self.name}: {fault}")
        if len(self.roles) > ROLES_OF_USER_MAX:
            raise ValueError(f"user {self.name}: expected at most {ROLES_OF_USER_MAX} roles, got {len(self.roles)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessTable:
    """All users, roles and access tokens of a cluster, and the switch of access control."""

    is_on: bool = False
    """True if access control is on. If False, every client may do everything."""
    users: tuple[User, ...] = ()
    """Sorted by name."""
    roles: tuple[Role, ...] = ()
    """Sorted by name, without the built-in role `admin`."""
    tokens: tuple[Token, ...] = ()
    """Sorted by id."""

    def __post_init__(self) -> None:
        for what, names, most in (
            ("tokens", [each.id for each in self.tokens], TOKENS_MAX),
            ("users", [each.name for each in self.users], USERS_MAX),
            ("roles", [each.name for each in self.roles], ROLES_MAX),
        ):
            if len(names) > most:
                raise ValueError(f"expected at most {most} {what}, got {len(names)}")
            if sorted(set(names)) != names:
                raise ValueError(f"expected {what} sorted by name or id, without duplicates")

    def user_or_none(self, name: str) -> User | None:
        """Return the user of this name, or None."""
        return next((each for each in self.users if each.name == name), None)

    def role_or_none(self, name: str) -> Role | None:
        """Return the role of this name, or None. The built-in role `admin` is not in the table."""
        return next((each for each in self.roles if each.name == name), None)


def check_name(what: str, name: str) -> None:
    """Raise ValueError unless the name is valid for a user or a role. `what` is "user" or "role", for the message."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"expected a {what} of 1 to 63 letters, digits and _ . @ -, beginning with a letter or digit, got "
            f"{name[:80]!r}"
        )
