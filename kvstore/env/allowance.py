"""An allowance of costly steps for networks that have not authenticated. Decides only.

A listener cannot distinguish a client that connects for the first time from an unauthenticated peer. Both get their
steps from an allowance that is refilled slowly. If a client then authenticates, its network is known, and the step is
given back. So many new clients get in one after the other as fast as they authenticate, and peers that never do take
a bounded share of the event loop's time.
"""

from __future__ import annotations

import math
from collections import deque

from kvstore.env.networks import NETWORKS_MAX, KnownNetworks


class Allowance:
    """The steps that unknown networks may take at one listener: `per_s` each second, and up to `most` saved ones."""

    def __init__(self, known: KnownNetworks, per_s: float, most: int) -> None:
        self._known, self._per_s, self._most = known, per_s, most
        self._left, self._at = float(most), -math.inf
        self._added = known.added
        self._taken: deque[str] = deque(maxlen=most)
        """The networks of the latest steps that were not given back."""
        self._last: dict[str, float] = {}
        """The time of the latest step of each network, in order. At most NETWORKS_MAX are remembered."""

    def is_left(self, now: float) -> bool:
        """Return True if an unknown network may take a step. Known networks always may, and so may all networks if
        clients need not authenticate."""
        if not self._known.clients_authenticate:
            return True
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = max(self._at, now)
        if self._left < 1 and self._added != self._known.added:
            self._give_back()
        return self._left >= 1

    def take(self, network: str, now: float) -> None:
        """Take a step for a network that may."""
        if network in self._known or not self._known.clients_authenticate:
            return
        self._left -= 1
        self._taken.append(network)
        self._last.pop(network, None)
        self._last[network] = now
        if len(self._last) > NETWORKS_MAX:
            del self._last[next(iter(self._last))]

    def last(self, network: str) -> float:
        """Return the time of a network's latest step, which is before all others if it is not remembered."""
        return self._last.get(network, -math.inf)

    def _give_back(self) -> None:
        """Give back the steps of networks that have become known."""
        self._added = self._known.added
        taken = [each for each in self._taken if each not in self._known]
        self._left = min(self._most, self._left + len(self._taken) - len(taken))
        self._taken = deque(taken, self._most)
