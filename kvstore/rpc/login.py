"""The logins of clients: a user with a password, or a token. This module reads logins from a URL, a file or the
environment, and adds them to calls.

A login is never a command-line option, because everyone on the machine can read the arguments of processes.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.access.tokens import id_or_none
from kvstore.env.files.private import open_private
from kvstore.errors import ConfigError

PREFIX = "KVSTORE"
USER, PASSWORD, PASSWORD_FILE = "KVSTORE_USER", "KVSTORE_PASSWORD", "KVSTORE_PASSWORD_FILE"
TOKEN, TOKEN_FILE = "KVSTORE_TOKEN", "KVSTORE_TOKEN_FILE"
_OF_LOGINS = re.compile(r"KVSTORE_(\w+_)?(USER|PASSWORD|PASSWORD_FILE|TOKEN|TOKEN_FILE)")
"""Environment variables with logins, including those of the metadata store (kvstore/meta/login.py)."""
FILE_BYTES_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Login:
    """A user with a password, or a token. Its `repr` does not show the secret."""

    user: str
    """The user's name. Empty for a token, because the token identifies the user."""
    password: bytes = field(repr=False)
    """The password, or the token."""

    def __post_init__(self) -> None:
        found: object = self.password
        if not isinstance(found, bytes):
            raise ValueError(f"expected the password to be bytes, got {type(found).__name__}")

    @property
    def header(self) -> str:
        """The value of the `authorization` header."""
        if not self.user:
            return "Bearer " + self.password.decode("ascii", "replace")
        return "Basic " + base64.b64encode(self.user.encode() + b":" + self.password).decode()


def login_of_environment(environ: Mapping[str, str] | None = None, prefix: str = PREFIX) -> Login | None:
    """Return the login that the environment contains, or None. KVSTORE_TOKEN_FILE and KVSTORE_TOKEN contain a token;
    KVSTORE_USER contains a user whose password is in KVSTORE_PASSWORD_FILE or KVSTORE_PASSWORD. With a prefix other
    than the default, only a user and a password are read. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    user, file = environ.get(f"{prefix}_USER", ""), environ.get(f"{prefix}_PASSWORD_FILE", "")
    token = _token_of(environ) if prefix == PREFIX else None
    if not user:
        return token
    if token is not None:
        raise ConfigError(f"expected either {USER} with a password, or {TOKEN_FILE} or {TOKEN}, got both")
    if file:
        return Login(user, password_in(Path(file)))
    if f"{prefix}_PASSWORD" not in environ:
        raise ConfigError(f"{prefix}_USER is set; expected {prefix}_PASSWORD_FILE or {prefix}_PASSWORD as well")
    return Login(user, environ[f"{prefix}_PASSWORD"].encode())


def login_by_token(word: bytes, where: str) -> Login:
    """Return the login of the token `word`. Raises ConfigError if it is not a token. The error names `where` the
    token came from, but does not contain the token."""
    if id_or_none(word) is None:
        raise ConfigError(
            f"{where}: expected a token as printed by `kvstore token add`, got {len(word)} bytes in another form"
        )
    return Login("", word)


def _token_of(environ: Mapping[str, str]) -> Login | None:
    if file := environ.get(TOKEN_FILE, ""):
        return login_by_token(password_in(Path(file)), file)
    word = environ.get(TOKEN, "")
    return login_by_token(word.encode(), TOKEN) if word else None


def without_login(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment without logins, for a long-lived child process that is not a client."""
    return {name: value for name, value in environ.items() if not _OF_LOGINS.fullmatch(name)}


def password_in(path: Path) -> bytes:
    """Return the first line of a password file. Raises ConfigError if the file cannot be read or if other accounts
    can read it."""
    try:
        with open_private(path) as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not data or len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            f"{path}: expected a password of 1 to {FILE_BYTES_MAX} bytes on the first line, got {len(data)} bytes"
        )
    return data.splitlines()[0]


class LoggedInChannel:
    """A channel whose calls carry a login. It wraps a channel of gRPC's blocking or asyncio API, and generated stubs
    accept it."""

    def __init__(self, channel: Any, login: Login) -> None:
        self._channel = channel
        self._metadata = (("authorization", login.header),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.unary_unary(*args, **options), self._metadata)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.unary_stream(*args, **options), self._metadata)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.stream_unary(*args, **options), self._metadata)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.stream_stream(*args, **options), self._metadata)

    def close(self) -> Any:
        return self._channel.close()

    def __enter__(self) -> LoggedInChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def __aenter__(self) -> LoggedInChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


class _Method:
    __slots__ = ("_metadata", "_method")

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method, self._metadata = method, metadata

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._method(*args, metadata=self._metadata, **options)

    def future(self, *args: Any, **options: Any) -> Any:
        return self._method.future(*args, metadata=self._metadata, **options)
