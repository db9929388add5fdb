"""Limits of what the gateway has in flight: requests, and the bytes of bodies and responses. Decides only.

However many clients there are, the gateway takes no more than this. A further request is refused before any part of it
is done. A network may use no more of a limit than it leaves free, because a request in flight gives way to no other: a
write may already be done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.env.shares import may_take, may_take_slot
from kvstore.errors import Overloaded

BYTES_MAX = 64 << 20
"""Maximum number of bytes of bodies that have arrived and are not stored yet, and of responses that are not sent
yet."""


class GatewayCapacity:
    """Limits the requests and bytes that one server's gateway handles at once."""

    def __init__(self, requests_max: int, bytes_max: int = BYTES_MAX) -> None:
        self.requests = self.bytes = 0
        self.refused = 0
        """Requests refused because of missing capacity, since the start."""
        self._requests_max, self._bytes_max = requests_max, bytes_max
        self._requests_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        """Requests and bytes of each network."""

    @contextmanager
    def request(self, network: str) -> Iterator[RequestBytes]:
        """Take a slot for a request from a network. Raises Overloaded."""
        if not may_take_slot(self._requests_of[network], self._requests_max - self.requests):
            self.refused += 1
            raise Overloaded(
                f"expected at most {self._requests_max} HTTP requests in flight at this server, and at most as many "
                "of one network as are free; try again"
            )
        self.requests += 1
        self._requests_of[network] += 1
        load = RequestBytes(self, network)
        try:
            yield load
        finally:
            self.requests -= 1
            _subtract(self._requests_of, network, 1)
            load.leave()

    def take(self, network: str, size: int, *, must: bool) -> None:
        """Count bytes. Raises Overloaded if they do not fit, unless they `must` be counted."""
        free = self._bytes_max - self.bytes - size
        if not must and self.bytes and not may_take(self._bytes_of[network] + size, free):
            self.refused += 1
            raise Overloaded(
                "the HTTP bodies and responses in flight, or those of your network, are too large in total; try again"
            )
        self.bytes += size
        self._bytes_of[network] += size

    def free(self, network: str, size: int) -> None:
        self.bytes -= size
        _subtract(self._bytes_of, network, size)


class RequestBytes:
    """Counts the bytes that one request holds against the capacity of the gateway."""

    def __init__(self, capacity: GatewayCapacity, network: str) -> None:
        self._capacity, self._network, self._bytes = capacity, network, 0

    def take(self, size: int, *, must: bool = False) -> None:
        """Count bytes of the request. Raises Overloaded. The response to a completed write `must` be sent, so it is
        always counted."""
        self._capacity.take(self._network, size, must=must)
        self._bytes += size

    def leave(self) -> None:
        self._capacity.free(self._network, self._bytes)
        self._bytes = 0


def _subtract(counts: Counter[str], network: str, count: int) -> None:
    counts[network] -= count
    if not counts[network]:
        del counts[network]
