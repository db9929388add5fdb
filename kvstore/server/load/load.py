"""How much each partition has to do, which keys are asked for most, and what to move where. Fed with samples and
counters, never with every operation. Decides only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from math import exp
from typing import NamedTuple

import msgspec

from kvstore.ring import TOKENS, PartitionState, Ring, token_of
from kvstore.types import PartitionId

KEYS_MAX = 64
"""Keys that a sketch counts. One that takes more than a 64th of all samples is among them for sure."""
HOT_MAX = 10
"""Keys that are shown of a partition."""
HALF_LIFE_S = 10.0
"""After this time old samples count for half."""
TOKENS_KEPT = 1024
QUANTILES = 64
SAMPLES_MIN = 100
"""With fewer nothing is said about keys."""
HOT_TIMES = 1.5
"""A partition with so many times the mean has too much to do ..."""
HOT_OPS_PER_S = 200.0
"""... if it is this much at all."""
ONE_KEY = 0.5
"""A key with this part of its partition's operations: moving the others away does not help."""


class HotKey(NamedTuple):
    key: bytes
    share: float
    """Of the partition's operations; at least that much, for sure."""


class PartitionLoad(NamedTuple):
    """The recent load of one partition's leader."""

    partition: PartitionId
    ops_per_s: float
    writes_per_s: float
    written_bytes_per_s: float
    """Keys and values."""
    hot: tuple[HotKey, ...] = ()
    tokens: tuple[int, ...] = ()
    """Rising: between each two of them about the same part of the operations."""


class Suggestion(NamedTuple):
    """A move that would even the load out, or why none would."""

    source: PartitionId
    target: PartitionId
    first: int
    last: int
    """Both 0, and no target, if no move helps."""
    ops_per_s: float
    text: str


class TopKeys:
    """The keys that come most often, in bounded memory: the space-saving sketch.

    A new key takes the place of the one with the smallest count and inherits that count, which is then by how much its
    own may be too large.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._max = keys_max
        self._counts: dict[bytes, float] = {}
        self._excess: dict[bytes, float] = {}
        """By how much the count may be too large."""
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
        """Let what was counted so far count for less."""
        self.total *= factor
        self._counts = {key: count * factor for key, count in self._counts.items()}
        self._excess = {key: excess * factor for key, excess in self._excess.items()}

    def top(self, most: int) -> tuple[HotKey, ...]:
        """Keys by the share that they have for sure, largest first; nothing if that is no more than chance."""
        if self.total < SAMPLES_MIN:
            return ()
        sure = ((key, (count - self._excess[key]) / self.total) for key, count in self._counts.items())
        hot = sorted(((share, key) for key, share in sure if share > 1 / self._max), reverse=True)
        return tuple(HotKey(key, share) for share, key in hot[:most])


class LoadTracker:
    """One partition's load, as its leader sees it."""

    def __init__(self, partition: PartitionId) -> None:
        self._partition = partition
        self._keys = TopKeys()
        self._tokens: deque[int] = deque(maxlen=TOKENS_KEPT)
        self._last: tuple[float, float, float] | None = None
        self._ops_per_s = self._writes_per_s = self._write_bytes = 0.0

    def sampled(self, keys: Iterable[tuple[bytes, int]]) -> None:
        """Some operations: each one's key, and what it writes in bytes, 0 if nothing."""
        for key, written in keys:
            self._keys.add(key)
            self._tokens.append(token_of(key))
            if written:
                self._write_bytes += (written - self._write_bytes) / 64

    def counted(self, ops: float, writes: float, now: float) -> None:
        """The leader's counters, which rise, at a time in seconds; they begin again with each lead."""
        before, self._last = self._last, (ops, writes, now)
        if before is None or ops < before[0] or writes < before[1] or now <= before[2]:
            return
        passed_s = now - before[2]
        weight = 1 - exp(-passed_s / HALF_LIFE_S)
        self._ops_per_s += weight * ((ops - before[0]) / passed_s - self._ops_per_s)
        self._writes_per_s += weight * ((writes - before[1]) / passed_s - self._writes_per_s)
        self._keys.fade(0.5 ** (passed_s / HALF_LIFE_S))

    def numbers(self) -> dict[str, float]:
        """For metrics: no keys."""
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
    """Loads, for another server."""
    return msgspec.msgpack.encode(tuple(loads))


def decode(body: bytes) -> tuple[PartitionLoad, ...]:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(body)


def suggest(ring: Ring, loads: Mapping[PartitionId, PartitionLoad]) -> list[Suggestion]:
    """For each partition that has far more to do than the mean: the range to move, to the one that has least to do."""
    serving = [each.id for each in ring.partitions.values() if each.state is PartitionState.SERVING]
    busy = {partition for move in ring.moves.values() for partition in (move.source, move.target)}
    rates = {each: loads[each].ops_per_s if each in loads else 0.0 for each in serving}
    if len(serving) < 2:
        return []
    mean = sum(rates.values()) / len(serving)
    found = []
    for source in sorted(serving, key=lambda each: (-rates[each], each)):
        if rates[source] < max(HOT_TIMES * mean, HOT_OPS_PER_S):
            break
        if source in busy:
            continue
        target = min(serving, key=lambda each: (rates[each], each))
        suggestion = _one_key(loads[source]) or _range(ring, loads[source], target, mean, rates[target])
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
        "which no move can split: read it at level session or stale from replicas, or spread it over several keys"
    )
    return Suggestion(load.partition, PartitionId(""), 0, 0, 0.0, text)


def _range(ring: Ring, load: PartitionLoad, target: PartitionId, mean: float, rate: float) -> Suggestion | None:
    """The start of the source's busiest range, as much as brings source or target to the mean."""
    wanted = min(load.ops_per_s - mean, mean - rate) / load.ops_per_s * len(load.tokens)
    spans = [span for span in ring.ranges() if span.owner == load.partition and span.start != span.end]
    parts = [(_tokens_in(load.tokens, (span.start + 1) % TOKENS, span.end), span) for span in spans]
    if not parts or wanted < 1:
        return None
    tokens, span = max(parts, key=lambda part: (len(part[0]), -part[1].end))
    if not tokens:
        return None
    first = (span.start + 1) % TOKENS
    last = span.end if len(tokens) <= wanted else max(first, tokens[int(wanted) - 1])
    moved = min(len(tokens), int(wanted)) / len(load.tokens) * load.ops_per_s
    text = (
        f"{load.partition} has {load.ops_per_s:,.0f} operations/s, the mean is {mean:,.0f}: move about {moved:,.0f} of "
        f"them by: kvstore ring move {target} --first {first} --last {last}"
    )
    return Suggestion(load.partition, target, first, last, moved, text)


def _tokens_in(tokens: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """Those from first to last; nothing for a range that wraps round."""
    return tokens[bisect_left(tokens, first) : bisect_right(tokens, last)] if first <= last else ()
