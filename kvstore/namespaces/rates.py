"""Enforces the rate limits of namespaces on one server. Decides only.

Each namespace with a rate limit has a token bucket. The rate applies to the whole cluster: servers exchange how many
operations their clients request, and each server takes a corresponding share of the rate. Once all servers know the
same demand, their shares add up to the rate. Until then, no server takes more than the whole rate (docs/protocol.md
N5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil

from kvstore.errors import RateExceeded
from kvstore.namespaces.table import LIMIT_MAX, Namespace, Prefixes

SPARED = 0.1
"""Fraction of the rate that is divided equally among all servers, so that a server whose clients have just started has
a share at once."""


class Bucket:
    """The token bucket of one namespace on one server. A call with more operations than the bucket can hold passes when
    the bucket is full, and leaves the bucket in debt."""

    __slots__ = ("_at", "_least", "_level", "depth", "namespace", "share")

    def __init__(self, namespace: Namespace, share: float, servers: int, now: float) -> None:
        self.namespace = namespace
        self._at, self._level = now, float(LIMIT_MAX)
        self.deal(share, servers, now)

    def deal(self, share: float, servers: int, now: float) -> None:
        """Set this server's share of the rate, in operations per second, in a cluster of `servers` servers."""
        if self._at < now:
            self._fill(now)
        self.share = share
        self._least = SPARED * self.namespace.ops_per_s / servers
        burst = self.namespace.burst or self.namespace.ops_per_s
        self.depth = max(1.0, burst * share / self.namespace.ops_per_s)
        self._level = min(self._level, self.depth)

    def wait_s(self, operations: int, now: float) -> float:
        """Return the number of seconds until `operations` operations may pass; 0 if they may pass now. A server whose
        clients have requested nothing so far may have no share. In that case, the wait is calculated from the minimum
        share that it is about to receive."""
        self._fill(now)
        missing = min(operations, self.depth) - self._level
        return missing / max(self.share, self._least) if missing > 1e-9 else 0.0

    def take(self, operations: int) -> None:
        """Take tokens for `operations` operations, into debt if necessary."""
        self._level -= operations

    def _fill(self, now: float) -> None:
        if now > self._at:  # a clock that steps back, by a machine error, changes nothing
            self._level = min(self.depth, self._level + (now - self._at) * self.share)
        self._at = now


class Rates:
    """The rate limits of all namespaces on one server."""

    def __init__(self, now: Callable[[], float], refused: Counter[tuple[str, str]]) -> None:
        self._now, self._refused = now, refused
        self.prefixes = Prefixes(())
        self._buckets: dict[str, Bucket] = {}
        self._asked: Counter[str] = Counter()
        self._asked_since = now()
        self._servers = 1
        self._is_paid = False
        self.passed: Counter[str] = Counter()
        """Number of operations that have passed since the server started, by namespace."""

    def take(self, namespaces: Iterable[Namespace]) -> None:
        """Replace the namespaces. A bucket whose rate and burst are unchanged keeps its level."""
        rated = tuple(each for each in namespaces if each.ops_per_s)
        now = self._now()
        self._buckets = {each.name: self._bucket(each, now) for each in rated}
        self.prefixes = Prefixes(rated)
        for counts in (self._asked, self.passed):
            for name in [name for name in counts if name not in self._buckets]:
                del counts[name]

    def _bucket(self, namespace: Namespace, now: float) -> Bucket:
        known = self._buckets.get(namespace.name)
        if known is not None and (known.namespace.ops_per_s, known.namespace.burst) == (
            namespace.ops_per_s,
            namespace.burst,
        ):
            known.namespace = namespace
            return known
        return Bucket(namespace, namespace.ops_per_s / self._servers, self._servers, now)

    # docs/protocol.md N5
    def refusal_or_none(self, keys: Sequence[bytes]) -> RateExceeded | None:
        """Take one token for each key from its namespace's bucket and return None. If any bucket has too few tokens,
        take none at all and return the error, which says how long to wait."""
        if self._is_paid:
            return None
        counts: Counter[str] = Counter()
        for key in keys:
            namespace = self.prefixes.find(key)
            if namespace is not None:
                counts[namespace.name] += 1
        now = self._now()
        refusal = None
        for name, count in counts.items():
            self._asked[name] += count
            wait_s = self._buckets[name].wait_s(count, now)
            if wait_s and refusal is None:
                bucket = self._buckets[name]
                self._refused[name, "operations"] += 1
                refusal = RateExceeded(name, bucket.namespace.ops_per_s, round(bucket.share), ceil(wait_s * 1000))
        if refusal is None:
            for name, count in counts.items():
                self._buckets[name].take(count)
                self.passed[name] += count
        return refusal

    @contextmanager
    def paid(self) -> Iterator[None]:
        """Return a context manager within which no operation is counted, because the operations belong to a command
        that has already passed as a whole. Do not await inside the context."""
        self._is_paid = True
        try:
            yield
        finally:
            self._is_paid = False

    def wanted(self) -> dict[str, float]:
        """Return the operations per second that clients have requested since the last call, by namespace, including
        refused operations. Starts a new measurement."""
        now = self._now()
        passed_s = max(now - self._asked_since, 1e-3)
        self._asked_since = now
        found = {name: self._asked[name] / passed_s for name in sorted(self._buckets)}
        self._asked.clear()
        return found

    def deal(self, own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> None:
        """Recalculate this server's share of every rate. `own` is the demand of this server's clients and `others` the
        demand of each other server's clients, in operations per second by namespace."""
        now = self._now()
        self._servers = 1 + len(others)
        for name, bucket in self._buckets.items():
            wanted = [each.get(name, 0.0) for each in others]
            bucket.deal(share_of(bucket.namespace.ops_per_s, own.get(name, 0.0), wanted), self._servers, now)


def share_of(rate: float, own: float, others: Sequence[float]) -> float:
    """Return one server's share of a rate, given its own demand and that of each other server. If the total demand is
    below the rate, the surplus is divided equally. Otherwise the shares are proportional to demand, with a small
    minimum for every server. The shares of all servers add up to the rate."""
    servers, wanted = 1 + len(others), own + sum(others)
    if wanted <= rate:
        return own + (rate - wanted) / servers
    return rate * (SPARED / servers + (1 - SPARED) * own / wanted)
