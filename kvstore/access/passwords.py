"""Passwords as they are kept: salted scrypt. Decides only; to hash takes a fraction of a second and 16 MiB, so it is
called beside the event loop.

    scrypt$n$r$p$salt$hash      salt of 16 bytes and hash of 32, in hexadecimal digits

What one hash may cost is bounded when it is read: a table must not be a way to exhaust the servers that read it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field

from kvstore.access.tokens import id_or_none

N, R, P = 1 << 14, 8, 5
"""Cost: 16 MiB, and a fifth of a second or so."""
N_MIN, N_MAX, P_MAX = 1 << 14, 1 << 16, 16
SALT_BYTES, HASH_BYTES = 16, 32
PASSWORD_BYTES_MAX = 1_024
_FORM = re.compile(
    rf"scrypt\$(\d{{1,6}})\$8\$(\d{{1,2}})\$([0-9a-f]{{{2 * SALT_BYTES}}})\$([0-9a-f]{{{2 * HASH_BYTES}}})"
)


@dataclass(frozen=True, slots=True)
class Password:
    """A hash that was read."""

    n: int
    p: int
    salt: bytes
    hash: bytes = field(repr=False)

    def is_right(self, password: bytes) -> bool:
        """Whether it is the hash of `password`. Slow, and the comparison takes the same time whatever differs."""
        return hmac.compare_digest(_hash(password, self.salt, self.n, self.p), self.hash)


def encoded(password: bytes, salt: bytes, *, n: int = N, p: int = P) -> str:
    """Hash a password, with a salt of 16 bytes that was never used before. Slow. Raises ValueError."""
    if fault := fault_of_password(password):
        raise ValueError(fault)
    if len(salt) != SALT_BYTES:
        raise ValueError(f"want a salt of {SALT_BYTES} bytes, got {len(salt)}")
    return f"scrypt${n}${R}${p}${salt.hex()}${_hash(password, salt, n, p).hex()}"


def fault_of_password(password: bytes) -> str:
    """Why this cannot be a password; empty if it can."""
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        return f"want a password of 1 to {PASSWORD_BYTES_MAX} bytes, got {len(password)}"
    if id_or_none(password) is not None:
        return "want a password, got what has the form of a token"
    return "want a password on one line" if any(byte in password for byte in b"\r\n\0") else ""


def fault_of_hash(text: str) -> str:
    """Why this is no hash that may be kept; empty if it is one. Shows nothing of it."""
    try:
        parsed(text)
    except ValueError as error:
        return str(error)
    return ""


def parsed(text: str) -> Password:
    """Read a hash. Raises ValueError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("want a password's hash of the form scrypt$n$8$p$salt$hash")
    n, p = int(match[1]), int(match[2])
    if not (N_MIN <= n <= N_MAX and n & (n - 1) == 0 and 1 <= p <= P_MAX):
        raise ValueError(f"want n a power of 2 from {N_MIN} to {N_MAX} and p from 1 to {P_MAX}, got {n} and {p}")
    return Password(n, p, bytes.fromhex(match[3]), bytes.fromhex(match[4]))


def _hash(password: bytes, salt: bytes, n: int, p: int) -> bytes:
    return hashlib.scrypt(password, salt=salt, n=n, r=R, p=p, maxmem=192 * n * R, dklen=HASH_BYTES)
