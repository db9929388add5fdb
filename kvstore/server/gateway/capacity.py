"""Limits of what the gateway has in flight: requests, watches, and the bytes of bodies and responses. Decides only.

However many clients there are, the gateway takes no more than this. A further request is refused before any part of it
is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import Overloaded

BYTES_MAX = 64 << 20
"""Maximum number of bytes of bodies that have arrived and are not stored yet, and of responses that are not sent
yet."""


class GatewayCapacity:
    """Limits the requests, watches and bytes that one server's gateway handles at once."""

    def __init__(self, requests_max: int, watches_max: int, bytes_max: int = BYTES_MAX) -> None:
        self.requests = self.watches = self.bytes = 0
        self.refused = 0
        """Requests refused because of missing capacity, since the start."""
        self._requests_max, self._watches_max, self._bytes_max = requests_max, watches_max, bytes_max

    @contextmanager
    def request(self) -> Iterator[RequestBytes]:
        """Take a slot for a request. Raises Overloaded."""
        if self.requests >= self._requests_max:
            self.refused += 1
            raise Overloaded(f"{self.requests} HTTP requests are in flight at this server; try again")
        self.requests += 1
        load = RequestBytes(self)
        try:
            yield load
        finally:
            self.requests -= 1
            load.leave()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take a slot for a watch. Raises Overloaded."""
        if self.watches >= self._watches_max:
            self.refused += 1
            raise Overloaded(f"{self.watches} HTTP watches are open at this server; try again")
        self.watches += 1
        try:
            yield
        finally:
            self.watches -= 1

    def take(self, size: int, *, must: bool) -> None:
        """Count bytes. Raises Overloaded if they do not fit, unless they `must` be counted."""
        if not must and self.bytes and self.bytes + size > self._bytes_max:
            self.refused += 1
            raise Overloaded("the HTTP bodies and responses in flight are too large in total; try again")
        self.bytes += size


class RequestBytes:
    """Counts the bytes that one request holds against the capacity of the gateway."""

    def __init__(self, capacity: GatewayCapacity) -> None:
        self._capacity, self._bytes = capacity, 0

    def take(self, size: int, *, must: bool = False) -> None:
        """Count bytes of the request. Raises Overloaded. The response to a completed write `must` be sent, so it is
        always counted."""
        self._capacity.take(size, must=must)
        self._bytes += size

    def leave(self) -> None:
        self._capacity.bytes -= self._bytes
        self._bytes = 0
