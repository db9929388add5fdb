"""The access table: users, roles, their rights, and whether anybody is asked at all. Decides only: values that cannot
be built wrong. kvstore/meta/tables/access.py keeps it in the metadata store."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.access.passwords import fault_of_hash
from kvstore.access.tokens import Token

USERS_MAX = 1_000
ROLES_MAX = 256
GRANTS_MAX = 64
"""Of one role."""
ROLES_OF_USER_MAX = 32
TOKENS_MAX = 1_000
TOKENS_OF_USER_MAX = 32
PREFIX_BYTES_MAX = 1_024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")


class Right(StrEnum):
    """A right to keys that begin with a prefix; ADMIN is about the cluster and no key."""

    READ = "read"
    WRITE = "write"
    WATCH = "watch"
    ADMIN = "admin"
    BACKUP = "backup"


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One right on the keys that begin with a prefix."""

    right: Right
    prefix: bytes = b""
    """Empty: all keys."""

    def __post_init__(self) -> None:
        if len(self.prefix) > PREFIX_BYTES_MAX:
            raise ValueError(f"want a prefix of at most {PREFIX_BYTES_MAX} bytes, got {len(self.prefix)}")
        if self.right is Right.ADMIN and self.prefix:
            raise ValueError("want no prefix with the right admin: it is about the cluster")


@dataclass(frozen=True, slots=True)
class Role:
    """A name for some rights."""

    name: str
    grants: tuple[Grant, ...] = ()
    """Sorted, each once."""

    def __post_init__(self) -> None:
        check_name("role", self.name)
        if len(self.grants) > GRANTS_MAX:
            raise ValueError(f"role {self.name}: want at most {GRANTS_MAX} rights, got {len(self.grants)}")


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who may log in."""

    name: str
    password: str = field(default="", repr=False)
    """A hash (kvstore/access/passwords.py). Empty: no password lets him in, only a certificate of this common name."""
    roles: tuple[str, ...] = ()
    """Sorted, each once."""

    def __post_init__(self) -> None:
        check_name("user", self.name)
        if self.password and (fault := fault_of_hash(self.password)):
            raise ValueError(f"user {self.name}: {fault}")
        if len(self.roles) > ROLES_OF_USER_MAX:
            raise ValueError(f"user {self.name}: want at most {ROLES_OF_USER_MAX} roles, got {len(self.roles)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessTable:
    """All users, roles and access tokens of a cluster."""

    is_on: bool = False
    """Off: everybody may do everything, as if there were no table."""
    users: tuple[User, ...] = ()
    """By name."""
    roles: tuple[Role, ...] = ()
    """By name; the built-in one is not among them."""
    tokens: tuple[Token, ...] = ()
    """By id."""

    def __post_init__(self) -> None:
        for what, names, most in (
            ("tokens", [each.id for each in self.tokens], TOKENS_MAX),
            ("users", [each.name for each in self.users], USERS_MAX),
            ("roles", [each.name for each in self.roles], ROLES_MAX),
        ):
            if len(names) > most:
                raise ValueError(f"want at most {most} {what}, got {len(names)}")
            if sorted(set(names)) != names:
                raise ValueError(f"want {what} sorted by name or id, each once")

    def user_or_none(self, name: str) -> User | None:
        return next((each for each in self.users if each.name == name), None)

    def role_or_none(self, name: str) -> Role | None:
        return next((each for each in self.roles if each.name == name), None)


def check_name(what: str, name: str) -> None:
    """Raise ValueError unless a user or a role may have this name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"want a {what} of letters, digits and _ . @ - (1 to 63, no sign first), got {name[:80]!r}")
