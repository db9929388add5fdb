"""The rows of a partition's state in its engine: keys under one-byte prefixes, and values. Decides only.

    m                               meta: where the state stands                (Meta)
    d | token u32 big endian | key  a record: header, value                     (encode_record, record_of)
    o | key                         the key in key order; empty value
    x | expires_ms u64 be | key     the key by its expiry; empty value
    r | first_seq u64 be            request ids and results that one entry brought   (retry_table.py)
    t                               which tokens the partition owns     (ownership.py)
    c                               checksums at the last checked sequences   (checksum.py)
    f                               whose state this is a copy of, until it is borne out
    v                               by which cluster version the log is written; absent: by the first
    h                               a difference of another replica's that this one has heard of (trials.py)

A range of tokens is contiguous, and `o` and `x` change only when a key is created, deleted, or given another expiry.
docs/reference/formats.md (State store) has every byte.
"""

from __future__ import annotations

from itertools import repeat
from operator import add
from struct import Struct
from typing import NamedTuple

from kvstore import versions
from kvstore.errors import WrittenByNewer
from kvstore.partition.state.commands import Record
from kvstore.ring.hashing import token_of, tokens_of
from kvstore.types import EntryId, LedgerId, Position, Seq, ServerId

META_KEY = b"m"
ORDER = b"o"
ALL_DATA = (b"d", b"e")
ALL_ORDER = (b"o", b"p")
ALL_EXPIRY = (b"x", b"y")
ALL_RETRY = (b"r", b"s")
TERRITORY_KEY = b"t"
CHECKS_KEY = b"c"
ORIGINS_KEY = b"f"
HEARD_KEY = b"h"
VERSION_KEY = b"v"
EVERYTHING = (b"", b"\xff")

FORMAT = 1


def encode_origins(servers: frozenset[ServerId]) -> bytes:
    """The row of whose copy a state is."""
    return bytes((FORMAT,)) + b"\0".join(server.encode() for server in sorted(servers))


def origins_of(row: bytes | None) -> frozenset[ServerId]:
    """Empty: it is no copy. Raises WrittenByNewer for a format that this program does not know."""
    if row is None:
        return frozenset()
    if row[0] != FORMAT:
        raise WrittenByNewer(f"the row of a copy's origins has format {row[0]}, this program reads format {FORMAT}")
    return frozenset(ServerId(each.decode()) for each in row[1:].split(b"\0"))


class Heard(NamedTuple):
    """Where another replica was heard to differ first, and whether this one is barred for it."""

    since: Seq
    is_barred: bool


NOTHING_HEARD = Heard(Seq(0), False)
_heard = Struct(">BQB")


def encode_heard(heard: Heard) -> bytes:
    """The row of it."""
    return _heard.pack(FORMAT, *heard)


def heard_of(row: bytes | None) -> Heard:
    """Raises WrittenByNewer for a format that this program does not know."""
    if row is None:
        return NOTHING_HEARD
    if row[0] != FORMAT:
        raise WrittenByNewer(f"the row of what was heard has format {row[0]}, this program reads format {FORMAT}")
    _, since, is_barred = _heard.unpack(row)
    return Heard(Seq(since), bool(is_barred))


_version = Struct(">BI")


def encode_version(version: int) -> bytes:
    """The row of a log's version."""
    return _version.pack(FORMAT, version)


def version_of(row: bytes | None) -> int:
    """Raises WrittenByNewer for a format that this program does not know."""
    if row is None:
        return versions.FIRST
    if row[0] != FORMAT:
        raise WrittenByNewer(f"the row of the log's version has format {row[0]}, this program reads format {FORMAT}")
    return int(_version.unpack(row)[1])


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────

AGED = 1
"""Header flag: the key was created by an earlier mutation than the one that wrote it, named after the write time."""
EXPIRES = 2
"""Header flag: an expiry ends the header."""

pack_data_key = Struct(">cI").pack
"""b"d", token: what stands before the key in its data key."""
_pack_expiry_key = Struct(">cQ").pack
_pack_retry_key = _pack_expiry_key

pack_fresh = Struct(">BQQ").pack
"""0, version, written_ms."""
pack_aged = Struct(">BQQQ").pack
"""AGED, version, written_ms, created."""
_pack_full = Struct(">BQQQQ").pack
_header = (Struct(">BQQ"), Struct(">BQQQ"), Struct(">BQQQ"), Struct(">BQQQQ"))
"""By flags."""


def data_key(key: bytes) -> bytes:
    """Where the key's record stands."""
    return pack_data_key(b"d", token_of(key)) + key


def data_keys_of(keys: list[bytes]) -> list[bytes]:
    """Where the records of many keys stand."""
    return data_keys_at(tokens_of(keys), keys)


def data_keys_at(tokens: list[int], keys: list[bytes]) -> list[bytes]:
    """The same of keys whose tokens are known."""
    return list(map(add, map(pack_data_key, repeat(b"d"), tokens), keys))


def token_bound(token: int) -> bytes:
    """The least data key of `token`; token 2**32: the end of all data."""
    return pack_data_key(b"d", token) if token < 1 << 32 else ALL_DATA[1]


def key_of_data(row_key: bytes) -> bytes:
    return row_key[5:]


def token_of_data(row_key: bytes) -> int:
    return int.from_bytes(row_key[1:5], "big")


def expiry_key(expires_ms: int, key: bytes) -> bytes:
    """Where the key stands among those with an expiry."""
    return _pack_expiry_key(b"x", expires_ms) + key


def retry_key(first_seq: int) -> bytes:
    """Where the request ids of the entry that begins with `first_seq` stand."""
    return _pack_retry_key(b"r", first_seq)


def encode_record(value: bytes, version: int, created: int, written_ms: int, expires_ms: int) -> bytes:
    """The row of a record."""
    if expires_ms:
        if created == version:
            return pack_aged(EXPIRES, version, written_ms, expires_ms) + value
        return _pack_full(AGED | EXPIRES, version, written_ms, created, expires_ms) + value
    if created == version:
        return pack_fresh(0, version, written_ms) + value
    return pack_aged(AGED, version, written_ms, created) + value


def record_of(row: bytes) -> Record:
    """The record in a row."""
    flags = row[0]
    header = _header[flags]
    if flags == 0:
        _, version, written_ms = header.unpack_from(row)
        return Record(row[17:], version, version, written_ms, 0)
    if flags == AGED:
        _, version, written_ms, created = header.unpack_from(row)
        return Record(row[25:], version, created, written_ms, 0)
    if flags == EXPIRES:
        _, version, written_ms, expires_ms = header.unpack_from(row)
        return Record(row[25:], version, version, written_ms, expires_ms)
    _, version, written_ms, created, expires_ms = header.unpack_from(row)
    return Record(row[33:], version, created, written_ms, expires_ms)


def created_of(row: bytes) -> int:
    """The version that created the key, in the row of a record without an expiry."""
    return int.from_bytes(row[17:25] if row[0] == AGED else row[1:9], "big")


VALUE_AT = (_header[0].size, _header[AGED].size)
"""By flags: where the value begins in the row of a record without an expiry."""


def expiry_of(row: bytes) -> int:
    """When the record in a row expires; 0: never."""
    flags = row[0]
    if not flags & EXPIRES:
        return 0
    return int.from_bytes(row[25:33] if flags & AGED else row[17:25], "big")


# ── where the state stands ────────────────────────────────────────────────────────────────────────────────────────────

_meta = Struct(">BqqQQQQIB")


class Meta(NamedTuple):
    """The state's place in the log, written with the effects of each entry."""

    position: Position
    seq: Seq
    epoch: int
    record_time_ms: int
    key_count: int
    crc: int
    released: bool


def encode_meta(
    position: Position, seq: int, epoch: int, record_time_ms: int, key_count: int, crc: int, released: bool
) -> bytes:
    """The row of what a Meta has."""
    return _meta.pack(FORMAT, *position, seq, epoch, record_time_ms, key_count, crc, released)


def meta_of(row: bytes) -> Meta:
    """Raises WrittenByNewer for a format that this program does not know."""
    if row[0] != FORMAT:
        raise WrittenByNewer(f"the engine's rows have format {row[0]}, this program reads format {FORMAT}")
    _, ledger, entry, seq, epoch, record_time_ms, key_count, crc, released = _meta.unpack(row)
    return Meta(
        Position(LedgerId(ledger), EntryId(entry)), Seq(seq), epoch, record_time_ms, key_count, crc, bool(released)
    )
