"""Encodes the list of entries that a bookie holds, in Apache's run-length form.

    availability := version i32 (0) | groups i32 | 56 zero bytes | group*
    group        := first start i64 | last start i64 | run size i32 | period i32   runs of equal size and distance

Numbers are big-endian.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from struct import Struct

from kvstore.proto.bookkeeper import BadFrame

_RUNS = Struct(">ii56x")
_RUN = Struct(">qqii")
PERIOD_MAX = (1 << 31) - 1
Group = tuple[int, int, int, int]
"""First start, last start, run size, period."""


class HeldEntries:
    """Entry ids that a bookie holds. Kept in their encoded groups, since a ledger may have millions of entries; a query
    for a range costs no more than that range."""

    def __init__(self, groups: Iterable[Group]) -> None:
        """Take groups that rise and do not overlap."""
        self._groups = list(groups)
        self._firsts = [group[0] for group in self._groups]

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> HeldEntries:
        """Take runs (first, count), rising."""
        return cls((first, first, count, 0) for first, count in runs)

    def between(self, first: int, last: int) -> set[int]:
        """Return the ids from `first` to `last`."""
        found: set[int] = set()
        at = max(0, bisect_right(self._firsts, first) - 1)
        while at < len(self._groups) and self._firsts[at] <= last:
            found.update(*_runs_between(self._groups[at], first, last))
            at += 1
        return found

    def __iter__(self) -> Iterator[int]:
        for first, last, size, period in self._groups:
            for start in range(first, last + 1, period or 1):
                yield from range(start, start + size)


def _runs_between(group: Group, first: int, last: int) -> Iterator[range]:
    start, last_start, size, period = group
    step = period or 1
    skipped = max(0, (first - start - size) // step + 1)  # skips runs that end before `first`
    for run in range(start + skipped * step, min(last_start, last) + 1, step):
        yield range(max(run, first), min(run + size, last + 1))


def encode_availability(runs: Iterable[tuple[int, int]]) -> bytes:
    """Encode runs of entry ids (first, count), rising and not adjacent, grouped where size and distance are equal."""
    groups: list[list[int]] = []  # first start, last start, run size, period
    for start, size in runs:
        last = groups[-1] if groups else None
        period = start - last[1] if last is not None else 0
        if last is not None and last[2] == size and last[3] in (0, period) and period <= PERIOD_MAX:
            last[3], last[1] = period, start
        else:
            groups.append([start, start, size, 0])
    return _RUNS.pack(0, len(groups)) + b"".join(_RUN.pack(*group) for group in groups)


def decode_availability(data: bytes) -> HeldEntries:
    """Decode the entry ids. Raises BadFrame."""
    if len(data) < _RUNS.size or (len(data) - _RUNS.size) % _RUN.size:
        raise BadFrame(f"expected whole groups in an availability list, got {len(data)} bytes")
    version, count = _RUNS.unpack_from(data)
    if version != 0 or count != (len(data) - _RUNS.size) // _RUN.size:
        raise BadFrame(
            f"expected an availability list of version 0, got version {version}, {count} groups in {len(data)} bytes"
        )
    groups: list[Group] = list(_RUN.iter_unpack(data[_RUNS.size :]))
    end = -1
    for first, last, size, period in groups:
        if size < 1 or period < 0 or not end < first <= last:
            raise BadFrame(f"expected rising groups in an availability list, got {first}, {last}, {size}, {period}")
        end = last + size - 1
    return HeldEntries(groups)
