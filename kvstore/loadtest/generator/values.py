"""Values that describe themselves, so that each read can be checked.

    value := "lt1" | crc32c u32 | writer u64 | number u64 | key length u16 | key | filler

    writer := run u48 | worker u16

Numbers are big-endian. The checksum covers everything after it. `run` is drawn at random for each run, and for each
preload. `writer` identifies a process of the run, and `number` rises with each write of that process. Writer 0 is
reserved: there the number is a generation, which each compare-and-set of a key raises by one.
"""

from __future__ import annotations

from random import Random, SystemRandom
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

MAGIC = b"lt1"
_HEAD = Struct(">3sI")
_BODY = Struct(">QQH")
BYTES_MIN = _HEAD.size + _BODY.size
RUN_BITS, WORKER_BITS = 48, 16
NOBODY = 0
_FILLER = Random(20260920).randbytes(1 << 16)


class WrongValue(Exception):
    """A read returned a value that no correct store returns."""


class Stamp(NamedTuple):
    """The writer of a value, and the number of the write."""

    writer: int
    number: int


def new_run() -> int:
    """Return a new random run id, because values of earlier runs still exist."""
    return SystemRandom().randrange(1, 1 << RUN_BITS)


def writer_of(run: int, worker: int) -> int:
    """Return the writer number of a process of a run."""
    assert 0 < run < 1 << RUN_BITS, run
    assert 0 <= worker < 1 << WORKER_BITS, worker
    return run << WORKER_BITS | worker


def run_of(writer: int) -> int:
    return writer >> WORKER_BITS


def encode(key: bytes, stamp: Stamp, size: int) -> bytes:
    """Return a value of `size` bytes, or the smallest possible if that is larger."""
    missing = size - BYTES_MIN - len(key)
    filler = _FILLER[:missing] if missing <= len(_FILLER) else (_FILLER * (missing // len(_FILLER) + 1))[:missing]
    body = _BODY.pack(stamp.writer, stamp.number, len(key)) + key + (filler if missing > 0 else b"")
    return _HEAD.pack(MAGIC, crc32c(body)) + body


def decode(key: bytes, value: bytes) -> Stamp:
    """Return the stamp of this value of `key`. Raises WrongValue if the value is damaged or belongs to another key."""
    if len(value) < BYTES_MIN or not value.startswith(MAGIC):
        raise WrongValue(f"{key!r} holds {value[:40]!r} ({len(value)} bytes), which no load test wrote")
    _, checksum = _HEAD.unpack_from(value)
    body = memoryview(value)[_HEAD.size :]
    if crc32c(body) != checksum:
        raise WrongValue(f"{key!r} holds {len(value)} bytes whose checksum is {crc32c(body):#x}, not {checksum:#x}")
    writer, number, length = _BODY.unpack_from(body)
    named = bytes(body[_BODY.size : _BODY.size + length])
    if named != key:
        raise WrongValue(f"{key!r} holds the value of {named!r}")
    return Stamp(writer, number)
