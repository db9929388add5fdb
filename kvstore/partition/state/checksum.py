"""The checksum of a partition's state, which rolls over the changes of each log entry. Decides only.

The checksum covers values in its own form, pinned here and by golden bytes, so that replicas of different versions
get the same checksum whatever their engines store (docs/protocol.md, P36; docs/reference/formats.md, Checksum):

    of an entry       all its keys, one after another, each as "d" | token u32 be | key; then all its forms
    form of a record  flags u8 (1: created, 2: expires) | version u64 be | written ms u64 be
                      | created version u64 be, if it is another | expires ms u64 be, if it expires | value
    form of a delete  nothing
    of a transaction  INTENT, DECISION, RESOLVED, END: the contents of the mutation, as they are in the log
    IMPORT            its keys in that form, and its rows, as they are in the log

Rows of format 1 (rows.py) equal these forms byte for byte, so nothing is built twice. If you change the rows, build the
forms separately. If you change the forms, use the next ENCODING; checks of different encodings are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from kvstore.types import Seq

ENCODING = 1
CHECKS_REMEMBERED = 16

_head, _check = Struct(">BQII"), Struct(">QI")
_FORMAT = 1


class Doubt(NamedTuple):
    """A difference between a state and the state of its log's writer."""

    seq: Seq
    mine: int
    logged: int

    def __str__(self) -> str:
        return f"effects up to {self.seq} have CRC {self.mine:08x} here, the log's {self.logged:08x}"


def encode_checks(doubt: Doubt | None, checks: dict[Seq, int]) -> bytes:
    """Encode the doubt and the checksums as one engine row."""
    return _head.pack(_FORMAT, *(doubt or (0, 0, 0))) + b"".join(_check.pack(*each) for each in checks.items())


def decode_checks(row: bytes | None) -> tuple[Doubt | None, dict[Seq, int]]:
    """Decode the row into the doubt and the checksums. If there is no row, or its format is a later one, return no
    doubt and no checksums."""
    if not row or row[0] != _FORMAT:
        return None, {}
    _, seq, mine, logged = _head.unpack_from(row)
    checks = {Seq(at): crc for at, crc in _check.iter_unpack(row[_head.size :])}
    return (Doubt(Seq(seq), mine, logged) if seq else None), checks


def fold(crc: int, keys: Iterable[bytes], forms: Iterable[bytes]) -> int:
    """Return the checksum after an entry of mutations, given the checksum before the entry."""
    return crc32c(b"".join(forms), crc32c(b"".join(keys), crc))


def fold_import(crc: int, record: bytes) -> int:
    """Return the checksum after an IMPORT record, given the checksum before it and the record's bytes as they are in
    the log."""
    return crc32c(record, crc)
