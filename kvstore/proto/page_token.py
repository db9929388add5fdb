"""Page tokens: where the traversal of a range of keys continues. Decides only.

    text    base64url without padding of:
    u8      version, 1
    u8      flags: 1 downwards, from the last key to the first
    varint  length, then that many bytes: the first key of what is left
    varint  length, then that many bytes: the key before which it ends; empty: no end
    u32 be  CRC-32 (zlib's) of everything before

A token names keys, and no partition, leader or server. So it is valid on every server, after every change of the ring,
and in another process (docs/protocol.md P37). It is not secret and grants nothing: its user needs the right to read the
range. DO NOT CHANGE: applications keep tokens.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from struct import Struct
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.limits import KEY_BYTES_MAX
from kvstore.proto.varint import read_varint, varint

VERSION = 1
REVERSE = 1
TOKEN_CHARS_MAX = 11_000
"""Enough for two keys of the maximum length."""
_crc = Struct(">I")


class PageToken(NamedTuple):
    """The remaining part of a range, and the direction of the traversal."""

    start: bytes
    end: bytes
    """Empty: no end."""
    reverse: bool = False

    def behind(self, key: bytes) -> PageToken:
        """Return what remains behind a key of the range."""
        return PageToken(self.start, key, True) if self.reverse else PageToken(key + b"\0", self.end)

    def encode(self) -> str:
        """Return the token as text that is safe in URLs, in JSON and in shells."""
        head = bytes((VERSION, REVERSE * self.reverse))
        data = head + varint(len(self.start)) + self.start + varint(len(self.end)) + self.end
        return urlsafe_b64encode(data + _crc.pack(binascii.crc32(data))).rstrip(b"=").decode()


def decode(text: str) -> PageToken:
    """Decode a token. Raises InvalidRequest for anything that `encode` has not made, naming the number of an unknown
    version."""
    data = _bytes_of(text)
    if len(data) < 8 or binascii.crc32(data[:-4]) != _crc.unpack(data[-4:])[0]:
        raise _malformed(text, "its checksum is wrong")
    version, flags, *_ = data
    if version != VERSION:
        raise InvalidRequest(f"expected a page token of version {VERSION}, got version {version}")
    if flags & ~REVERSE:
        raise _malformed(text, f"unknown flags {flags:#x}")
    try:
        start, at = _key(data, 2)
        end, at = _key(data, at)
    except (IndexError, ValueError) as error:
        raise _malformed(text, str(error)) from None
    if at != len(data) - 4:
        raise _malformed(text, f"{len(data) - 4 - at} bytes follow its end")
    return PageToken(start, end, bool(flags & REVERSE))


def _bytes_of(text: str) -> bytes:
    if not isinstance(text, str) or not text or len(text) > TOKEN_CHARS_MAX:
        raise _malformed(text, f"its text does not have 1 to {TOKEN_CHARS_MAX} characters")
    try:
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (binascii.Error, UnicodeEncodeError):
        raise _malformed(text, "it is not base64url") from None
    if urlsafe_b64encode(data).rstrip(b"=").decode() != text:
        raise _malformed(text, "it is not base64url")
    return data


def _key(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_varint(data, at)
    if size > KEY_BYTES_MAX + 1:
        raise ValueError(f"a bound of {size} bytes")
    if at + size > len(data) - 4:
        raise ValueError("it ends too early")
    return data[at : at + size], at + size


def _malformed(text: object, why: str) -> InvalidRequest:
    shown = repr(text)
    return InvalidRequest(f"expected a page token of an earlier page, got {shown[:40]}{'…' * (len(shown) > 40)}: {why}")
