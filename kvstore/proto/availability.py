"""Which entries a bookie holds, in Apache's run-length form.

availability := version i32 (0) | groups i32 | 56 zero bytes | group*
group        := first start i64 | last start i64 | run size i32 | period i32     runs of equal size at equal distance
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from kvstore.proto.bookkeeper import BadFrame

ENTRIES_MAX = 1 << 24
"""More entries than any ledger has; a guard against nonsense."""

_RUNS = Struct(">ii56x")
_RUN = Struct(">qqii")


def encode_availability(runs: Iterable[tuple[int, int]]) -> bytes:
    """Runs of entry ids (first, count), rising and not adjacent, grouped where size and distance are equal."""
    groups: list[list[int]] = []  # first start, last start, run size, period
    for start, size in runs:
        last = groups[-1] if groups else None
        if last is not None and last[2] == size and last[3] in (0, start - last[1]):
            last[3], last[1] = start - last[1], start
        else:
            groups.append([start, start, size, 0])
    return _RUNS.pack(0, len(groups)) + b"".join(_RUN.pack(*group) for group in groups)


def decode_availability(data: bytes) -> list[int]:
    """The entry ids again. Raises BadFrame."""
    if len(data) < _RUNS.size or (len(data) - _RUNS.size) % _RUN.size:
        raise BadFrame(f"an availability of {len(data)} bytes")
    version, count = _RUNS.unpack_from(data)
    if version != 0 or count != (len(data) - _RUNS.size) // _RUN.size:
        raise BadFrame(f"an availability of version {version} with {count} groups in {len(data)} bytes")
    entries: list[int] = []
    for first, last, size, period in _RUN.iter_unpack(data[_RUNS.size :]):
        if size < 1 or period < 0 or (last - first) // (period or 1) * size + len(entries) > ENTRIES_MAX:
            raise BadFrame(f"an availability with the group {first}, {last}, {size}, {period}")
        for start in range(first, last + 1, period or 1):
            entries.extend(range(start, start + size))
    return entries
