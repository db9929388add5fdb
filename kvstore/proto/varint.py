"""Protobuf's variable-length integers, for the few messages that are encoded by hand because upb is slower."""

from __future__ import annotations


def _encode_slowly(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


SMALL = [_encode_slowly(number) for number in range(1 << 14)]
"""The encodings of the numbers below 16,384."""

_MORE = [bytes((number | 128,)) for number in range(128)]
"""The lower seven bits of a number as a byte that more bytes follow. A table of pairs of such bytes took 2.7 MB of each
node."""

VALUES = {encoded: number for number, encoded in enumerate(SMALL)}


def varint(number: int) -> bytes:
    """Encode an int64 as protobuf does. -1 takes ten bytes."""
    if number < 0:
        number += 1 << 64
    if number < 1 << 14:
        return SMALL[number]
    if number < 1 << 28:
        return _MORE[number & 127] + _MORE[number >> 7 & 127] + SMALL[number >> 14]
    return _encode_slowly(number)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned number at `at` and where it ends. Raises IndexError if `data` ends first, ValueError if the
    number is too long."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    number, shift = byte & 127, 7
    while True:
        at += 1
        byte = data[at]
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("expected a varint of at most ten bytes, got a longer one")


def value_of(encoded: bytes) -> int:
    """Return the number below 2**28 whose shortest encoding this is. Raises KeyError for anything else."""
    if len(encoded) < 3:
        return VALUES[encoded]
    first, second = encoded[0], encoded[1]
    if first < 128 or second < 128:
        raise KeyError(encoded)
    return first & 127 | (second & 127) << 7 | VALUES[encoded[2:]] << 14
