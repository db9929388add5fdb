"""The cluster's secret: by it its nodes know each other, and whatever else has it can pass for one of them.

A file of lines, each 64 hexadecimal digits, that nobody but its owner may read. The first line is the present secret;
those behind it are accepted beside it, while nodes are changed over to another one. What is done with it is done with
keys that are derived from it, one for each purpose, so that no use gives anything away to another.
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
"""Lines of one file."""
FILE_BYTES_MAX = 1024
_LINE = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}")


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The secret that the servers of a cluster share. Nothing that is derived from it may be shown either; its `repr`
    shows nothing."""

    keys: tuple[bytes, ...] = field(repr=False)
    """The present one, then those that are accepted beside it."""

    def __post_init__(self) -> None:
        if not self.keys or any(len(key) != SECRET_BYTES for key in self.keys):
            raise ValueError(f"want one secret or more, each of {SECRET_BYTES} bytes")

    def derive(self, purpose: str) -> bytes:
        """The key of 32 bytes for one purpose, by the present secret."""
        return self.derive_all(purpose)[0]

    def derive_all(self, purpose: str) -> tuple[bytes, ...]:
        """The keys for one purpose by all secrets that are accepted, the present one first."""
        return tuple(hmac.digest(key, b"kvstore/" + purpose.encode(), hashlib.sha256) for key in self.keys)


def read_secret(path: Path) -> ClusterSecret:
    """The secret in a file. Raises ConfigError for one that is missing, of another form, or that others can read."""
    with _named(path), open_private(path) as file:
        data = file.read(FILE_BYTES_MAX + 1)
    return ClusterSecret(_decoded(path, data))


def make_secret(path: Path) -> ClusterSecret:
    """The secret in a file, which is made with a new one if it is not there. Raises ConfigError as `read_secret`."""
    if not path.exists():
        with _named(path):
            _write(path, f"{os.urandom(SECRET_BYTES).hex()}\n".encode())
    return read_secret(path)


def _decoded(path: Path, data: bytes) -> tuple[bytes, ...]:
    lines = data.decode("ascii", "replace").split()
    if len(data) > FILE_BYTES_MAX or not 1 <= len(lines) <= SECRETS_MAX or not all(map(_LINE.fullmatch, lines)):
        raise ConfigError(
            f"{path}: not a cluster's secret: want 1 to {SECRETS_MAX} lines of {2 * SECRET_BYTES} hexadecimal digits"
        )
    return tuple(bytes.fromhex(line) for line in lines)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, and never over another one."""
    draft = draft_of(path, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return  # somebody else was faster, and theirs counts
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
            f"{path}: the cluster's secret is missing: copy it here from another node, or from where `kvstore cluster "
            "init` or `kvstore up` has made it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: the cluster's secret cannot be used: {error.strerror or error}") from error
