"""Measures the load of each partition and its most requested keys, and suggests moves. Uses samples and counters, never
every operation. Decides only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from math import exp
from typing import NamedTuple

import msgspec

from kvstore.ring import TOKENS, KeyHash, PartitionState, Ring
from kvstore.ring.ring import TokenRange
from kvstore.types import PartitionId

KEYS_MAX = 64
"""Keys counted by a sketch. A key with more than 1/64 of all samples is certainly among them."""
HOT_MAX = 10
"""Maximum number of hot keys shown per partition."""
HALF_LIFE_S = 10.0
"""Time after which old samples count half."""
TOKENS_KEPT = 1024
QUANTILES = 64
SAMPLES_MIN = 100
"""Minimum number of samples for statements about keys."""
HOT_TIMES = 1.5
"""A partition is overloaded if its rate is this multiple of the mean ..."""
HOT_OPS_PER_S = 200.0
"""... and at least this many operations per second."""
WRITE_WORK = 4.0
"""Work of a write, measured in reads. With 50 connections, a SET costs 4.5 times the processor time of a GET."""
BYTES_OF_WORK = 512.0
"""Bytes written that cost as much as a read. A SET of 1 KB costs two and a half reads more than one of 100 bytes."""
CUT_EXCESS = 1.25
"""A cut may hold this multiple of the operations that were wanted. A key with more is left out."""
ONE_KEY = 0.5
"""Share of a single key in its partition's operations above which moving other keys does not help."""


class HotKey(NamedTuple):
    key: bytes
    share: float
    """Lower bound of its share of the partition's operations."""


class PartitionLoad(NamedTuple):
    """The recent load of one partition, according to its leader."""

    partition: PartitionId
    ops_per_s: float
    writes_per_s: float
    written_bytes_per_s: float
    """Bytes of keys and values."""
    hot: tuple[HotKey, ...] = ()
    tokens: tuple[int, ...] = ()
    """Rising tokens with about the same number of operations between each two."""

    @property
    def work_per_s(self) -> float:
        """The leader's work in units per second: a read counts 1, a write WRITE_WORK, and each BYTES_OF_WORK bytes
        written 1."""
        return self.ops_per_s + (WRITE_WORK - 1) * self.writes_per_s + self.written_bytes_per_s / BYTES_OF_WORK


class Cut(NamedTuple):
    """A range of tokens that could move to another partition."""

    first: int
    last: int
    share: float
    """Its share of the partition's sampled operations."""


class Suggestion(NamedTuple):
    """A move that would balance the load, or the reason why none would."""

    source: PartitionId
    target: PartitionId
    first: int
    last: int
    """Both 0, with an empty target, if no move helps."""
    ops_per_s: float
    text: str


class TopKeys:
    """The most frequent keys in bounded memory: the space-saving sketch.

    A new key replaces the key with the smallest count and inherits the count, which is then the maximum error of the
    new key's count.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._max = keys_max
        self._counts: dict[bytes, float] = {}
        self._excess: dict[bytes, float] = {}
        """Maximum error of each count."""
        self.total = 0.0

    def add(self, key: bytes) -> None:
        self.total += 1
        counts = self._counts
        count = counts.get(key)
        if count is None:
            count = 0.0
            if len(counts) >= self._max:
                least = min(counts, key=counts.__getitem__)
                count = counts.pop(least)
                del self._excess[least]
            self._excess[key] = count
        counts[key] = count + 1

    def fade(self, factor: float) -> None:
        """Multiply all counts by `factor`, so that older samples count less."""
        self.total *= factor
        self._counts = {key: count * factor for key, count in self._counts.items()}
        self._excess = {key: excess * factor for key, excess in self._excess.items()}

    def top(self, most: int) -> tuple[HotKey, ...]:
        """Return the keys with the largest certain shares, largest first, without shares that could be chance."""
        if self.total < SAMPLES_MIN:
            return ()
        sure = ((key, (count - self._excess[key]) / self.total) for key, count in self._counts.items())
        hot = sorted(((share, key) for key, share in sure if share > 1 / self._max), reverse=True)
        return tuple(HotKey(key, share) for share, key in hot[:most])


class LoadTracker:
    """Tracks the load of one partition on behalf of its leader."""

    def __init__(self, partition: PartitionId, hash: KeyHash) -> None:
        self._partition, self._hash = partition, hash
        self._keys = TopKeys()
        self._tokens: deque[int] = deque(maxlen=TOKENS_KEPT)
        self._last: tuple[float, float, float] | None = None
        self._ops_per_s = self._writes_per_s = self._write_bytes = 0.0

    def sampled(self, keys: Iterable[tuple[bytes, int]]) -> None:
        """Record sampled operations: the key of each, and the number of bytes that it writes (0 for a read)."""
        for key, written in keys:
            self._keys.add(key)
            self._tokens.append(self._hash.token_of(key))
            if written:
                self._write_bytes += (written - self._write_bytes) / 64

    def counted(self, ops: float, writes: float, now: float) -> None:
        """Record the leader's counters at the time `now`, in seconds. The counters only increase, and restart with
        each leadership."""
        before, self._last = self._last, (ops, writes, now)
        if before is None or ops < before[0] or writes < before[1] or now <= before[2]:
            return
        passed_s = now - before[2]
        weight = 1 - exp(-passed_s / HALF_LIFE_S)
        self._ops_per_s += weight * ((ops - before[0]) / passed_s - self._ops_per_s)
        self._writes_per_s += weight * ((writes - before[1]) / passed_s - self._writes_per_s)
        self._keys.fade(0.5 ** (passed_s / HALF_LIFE_S))

    def numbers(self) -> dict[str, float]:
        """Return the numbers for metrics, without keys."""
        hottest = self._keys.top(1)
        return {
            "ops_per_s": self._ops_per_s,
            "writes_per_s": self._writes_per_s,
            "written_bytes_per_s": self._writes_per_s * self._write_bytes,
            "hottest_key_share": hottest[0].share if hottest else 0.0,
        }

    def load(self) -> PartitionLoad:
        tokens = sorted(self._tokens) if len(self._tokens) >= SAMPLES_MIN else []
        step = max(1, len(tokens) // QUANTILES)
        return PartitionLoad(
            self._partition,
            self._ops_per_s,
            self._writes_per_s,
            self._writes_per_s * self._write_bytes,
            self._keys.top(HOT_MAX),
            tuple(tokens[::step]),
        )


_decoder = msgspec.msgpack.Decoder(tuple[PartitionLoad, ...])


def encode(loads: Iterable[PartitionLoad]) -> bytes:
    """Encode loads for another server."""
    return msgspec.msgpack.encode(tuple(loads))


def decode(body: bytes) -> tuple[PartitionLoad, ...]:
    """Decode loads. Raises msgspec.MsgspecError."""
    return _decoder.decode(body)


def suggest(ring: Ring, loads: Mapping[PartitionId, PartitionLoad]) -> list[Suggestion]:
    """For each partition whose load is far above the mean, suggest a range to move to the partition with the least
    load."""
    serving = [each.id for each in ring.partitions.values() if each.state is PartitionState.SERVING]
    busy = {partition for move in ring.moves.values() for partition in (move.source, move.target)}
    rates = {each: loads[each].ops_per_s if each in loads else 0.0 for each in serving}
    if len(serving) < 2:
        return []
    mean = sum(rates.values()) / len(serving)
    found, ranges = [], ring.ranges_by_owner()
    for source in sorted(serving, key=lambda each: (-rates[each], each)):
        if rates[source] < max(HOT_TIMES * mean, HOT_OPS_PER_S):
            break
        if source in busy:
            continue
        target = min(serving, key=lambda each: (rates[each], each))
        suggestion = _one_key(loads[source]) or _range(
            ranges[source], ring.hash.unit, loads[source], target, mean, rates[target]
        )
        if suggestion is not None:
            found.append(suggestion)
            rates[target] += suggestion.ops_per_s if suggestion.target else 0.0
    return found


def _one_key(load: PartitionLoad) -> Suggestion | None:
    if not load.hot or load.hot[0].share < ONE_KEY:
        return None
    key, share = load.hot[0]
    text = (
        f"{load.partition}: {share:.0%} of its operations are for the key {key.decode('utf-8', 'backslashreplace')!r}, "
        "which no move can split; read it at level session or stale from replicas, or spread it over several keys"
    )
    return Suggestion(load.partition, PartitionId(""), 0, 0, 0.0, text)


def _range(
    ranges: Iterable[TokenRange], unit: int, load: PartitionLoad, target: PartitionId, mean: float, rate: float
) -> Suggestion | None:
    """Suggest a range that brings the source or the target to the mean."""
    found = cut(ranges, unit, load, min(load.ops_per_s - mean, mean - rate) / load.ops_per_s)
    if found is None:
        return None
    moved = found.share * load.ops_per_s
    text = (
        f"{load.partition} has {load.ops_per_s:,.0f} operations/s and the mean is {mean:,.0f}; to move about "
        f"{moved:,.0f} "
        f"of them: kvstore ring move {target} --first {found.first} --last {found.last}"
    )
    return Suggestion(load.partition, target, found.first, found.last, moved, text)


def cut(ranges: Iterable[TokenRange], unit: int, load: PartitionLoad, share: float) -> Cut | None:
    """Return the start of the busiest of the partition's ranges, with about `share` of its operations, or less if the
    range has less. `unit` is that of the key hash. Return None if too few operations were sampled, or if each range
    begins with a key or slot that has more."""
    wanted = share * len(load.tokens)
    if wanted < 1:
        return None
    spans = [span for span in ranges if span.start != span.end]
    parts = [(_tokens_in(load.tokens, (span.start + 1) % TOKENS, span.end), span) for span in spans]
    for tokens, span in sorted(parts, key=lambda part: (-len(part[0]), part[1].end)):
        first, last, count = (span.start + 1) % TOKENS, span.end, len(tokens)
        if count > wanted:
            last = tokens[int(wanted) - 1] // unit * unit + unit - 1
            count = bisect_right(tokens, last)
            if count > CUT_EXCESS * wanted:
                last -= unit
                count = bisect_right(tokens, last)
        if count and first <= last:
            return Cut(first, last, count / len(load.tokens))
    return None


def _tokens_in(tokens: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """Return the tokens from first to last; none for a range that wraps around."""
    return tokens[bisect_left(tokens, first) : bisect_right(tokens, last)] if first <= last else ()
