"""Tokens: long random words, each of which is a user until a date. Decides only.

    kvt_<id>_<secret>           id of 12 hexadecimal digits, by which it is listed and revoked; secret of 64

What is kept is the SHA-256 of the whole word. A secret of 256 bits cannot be guessed, so that is as good as a slow hash
is for a password, and a call with a token costs microseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field

ID_BYTES, SECRET_BYTES = 6, 32
TTL_MIN_MS, TTL_MAX_MS = 1_000, 366 * 86_400_000
"""A second, and a year."""
_ID = re.compile(r"[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_FORM = re.compile(rb"kvt_([0-9a-f]{12})_[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Token:
    """One that was given out, as it is kept."""

    id: str
    user: str
    hash: str = field(repr=False)
    expires_ms: int
    """Since 1970; from then on it is nobody's."""

    def __post_init__(self) -> None:
        check_id(self.id)
        if not _HASH.fullmatch(self.hash):
            raise ValueError(f"token {self.id}: want the SHA-256 of a token in 64 hexadecimal digits")

    def is_right(self, word: bytes) -> bool:
        """Whether it is this word."""
        return hmac.compare_digest(hash_of(word), self.hash)


def made(id_: bytes, secret: bytes) -> bytes:
    """Return the token of 6 and 32 random bytes. Raises ValueError."""
    if (len(id_), len(secret)) != (ID_BYTES, SECRET_BYTES):
        raise ValueError(f"want {ID_BYTES} and {SECRET_BYTES} random bytes, got {len(id_)} and {len(secret)}")
    return b"kvt_%b_%b" % (id_.hex().encode(), secret.hex().encode())


def id_or_none(word: bytes) -> str | None:
    """Return the id of what has the form of a token; None: it has another, and may be a password."""
    found = _FORM.fullmatch(word)
    return found[1].decode() if found else None


def hash_of(word: bytes) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(word).hexdigest()


def check_id(text: str) -> None:
    """Raise ValueError unless it is a token's id."""
    if not _ID.fullmatch(text):
        raise ValueError(
            f"want a token's id, 12 hexadecimal digits as `kvstore token list` shows it, got {text[:16]!r}"
        )
