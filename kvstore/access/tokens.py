"""Access tokens: long random words, each of which authenticates a user until it expires. Decides only.

    kvt_<id>_<secret>           an id of 12 hexadecimal digits, for listing and revoking; a secret of 64

The table stores the SHA-256 of the whole word. A secret of 256 bits cannot be guessed, so this is as safe as a slow
hash is for a password, and a call with a token costs microseconds.
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
    """An access token as the metadata store keeps it: with the hash of its secret, without the secret."""

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
        """Return True if this is the token of the word."""
        return hmac.compare_digest(hash_of(word), self.hash)


def made(id_: bytes, secret: bytes) -> bytes:
    """Return the token made of 6 and 32 random bytes. Raises ValueError."""
    if (len(id_), len(secret)) != (ID_BYTES, SECRET_BYTES):
        raise ValueError(f"expected {ID_BYTES} and {SECRET_BYTES} random bytes, got {len(id_)} and {len(secret)}")
    return b"kvt_%b_%b" % (id_.hex().encode(), secret.hex().encode())


def id_or_none(word: bytes) -> str | None:
    """Return the id of a word in the form of a token; None for any other word, which may be a password."""
    found = _FORM.fullmatch(word)
    return found[1].decode() if found else None


def hash_of(word: bytes) -> str:
    """Return the stored hash of a token."""
    return hashlib.sha256(word).hexdigest()


def check_id(text: str) -> None:
    """Raise ValueError unless the text is a token id."""
    if not _ID.fullmatch(text):
        raise ValueError(f"expected a token id of 12 hexadecimal digits, as in `kvstore token list`, got {text[:16]!r}")
