"""Signatures of manifests: an HMAC with a key that only the accounts that take and use snapshots have.

Without a key, an account that can write to the directory of snapshots can change the data and the manifest together.
With a key, every manifest must have a signature by the key. The manifest has the checksum of each of its files, so the
signature also protects the files.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from kvstore.env.files.private import open_private
from kvstore.errors import ConfigError

KEY, KEY_FILE = "KVSTORE_SNAPSHOT_KEY", "KVSTORE_SNAPSHOT_KEY_FILE"
KEY_BYTES_MIN, KEYS_MAX, FILE_BYTES_MAX = 32, 4, 4096

Keys = tuple[bytes, ...]
"""The key that signs manifests, followed by other keys whose signatures are accepted. If empty, nothing is signed or
checked."""


def keys_of_environment(environ: Mapping[str, str] | None = None) -> Keys:
    """Return the keys from the file that KVSTORE_SNAPSHOT_KEY_FILE names, one per line, or from KVSTORE_SNAPSHOT_KEY.
    Raises ConfigError if both are set, or if the file cannot be read or other accounts can access it."""
    environ = os.environ if environ is None else environ
    file, text = environ.get(KEY_FILE, ""), environ.get(KEY, "")
    if file and text:
        raise ConfigError(f"expected {KEY_FILE} or {KEY}, got both")
    if file:
        return _checked(_content_of(Path(file)), file)
    return _checked(text.encode(), KEY) if text else ()


def signature(body: bytes, key: bytes) -> bytes:
    """Return the signature of `body` by `key`, as hexadecimal digits."""
    return hmac.new(key, b"kvstore/snapshot manifest\n" + body, hashlib.sha256).hexdigest().encode()


def is_signed(body: bytes, found: bytes, keys: Keys) -> bool:
    """Return True if `found` is the signature of `body` by one of the keys."""
    return any(hmac.compare_digest(signature(body, key), found) for key in keys)


def _content_of(path: Path) -> bytes:
    try:
        with open_private(path) as file:
            return file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: the key of snapshots cannot be read: {error.strerror or error}") from None


def _checked(data: bytes, what: str) -> Keys:
    keys = tuple(data.split())
    if len(data) > FILE_BYTES_MAX or not 1 <= len(keys) <= KEYS_MAX or min(map(len, keys)) < KEY_BYTES_MIN:
        raise ConfigError(
            f"{what}: expected 1 to {KEYS_MAX} lines of at least {KEY_BYTES_MIN} characters, got {len(keys)} of other "
            "lengths; make a key with `openssl rand -hex 32`"
        )
    return keys
