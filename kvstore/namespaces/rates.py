"""How many operations per second a server lets through to each namespace. Decides only.

A token bucket for each namespace that has a rate. The rate is the whole cluster's: servers tell each other how much
their clients ask for, and each takes the share of it that its clients ask for. All shares together are the rate, where
all know the same; while they do not, no server takes more than the rate (docs/protocol.md N5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil

from kvstore.errors import RateExceeded
from kvstore.namespaces.table import LIMIT_MAX, Namespace, Prefixes

SPARED = 0.1
"""Of the rate, divided among all servers alike: a server whose clients have just begun to ask has some at once."""


class Bucket:
    """The token bucket of one namespace at one server. A call of more operations than fit in it is let through when it
    is full, and leaves a debt."""

    __slots__ = ("_at", "_least", "_level", "depth", "namespace", "share")

    def __init__(self, namespace: Namespace, share: float, servers: int, now: float) -> None:
        self.namespace = namespace
        self._at, self._level = now, float(LIMIT_MAX)
        self.deal(share, servers, now)

    def deal(self, share: float, servers: int, now: float) -> None:
        """Let so many operations per second through from now on, at one of so many servers."""
        if self._at < now:
            self._fill(now)
        self.share = share
        self._least = SPARED * self.namespace.ops_per_s / servers
        burst = self.namespace.burst or self.namespace.ops_per_s
        self.depth = max(1.0, burst * share / self.namespace.ops_per_s)
        self._level = min(self._level, self.depth)

    def wait_s(self, operations: int, now: float) -> float:
        """How long until so many may pass; 0: now. A server whose clients have asked for nothing may have no share, and
        gets one in a moment, since they have asked now."""
        self._fill(now)
        missing = min(operations, self.depth) - self._level
        return missing / max(self.share, self._least) if missing > 1e-9 else 0.0

    def take(self, operations: int) -> None:
        self._level -= operations

    def _fill(self, now: float) -> None:
        if now > self._at:  # a clock that went back, by an error of its machine, gives nothing and takes nothing
            self._level = min(self.depth, self._level + (now - self._at) * self.share)
        self._at = now


class Rates:
    """The rates of all namespaces at one server."""

    def __init__(self, now: Callable[[], float], refused: Counter[tuple[str, str]]) -> None:
        self._now, self._refused = now, refused
        self.prefixes = Prefixes(())
        self._buckets: dict[str, Bucket] = {}
        self._asked: Counter[str] = Counter()
        self._asked_since = now()
        self._servers = 1
        self._is_paid = False
        self.passed: Counter[str] = Counter()
        """Operations let through since the server began."""

    def take(self, namespaces: Iterable[Namespace]) -> None:
        """Go by these namespaces from now on. What is left of a rate that has not changed stays."""
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
        """Let an operation on these keys pass, each counts as one; or say why not, and nothing is taken."""
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
        """Count nothing while this is entered: what is submitted belongs to a command that was let pass as a whole. Not
        over an await."""
        self._is_paid = True
        try:
            yield
        finally:
            self._is_paid = False

    def wanted(self) -> dict[str, float]:
        """Operations per second that were asked for since the last call, refused ones too."""
        now = self._now()
        passed_s = max(now - self._asked_since, 1e-3)
        self._asked_since = now
        found = {name: self._asked[name] / passed_s for name in sorted(self._buckets)}
        self._asked.clear()
        return found

    def deal(self, own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> None:
        """Take this server's shares: `own` is what its clients want, `others` what those of the others do."""
        now = self._now()
        self._servers = 1 + len(others)
        for name, bucket in self._buckets.items():
            wanted = [each.get(name, 0.0) for each in others]
            bucket.deal(share_of(bucket.namespace.ops_per_s, own.get(name, 0.0), wanted), self._servers, now)


def share_of(rate: float, own: float, others: Sequence[float]) -> float:
    """A server's share of a rate. Where less is wanted than there is, what is left is divided alike; else all get in
    proportion, and everybody a little. The shares of all servers are the rate."""
    servers, wanted = 1 + len(others), own + sum(others)
    if wanted <= rate:
        return own + (rate - wanted) / servers
    return rate * (SPARED / servers + (1 - SPARED) * own / wanted)
