"""Encodes and decodes a partition's list of ledgers. Decides only (docs/protocol.md, G21; docs/reference/formats.md).

  up to 500 ledgers    {"format":1,"epoch":7,"ledgers":[{"id":…,"first_seq":…,"exact":…,"epoch":…,"lease_ms":…},…],…}
  more                 {"format":2,"epoch":7,"packed":"<base64 of zlib>","count":20000,…}
packed := zlib of id* first_seq* exact* epoch* lease_ms*    each a column of `count` little-endian i64

All columns but `exact` store differences to the previous value. A ledger takes about seven bytes, compared with 75 in
JSON.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import UndecodableNode
from kvstore.meta import codec
from kvstore.types import LedgerId, Seq
from kvstore.wal.ledger_list import LedgerList, Listed, LogEnd

PLAIN_MAX = 500
"""Maximum number of ledgers in the plain format, which every version can read."""
COUNT_MAX = 1 << 20
"""Maximum number of ledgers in a list; more than any list has, as a guard against nonsense."""
_COLUMNS = 5
_WIDTH = 8
_FIRST = Seq(0)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Format 2."""

    packed: bytes
    count: int
    epoch: int = 0
    trimmed_seq: Seq = _FIRST
    trimmed_end: LogEnd | None = None
    closed_end: LogEnd | None = None


def encode(listed: LedgerList) -> bytes:
    """Return the document of `listed`."""
    ledgers = listed.ledgers
    if len(ledgers) <= PLAIN_MAX:
        return codec.encode(listed)
    columns = (
        _differences(each.id for each in ledgers),
        _differences(each.first_seq for each in ledgers),
        (int(each.exact) for each in ledgers),
        _differences(each.epoch for each in ledgers),
        _differences(each.lease_ms for each in ledgers),
    )
    packed = zlib.compress(_bytes_of(array("q", itertools.chain.from_iterable(columns))))
    document = _Packed(packed, len(ledgers), listed.epoch, listed.trimmed_seq, listed.trimmed_end, listed.closed_end)
    return codec.encode(document, format=2)


def decode(data: bytes, *, what: str) -> LedgerList:
    """Return the list in `data`. Raises UndecodableNode, which names `what`."""
    if codec.format_of(data, what=what) == 1:
        return codec.decode(LedgerList, data, what=what)
    document = codec.decode(_Packed, data, what=what, format=2)
    ledgers = _unpacked(document, what)
    return LedgerList(document.epoch, ledgers, document.trimmed_seq, document.trimmed_end, document.closed_end)


def _unpacked(document: _Packed, what: str) -> tuple[Listed, ...]:
    count = document.count
    size = count * _COLUMNS * _WIDTH
    if not 0 < count <= COUNT_MAX:
        raise UndecodableNode(f"{what}: expected 1 to {COUNT_MAX} ledgers, got {count}")
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(document.packed, size + 1)
    except zlib.error as error:
        raise UndecodableNode(f"{what}: cannot be decompressed: {error}") from error
    if len(raw) != size or not unpacker.eof:
        raise UndecodableNode(f"{what}: expected {size} bytes for {count} ledgers, got {len(raw)}")
    numbers = array("q")
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    ids, firsts, exact, epochs, leases = (numbers[at * count : (at + 1) * count] for at in range(_COLUMNS))
    rows = zip(_sums(ids), _sums(firsts), exact, _sums(epochs), _sums(leases), strict=True)
    return tuple(Listed(LedgerId(id), Seq(first), flag == 1, epoch, lease) for id, first, flag, epoch, lease in rows)


def _bytes_of(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _differences(values: Iterable[int]) -> Iterable[int]:
    before = 0
    for value in values:
        yield value - before
        before = value


def _sums(differences: Iterable[int]) -> Iterable[int]:
    return itertools.accumulate(differences)
