"""The cluster's secret, by which its nodes authenticate each other. Anyone who has it can pass for a node.

A file of lines, each with 64 hexadecimal digits, that only its owner may read. The first line is the current secret.
Further lines are accepted besides it, while nodes change to another one. Each purpose uses its own key that is
derived from the secret, so that no use reveals anything to another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.env.files.private import draft_of, open_private
from kvstore.errors import ConfigError

SECRET_BYTES = 32
SECRETS_MAX = 4
"""Maximum number of lines in the file."""
FILE_BYTES_MAX = 1024
_LINE = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}")


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The secret that the servers of a cluster share. Derived keys must not be shown either; its `repr` shows
    nothing."""

    keys: tuple[bytes, ...] = field(repr=False)
    """The current secret, then those that are accepted besides it."""

    def __post_init__(self) -> None:
        if not self.keys or any(len(key) != SECRET_BYTES for key in self.keys):
            raise ValueError(f"expected one secret or more, each of {SECRET_BYTES} bytes")

    def derive(self, purpose: str) -> bytes:
        """Return the key of 32 bytes for one purpose, from the current secret."""
        return self.derive_all(purpose)[0]

    def derive_all(self, purpose: str) -> tuple[bytes, ...]:
        """Return the keys for one purpose from all accepted secrets, the current one first."""
        return tuple(hmac.digest(key, b"kvstore/" + purpose.encode(), hashlib.sha256) for key in self.keys)


def read_secret(path: Path) -> ClusterSecret:
    """Read the cluster's secret from a file. Raises ConfigError if the file is missing or malformed, or if other
    users can read it."""
    with _named(path), open_private(path) as file:
        data = file.read(FILE_BYTES_MAX + 1)
    return ClusterSecret(_decoded(path, data))


def make_secret(path: Path) -> ClusterSecret:
    """Read the cluster's secret from a file, and create the file with a new secret if it is absent. Raises the
    errors of `read_secret`."""
    if not path.exists():
        with _named(path):
            _write(path, f"{os.urandom(SECRET_BYTES).hex()}\n".encode())
    return read_secret(path)


def _decoded(path: Path, data: bytes) -> tuple[bytes, ...]:
    lines = data.decode("ascii", "replace").split()
    if len(data) > FILE_BYTES_MAX or not 1 <= len(lines) <= SECRETS_MAX or not all(map(_LINE.fullmatch, lines)):
        raise ConfigError(
            f"{path}: expected a cluster secret of 1 to {SECRETS_MAX} lines of {2 * SECRET_BYTES} hexadecimal digits"
        )
    return tuple(bytes.fromhex(line) for line in lines)


def _write(path: Path, data: bytes) -> None:
    """Write the complete file or nothing, and never over another one."""
    draft = draft_of(path, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return  # another process was faster, and its secret counts
    finally:
        os.unlink(draft)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: the cluster's secret is missing: copy it here from another node, or from where "
            "`kvstore cluster init` or `kvstore up` has made it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: the cluster's secret cannot be used: {error.strerror or error}") from error
