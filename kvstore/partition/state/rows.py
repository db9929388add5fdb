"""The rows of a partition's state in its engine: keys under one-byte prefixes, and values. Decides only.

    m                               meta: the state's place in the log           (StateMeta)
    d | token u32 big endian | key  a record: header, value                      (encode_record, record_of)
    o | key                         the key in key order; empty value
    x | expires_ms u64 be | key     the key by its expiry; empty value
    r | first_seq u64 be            request ids and results of one entry         (retry_table.py)
    t                               the tokens that the partition owns           (ownership.py)
    c                               checksums at the last checked sequences      (checksum.py)
    f                               the replicas that this state was copied from, until it is confirmed
    v                               the cluster version that writes the log; absent: the first version
    h                               a difference that another replica reported   (trials.py)
    p                               the highest number of a pin in the log; absent: 0
    g                               the latest time of a forgotten client; absent: nobody was forgotten (retry_table.py)
    i | token u32 be | key | seq u64 be    an intent on the key                  (intents.py)
    j | token u32 be | key | seq u64 be    a decision whose home key this is     (decisions.py)

A range of tokens is contiguous, and `o` and `x` change only when a key is created, deleted, or gets another expiry.
docs/reference/formats.md (State store) describes every byte.
"""

from __future__ import annotations

from itertools import repeat
from operator import add
from struct import Struct
from typing import NamedTuple

from kvstore import versions
from kvstore.errors import WrittenByNewer
from kvstore.partition.state.commands import Record
from kvstore.ring.hashing import KeyHash
from kvstore.types import EntryId, LedgerId, Position, Seq, ServerId

META_KEY = b"m"
ORDER = b"o"
ALL_DATA = (b"d", b"e")
ALL_ORDER = (b"o", b"p")
ALL_EXPIRY = (b"x", b"y")
ALL_RETRY = (b"r", b"s")
OWNERSHIP_KEY = b"t"
CHECKS_KEY = b"c"
ORIGINS_KEY = b"f"
REPORTED_KEY = b"h"
VERSION_KEY = b"v"
MARK_KEY = b"p"
FORGOTTEN_KEY = b"g"
ALL_INTENTS = (b"i", b"j")
ALL_DECISIONS = (b"j", b"k")
EVERYTHING = (b"", b"\xff")

FORMAT = 1


def encode_origins(servers: frozenset[ServerId]) -> bytes:
    """Encode the row of the replicas that a state was copied from."""
    return bytes((FORMAT,)) + b"\0".join(server.encode() for server in sorted(servers))


def origins_of(row: bytes | None) -> frozenset[ServerId]:
    """Decode the row. An empty set means that the state is no copy. Raises WrittenByNewer for an unknown format."""
    if row is None:
        return frozenset()
    if row[0] != FORMAT:
        raise WrittenByNewer(f"expected a copy's origins in format {FORMAT}, got format {row[0]}")
    return frozenset(ServerId(each.decode()) for each in row[1:].split(b"\0"))


class ReportedDifference(NamedTuple):
    """A difference that another replica reported: the sequence of the first difference, and whether this replica is
    barred because of it."""

    since: Seq
    is_barred: bool


NOTHING_REPORTED = ReportedDifference(Seq(0), False)
_reported = Struct(">BQB")


def encode_reported(reported: ReportedDifference) -> bytes:
    """Encode the row of a reported difference."""
    return _reported.pack(FORMAT, *reported)


def reported_of(row: bytes | None) -> ReportedDifference:
    """Decode the row of a reported difference; a missing row means that nothing was reported. Raises WrittenByNewer for
    an unknown format."""
    if row is None:
        return NOTHING_REPORTED
    if row[0] != FORMAT:
        raise WrittenByNewer(f"expected a reported difference in format {FORMAT}, got format {row[0]}")
    _, since, is_barred = _reported.unpack(row)
    return ReportedDifference(Seq(since), bool(is_barred))


_version = Struct(">BI")


def encode_version(version: int) -> bytes:
    """Encode the row of a log's version."""
    return _version.pack(FORMAT, version)


def version_of(row: bytes | None) -> int:
    """Decode the row of a log's version; the first version if there is no row. Raises WrittenByNewer for an unknown
    format."""
    if row is None:
        return versions.FIRST
    if row[0] != FORMAT:
        raise WrittenByNewer(f"expected the log's version in format {FORMAT}, got format {row[0]}")
    return int(_version.unpack(row)[1])


_mark = Struct(">BQ")


def encode_mark(number: int) -> bytes:
    """Encode the row of the highest number of a pin."""
    return _mark.pack(FORMAT, number)


def mark_of(row: bytes | None) -> int:
    """Decode the row of the highest number of a pin; 0 if there is no row. Raises WrittenByNewer for an unknown
    format."""
    if row is None:
        return 0
    if row[0] != FORMAT:
        raise WrittenByNewer(f"expected the number of a pin in format {FORMAT}, got format {row[0]}")
    return int(_mark.unpack(row)[1])


_forgotten = Struct(">BQ")


def encode_forgotten(time_ms: int) -> bytes:
    """Encode the row of the latest time of a forgotten client."""
    return _forgotten.pack(FORMAT, time_ms)


def forgotten_of(row: bytes | None) -> int:
    """Decode the row of the latest time of a forgotten client; 0 if there is no row. Raises WrittenByNewer for an
    unknown format."""
    if row is None:
        return 0
    if row[0] != FORMAT:
        raise WrittenByNewer(f"expected the time of a forgotten client in format {FORMAT}, got format {row[0]}")
    return int(_forgotten.unpack(row)[1])


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────

AGED = 1
"""Header flag: the key was created by an earlier mutation than the one that wrote it. The creating sequence follows the
write time."""
EXPIRES = 2
"""Header flag: the header ends with an expiry."""

pack_data_key = Struct(">cI").pack
"""Pack b"d" and the token: the prefix of a key's row key."""
_pack_expiry_key = Struct(">cQ").pack
_pack_retry_key = _pack_expiry_key

pack_fresh = Struct(">BQQ").pack
"""Pack 0, version, written_ms."""
pack_aged = Struct(">BQQQ").pack
"""Pack AGED, version, written_ms, created."""
_pack_full = Struct(">BQQQQ").pack
_header = (Struct(">BQQ"), Struct(">BQQQ"), Struct(">BQQQ"), Struct(">BQQQQ"))
"""The header's layout by flags."""


def data_key(hash: KeyHash, key: bytes) -> bytes:
    """Return the row key of the key's record."""
    return pack_data_key(b"d", hash.token_of(key)) + key


def data_keys_of(hash: KeyHash, keys: list[bytes]) -> list[bytes]:
    """Return the row keys of many records."""
    return data_keys_at(hash.tokens_of(keys), keys)


def data_keys_at(tokens: list[int], keys: list[bytes]) -> list[bytes]:
    """Return the row keys of records whose tokens the caller already knows."""
    return list(map(add, map(pack_data_key, repeat(b"d"), tokens), keys))


def token_bound(token: int) -> bytes:
    """Return the lowest possible row key of a token. The bound of token 2**32 is the end of all records."""
    return pack_data_key(b"d", token) if token < 1 << 32 else ALL_DATA[1]


def key_of_data(row_key: bytes) -> bytes:
    """Return the key of a record, from its row key."""
    return row_key[5:]


def token_of_data(row_key: bytes) -> int:
    """Return the token of a record, from its row key."""
    return int.from_bytes(row_key[1:5], "big")


def transaction_key(rows: tuple[bytes, bytes], data_key: bytes, seq: int) -> bytes:
    """Return the row key of an intent or a decision. `rows` is ALL_INTENTS or ALL_DECISIONS, `data_key` the row key of
    the record of its key, and `seq` its sequence."""
    return rows[0] + data_key[1:] + seq.to_bytes(8, "big")


def name_of_row(row_key: bytes) -> tuple[bytes, int]:
    """Return the key and the sequence of an intent or a decision, from its row key."""
    return row_key[5:-8], int.from_bytes(row_key[-8:], "big")


def expiry_key(expires_ms: int, key: bytes) -> bytes:
    """Return the row key of the key's entry in the expiry index."""
    return _pack_expiry_key(b"x", expires_ms) + key


def retry_key(first_seq: int) -> bytes:
    """Return the row key of the request ids of the entry that begins with `first_seq`."""
    return _pack_retry_key(b"r", first_seq)


def encode_record(value: bytes, version: int, created: int, written_ms: int, expires_ms: int) -> bytes:
    """Encode the row of a record."""
    if expires_ms:
        if created == version:
            return pack_aged(EXPIRES, version, written_ms, expires_ms) + value
        return _pack_full(AGED | EXPIRES, version, written_ms, created, expires_ms) + value
    if created == version:
        return pack_fresh(0, version, written_ms) + value
    return pack_aged(AGED, version, written_ms, created) + value


def record_of(row: bytes) -> Record:
    """Decode the row of a record."""
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
    """Return the version that created the key, from the row of a record without an expiry."""
    return int.from_bytes(row[17:25] if row[0] == AGED else row[1:9], "big")


VALUE_AT = (_header[0].size, _header[AGED].size)
"""Offset of the value in the row of a record without an expiry, by flags."""


def expiry_of(row: bytes) -> int:
    """Return the expiry in ms of the record in a row; 0 means never."""
    flags = row[0]
    if not flags & EXPIRES:
        return 0
    return int.from_bytes(row[25:33] if flags & AGED else row[17:25], "big")


# ── the position of the state ─────────────────────────────────────────────────────────────────────────────────────────

_meta = Struct(">BqqQQQQIB")


class StateMeta(NamedTuple):
    """The position of the state in the log. It is written together with the effects of each entry."""

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
    """Encode the row of a StateMeta."""
    return _meta.pack(FORMAT, *position, seq, epoch, record_time_ms, key_count, crc, released)


def meta_of(row: bytes) -> StateMeta:
    """Decode the row. Raises WrittenByNewer for an unknown format."""
    if row[0] != FORMAT:
        raise WrittenByNewer(f"expected the engine's rows in format {FORMAT}, got format {row[0]}")
    _, ledger, entry, seq, epoch, record_time_ms, key_count, crc, released = _meta.unpack(row)
    return StateMeta(
        Position(LedgerId(ledger), EntryId(entry)), Seq(seq), epoch, record_time_ms, key_count, crc, bool(released)
    )
