"""Logins for the metadata store: user, password and mechanism.

A login is never an option of a command or a part of an address, because anyone who lists the machine's processes or
reads its log could see it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.rpc.login import login_of_environment, password_in

PREFIX = "KVSTORE_METADATA"
"""Prefix of the environment variables: KVSTORE_METADATA_USER, …_PASSWORD_FILE or …_PASSWORD, …_AUTH, …_ACL."""


class Mechanism(StrEnum):
    """How a ZooKeeper server identifies the user. etcd has only one mechanism and ignores this setting."""

    DIGEST = "digest"
    """ZooKeeper's scheme `digest`. The server has no list of users: anyone who knows a user's name and password is
    that user."""
    SASL = "sasl"
    """SASL with DIGEST-MD5. The server has a list of users and refuses all others."""


class Acl(StrEnum):
    """Permissions on the nodes that a process creates in ZooKeeper (see docs/how-to/secure-the-metadata-store.md)."""

    CREATOR = "creator"
    """Only the creator's user may read or write the node."""
    OPEN = "open"
    """Every user may read and write the node. Use this while some processes do not log in yet, when you move to
    CREATOR or back."""


@dataclass(frozen=True, slots=True)
class MetadataLogin:
    """A user of the metadata store with a password, which `repr` hides. Raises ValueError for a login that no store
    accepts."""

    user: str
    password: bytes = field(repr=False)
    mechanism: Mechanism = Mechanism.DIGEST
    acl: Acl = Acl.CREATOR

    def __post_init__(self) -> None:
        if not self.user or ":" in self.user or not self.user.isprintable():
            raise ValueError(f"user: expected printable characters without a colon, got {self.user!r}")
        try:
            is_text = bool(self.password) and "\0" not in self.password.decode()
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            raise ValueError(f"the password of {self.user}: expected UTF-8 text that is not empty")

    @property
    def secret(self) -> str:
        """The password as text."""
        return self.password.decode()


def metadata_login(
    user: str, password_file: Path | None, mechanism: Mechanism, acl: Acl, environ: Mapping[str, str] | None = None
) -> MetadataLogin | None:
    """Return the login from these settings, or else from the environment, or None if neither names a user. Raises
    ConfigError."""
    if not user:
        return metadata_login_of_environment(environ)
    if password_file is None:
        raise ConfigError(
            f"metadata.password_file: expected it beside metadata.user; set it to the file with the password of {user}"
        )
    return _checked(user, password_in(password_file), mechanism, acl)


def metadata_login_of_environment(environ: Mapping[str, str] | None = None) -> MetadataLogin | None:
    """Return the login from KVSTORE_METADATA_USER and …_PASSWORD_FILE or …_PASSWORD, or None if no user is set.
    Raises ConfigError."""
    environ = os.environ if environ is None else environ
    found = login_of_environment(environ, PREFIX)
    if found is None:
        return None
    auth, acl = environ.get(f"{PREFIX}_AUTH", Mechanism.DIGEST), environ.get(f"{PREFIX}_ACL", Acl.CREATOR)
    if auth not in set(Mechanism) or acl not in set(Acl):
        raise ConfigError(
            f"expected {PREFIX}_AUTH to be one of {', '.join(Mechanism)}, and {PREFIX}_ACL one of "
            f"{', '.join(Acl)}, got {auth!r} and {acl!r}"
        )
    return _checked(found.user, found.password, Mechanism(auth), Acl(acl))


def _checked(user: str, password: bytes, mechanism: Mechanism, acl: Acl) -> MetadataLogin:
    try:
        return MetadataLogin(user, password, mechanism, acl)
    except ValueError as error:
        raise ConfigError(f"the login for the metadata store: {error}") from None
