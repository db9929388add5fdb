"""The bytes of a journal segment: file header, group headers, records. Pure. Grammar: docs/reference/formats.md.

    segment := file header | group*                     then zeroes, or the remains of a group that a crash has torn
    group   := group header | record*
    record  := kind u8 | flags u8 | 0 u16 | size u32 | ledger i64 | entry i64 | head crc u32 | body crc u32 | body

Checksums are CRC32C. A head's starts from the file's salt and its own offset, so that neither stale bytes nor bytes
in the wrong place pass; a body's starts from its head's. With a good head the record's length is known even if the
body is damaged, so damage to a body hides nothing that follows it.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct as Layout
from typing import NamedTuple

from crc32c import crc32c
from msgspec import Struct

FORMAT = 1
MAGIC = b"kvs-jrnl"

_FILE = Layout(">8sIIQ36x")
_FILE_CRC = Layout(">I")
FILE_HEADER_SIZE = _FILE.size + _FILE_CRC.size

_GROUP = Layout(">QIIQQI4x")
_GROUP_CRC = Layout(">I")
GROUP_HEADER_SIZE = _GROUP.size + _GROUP_CRC.size

RECORD = Layout(">BBxxIqq")
"""kind, flags, size of the body, ledger, entry."""
CRCS = Layout(">II")
RECORD_HEADER_SIZE = RECORD.size + CRCS.size

BODY_MAX = 16 << 20
"""No record is longer; a larger size in a head is damage."""

RECOVERY = 1
"""Flag of an ADD that came from a recovery."""
ADMITTED = 1
"""Flag of a KEY: the metadata store has confirmed that the ledger's writer may write here."""
CLEARED = 1
"""Flag of a LIMBO: the ledger's records are complete again."""


class RecordKind(IntEnum):
    ADD = 1
    """An entry packet."""
    KEY = 2
    """First contact with a ledger; the body is its master key."""
    FENCE = 3
    """No ordinary add to the ledger any more; the body is its master key."""
    LAC = 4
    """An explicit last-add-confirmed packet; `entry` is the LAC."""
    TOMBSTONE = 5
    """A fenced ledger was deleted: its fence outlives it."""
    LIMBO = 6
    """Records of the ledger (-1: of any ledger) may be missing."""
    DROPPED = 7
    """A ledger was deleted that had no fence: nothing is left of it."""
    FILES = 8
    """The segments that there are, u32 each; first record of a segment."""
    REMOVED = 9
    """Segment `entry` is not needed any more and may be gone."""
    NEXT = 10
    """The journal goes on in segment `entry`; last record of a segment."""


class FileHeader(NamedTuple):
    file: int
    """Rises by one with each segment; the first is 1."""
    salt: int


class GroupHeader(Struct, frozen=True):
    file: int
    size: int
    """Bytes of records that follow."""
    number: int
    """Rises by one with each group, over segments and restarts."""
    synced_file: int
    synced_to: int
    """When this group was written, everything before offset `synced_to` of segment `synced_file` was on the disk."""


def encode_file_header(header: FileHeader) -> bytes:
    data = _FILE.pack(MAGIC, FORMAT, header.file, header.salt)
    return data + _FILE_CRC.pack(crc32c(data))


def decode_file_header(data: bytes) -> FileHeader | None:
    """None for anything but a file header. Raises ValueError for a format that this build does not know."""
    if len(data) < FILE_HEADER_SIZE or data[: len(MAGIC)] != MAGIC:
        return None
    if _FILE_CRC.unpack_from(data, _FILE.size)[0] != crc32c(data[: _FILE.size]):
        return None
    _, version, file, salt = _FILE.unpack_from(data)
    if version != FORMAT:
        raise ValueError(f"journal format {version}; this build reads {FORMAT}")
    return FileHeader(file, salt)


def seed_of(salt: int) -> int:
    """The number that a segment's head checksums start from, before the offset is mixed in."""
    return (salt ^ salt >> 32) & 0xFFFFFFFF


def group_marker(salt: int) -> bytes:
    """The first bytes of every group header in a file: the salt, which nothing else contains but by accident."""
    return salt.to_bytes(8, "big")


def encode_group_header(header: GroupHeader, salt: int, offset: int) -> bytes:
    data = _GROUP.pack(salt, header.file, header.size, header.number, header.synced_to, header.synced_file)
    return data + _GROUP_CRC.pack(crc32c(data, seed_of(salt) ^ offset & 0xFFFFFFFF))


def decode_group_header(data: bytes, at: int, salt: int, offset: int) -> GroupHeader | None:
    """The group header at `at` in `data`, which stands at `offset` of the file; None if there is none."""
    if len(data) - at < GROUP_HEADER_SIZE:
        return None
    head = data[at : at + _GROUP.size]
    (crc,) = _GROUP_CRC.unpack_from(data, at + _GROUP.size)
    if crc != crc32c(head, seed_of(salt) ^ offset & 0xFFFFFFFF):
        return None
    found, file, size, number, synced_to, synced_file = _GROUP.unpack(head)
    return GroupHeader(file, size, number, synced_file, synced_to) if found == salt else None


def encode_record_head(kind: int, flags: int, ledger: int, entry: int, body: bytes, *, seed: int, offset: int) -> bytes:
    """Encode the head that stands before `body` in a record at `offset`."""
    head = RECORD.pack(kind, flags, len(body), ledger, entry)
    crc = crc32c(head, seed ^ offset & 0xFFFFFFFF)
    return head + CRCS.pack(crc, crc32c(body, crc))


class RecordHead(NamedTuple):
    kind: int
    flags: int
    size: int
    ledger: int
    entry: int
    body_crc: int
    crc: int


def decode_record_head(data: bytes, at: int, *, seed: int, offset: int) -> RecordHead | None:
    """The head at `at` in `data`, which stands at `offset` of the file; None if there is none."""
    if len(data) - at < RECORD_HEADER_SIZE:
        return None
    crc, body_crc = CRCS.unpack_from(data, at + RECORD.size)
    if crc != crc32c(data[at : at + RECORD.size], seed ^ offset & 0xFFFFFFFF):
        return None
    kind, flags, size, ledger, entry = RECORD.unpack_from(data, at)
    return RecordHead(kind, flags, size, ledger, entry, body_crc, crc) if size <= BODY_MAX else None


def is_body_good(head: RecordHead, body: bytes) -> bool:
    return len(body) == head.size and crc32c(body, head.crc) == head.body_crc
