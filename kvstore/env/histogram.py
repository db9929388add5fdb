"""A histogram that costs one addition per value. Decides only."""

from __future__ import annotations

from bisect import bisect_right

BUCKETS = 40


class Histogram:
    """Counts by powers of two of a unit: bucket n holds values below 2**n units."""

    __slots__ = ("_bounds", "buckets", "count", "total", "unit")

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self._bounds = [unit * (1 << exponent) for exponent in range(BUCKETS - 1)]
        self.buckets = [0] * BUCKETS
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.buckets[bisect_right(self._bounds, value)] += 1

    def include(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same unit."""
        assert other.unit == self.unit, f"expected the unit {self.unit}, got {other.unit}"
        self.count += other.count
        self.total += other.total
        self.buckets = [own + its for own, its in zip(self.buckets, other.buckets, strict=True)]

    def quantile(self, share: float) -> float:
        """Return an upper bound of the value below which `share` of all values are; 0 if there are none."""
        left = share * self.count
        for exponent, count in enumerate(self.buckets):
            left -= count
            if count and left <= 0:
                return float(self.unit * (1 << exponent))
        return 0.0
