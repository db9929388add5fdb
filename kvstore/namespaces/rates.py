"""Rate limits of namespaces at one server. Decides only.

Each namespace with a rate has a token bucket. The rate applies to the whole cluster: servers exchange how many
operations their clients request, and each server takes the corresponding share of the rate. The shares add up to the
rate if all servers know the same requests; until then no server takes more than the whole rate (docs/protocol.md N5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil

from kvstore.errors import RateExceeded
from kvstore.namespaces.table import LIMIT_MAX, Namespace, Prefixes

SPARED = 0.1
"""Fraction of the rate that is divided equally among all servers, so that a server whose clients have just started gets
a share at once."""


class Bucket:
    """The token bucket of one namespace at one server. A call with more operations than the bucket can hold passes when
    the bucket is full, and leaves a debt."""

    __slots__ = ("_at", "_least", "_level", "depth", "namespace", "share")

    def __init__(self, namespace: Namespace, share: float, servers: int, now: float) -> None:
        self.namespace = namespace
        self._at, self._level = now, float(LIMIT_MAX)
        self.deal(share, servers, now)

    def deal(self, share: float, servers: int, now: float) -> None:
        """Set the share in operations per second, for one of `servers` servers."""
        if self._at < now:
            self._fill(now)
        self.share = share
        self._least = SPARED * self.namespace.ops_per_s / servers
        burst = self.namespace.burst or self.namespace.ops_per_s
        self.depth = max(1.0, burst * share / self.namespace.ops_per_s)
        self._level = min(self._level, self.depth)

    def wait_s(self, operations: int, now: float) -> float:
        """Return the seconds until this many operations may pass; 0: now. A server whose clients have requested nothing
        may have no share. It gets one soon, because its clients have requested something now."""
        self._fill(now)
        missing = min(operations, self.depth) - self._level
        return missing / max(self.share, self._least) if missing > 1e-9 else 0.0

    def take(self, operations: int) -> None:
        self._level -= operations

    def _fill(self, now: float) -> None:
        if now > self._at:  # a clock that steps back, by a machine error, changes nothing
            self._level = min(self.depth, self._level + (now - self._at) * self.share)
        self._at = now


class Rates:
    """The rate limits of all namespaces at one server."""

    def __init__(self, now: Callable[[], float], refused: Counter[tuple[str, str]]) -> None:
        self._now, self._refused = now, refused
        self.prefixes = Prefixes(())
        self._buckets: dict[str, Bucket] = {}
        self._asked: Counter[str] = Counter()
        self._asked_since = now()
        self._servers = 1
        self._is_paid = False
        self.passed: Counter[str] = Counter()
        """Operations passed since the server started."""

    def take(self, namespaces: Iterable[Namespace]) -> None:
        """Use these namespaces from now on. The level of an unchanged rate is kept."""
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
        """Let an operation on these keys pass, each key counting as one operation; otherwise take nothing and return
        the refusal."""
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
        """Count nothing inside this context, because the operations belong to a command that passed as a whole. Do not
        use across an await."""
        self._is_paid = True
        try:
            yield
        finally:
            self._is_paid = False

    def wanted(self) -> dict[str, float]:
        """Return the operations per second requested since the last call, including refused ones."""
        now = self._now()
        passed_s = max(now - self._asked_since, 1e-3)
        self._asked_since = now
        found = {name: self._asked[name] / passed_s for name in sorted(self._buckets)}
        self._asked.clear()
        return found

    def deal(self, own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> None:
        """Set this server's shares. `own` is what its clients want, `others` what the clients of the other servers
        want."""
        now = self._now()
        self._servers = 1 + len(others)
        for name, bucket in self._buckets.items():
            wanted = [each.get(name, 0.0) for each in others]
            bucket.deal(share_of(bucket.namespace.ops_per_s, own.get(name, 0.0), wanted), self._servers, now)


def share_of(rate: float, own: float, others: Sequence[float]) -> float:
    """Return a server's share of a rate. If the demand is below the rate, the surplus is divided equally. Otherwise the
    shares are proportional to demand, with a small minimum for every server. The shares of all servers add up to the
    rate."""
    servers, wanted = 1 + len(others), own + sum(others)
    if wanted <= rate:
        return own + (rate - wanted) / servers
    return rate * (SPARED / servers + (1 - SPARED) * own / wanted)
