"""Access tokens: long random strings, each of which authenticates a user until the token expires. Decides only.

    kvt_<id>_<secret>           an id of 12 hexadecimal digits, for listing and revoking; a secret of 64

The table stores the SHA-256 hash of the whole token. A fast hash is safe here because a secret of 256 bits cannot be
guessed, and it keeps the cost of a call with a token at microseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field

ID_BYTES, SECRET_BYTES = 6, 32
TTL_MIN_MS, TTL_MAX_MS = 1_000, 366 * 86_400_000
"""One second and one year."""
_ID = re.compile(r"[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_FORM = re.compile(rb"kvt_([0-9a-f]{12})_[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Token:
    """An access token as the metadata store keeps it: a hash of the token, without its secret."""

    id: str
    user: str
    hash: str = field(repr=False)
    expires_ms: int
    """Expiry in ms since 1970."""

    def __post_init__(self) -> None:
        check_id(self.id)
        if not _HASH.fullmatch(self.hash):
            raise ValueError(f"token {self.id}: expected the SHA-256 of a token in 64 hexadecimal digits")

    def is_right(self, word: bytes) -> bool:
        """Return True if `word` is this token. The comparison takes constant time."""
        return hmac.compare_digest(hash_of(word), self.hash)


def made(id_: bytes, secret: bytes) -> bytes:
    """Return the token with an id of 6 random bytes and a secret of 32 random bytes. Raises ValueError for other
    lengths."""
    if (len(id_), len(secret)) != (ID_BYTES, SECRET_BYTES):
        raise ValueError(f"expected {ID_BYTES} and {SECRET_BYTES} random bytes, got {len(id_)} and {len(secret)}")
    return b"kvt_%b_%b" % (id_.hex().encode(), secret.hex().encode())


def id_or_none(word: bytes) -> str | None:
    """Return the token's id if `word` has the form of a token. Returns None otherwise, because the word may be a
    password."""
    found = _FORM.fullmatch(word)
    return found[1].decode() if found else None


def hash_of(word: bytes) -> str:
    """Return the hash under which the table stores a token."""
    return hashlib.sha256(word).hexdigest()


def check_id(text: str) -> None:
    """Raise ValueError unless the text has the form of a token id."""
    if not _ID.fullmatch(text):
        raise ValueError(f"expected a token id of 12 hexadecimal digits, as in `kvstore token list`, got {text[:16]!r}")
