"""Passwords as they are stored: salted scrypt hashes. Decides only. Hashing takes a fraction of a second and 16 MiB, so
callers do it outside the event loop.

    scrypt$n$r$p$salt$hash      a salt of 16 bytes and a hash of 32 bytes, in hexadecimal digits

The cost parameters of a stored hash are bounded, so that no entry in the access table can exhaust the servers that
check a password against it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field

from kvstore.access.tokens import id_or_none

N, R, P = 1 << 14, 8, 5
"""Cost parameters of new hashes: 16 MiB and about a fifth of a second for each hash."""
N_MIN, N_MAX, P_MAX = 1 << 14, 1 << 16, 16
SALT_BYTES, HASH_BYTES = 16, 32
PASSWORD_BYTES_MAX = 1_024
_FORM = re.compile(
    rf"scrypt\$(\d{{1,6}})\$8\$(\d{{1,2}})\$([0-9a-f]{{{2 * SALT_BYTES}}})\$([0-9a-f]{{{2 * HASH_BYTES}}})"
)


@dataclass(frozen=True, slots=True)
class Password:
    """A parsed password hash, which checks passwords."""

    n: int
    p: int
    salt: bytes
    hash: bytes = field(repr=False)

    def is_right(self, password: bytes) -> bool:
        """Return True if `password` matches this hash. Takes as long as hashing; the comparison takes constant time."""
        return hmac.compare_digest(_hash(password, self.salt, self.n, self.p), self.hash)


def encoded(password: bytes, salt: bytes, *, n: int = N, p: int = P) -> str:
    """Return the stored form of a password, hashed with `salt`, 16 random bytes. Takes a fraction of a second. Raises
    ValueError if the password or the salt is invalid."""
    if fault := fault_of_password(password):
        raise ValueError(fault)
    if len(salt) != SALT_BYTES:
        raise ValueError(f"expected a salt of {SALT_BYTES} bytes, got {len(salt)}")
    return f"scrypt${n}${R}${p}${salt.hex()}${_hash(password, salt, n, p).hex()}"


def fault_of_password(password: bytes) -> str:
    """Return the reason why this is not an acceptable password, or an empty string if it is acceptable."""
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        return f"expected a password of 1 to {PASSWORD_BYTES_MAX} bytes, got {len(password)}"
    if id_or_none(password) is not None:
        return "expected a password, got the form of a token"
    return "expected a password without line breaks and NUL" if any(byte in password for byte in b"\r\n\0") else ""


def fault_of_hash(text: str) -> str:
    """Return the reason why this is not a valid password hash, or an empty string if it is valid. The reason does not
    reveal the hash."""
    try:
        parsed(text)
    except ValueError as error:
        return str(error)
    return ""


def parsed(text: str) -> Password:
    """Parse a stored password hash. Raises ValueError if the form is wrong or a cost parameter is out of bounds."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("expected a password hash of the form scrypt$n$8$p$salt$hash")
    n, p = int(match[1]), int(match[2])
    if not (N_MIN <= n <= N_MAX and n & (n - 1) == 0 and 1 <= p <= P_MAX):
        raise ValueError(f"expected n as a power of 2 from {N_MIN} to {N_MAX} and p from 1 to {P_MAX}, got {n} and {p}")
    return Password(n, p, bytes.fromhex(match[3]), bytes.fromhex(match[4]))


def _hash(password: bytes, salt: bytes, n: int, p: int) -> bytes:
    return hashlib.scrypt(password, salt=salt, n=n, r=R, p=p, maxmem=192 * n * R, dklen=HASH_BYTES)
