"""How much the gateway has under way at a time: requests, watches, and the bytes of bodies and answers. Decides only.

A crowd here takes no more than this, and one more is refused before anything of it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import Overloaded

BYTES_MAX = 64 << 20
"""Bodies that came and are not stored yet, and answers that are not sent yet."""


class GatewayCapacity:
    """The room of one server's gateway."""

    def __init__(self, requests_max: int, watches_max: int, bytes_max: int = BYTES_MAX) -> None:
        self.requests = self.watches = self.bytes = 0
        self.refused = 0
        """Requests for which there was no room, since the start."""
        self._requests_max, self._watches_max, self._bytes_max = requests_max, watches_max, bytes_max

    @contextmanager
    def request(self) -> Iterator[RequestBytes]:
        """A place for a request. Raises Overloaded."""
        if self.requests >= self._requests_max:
            self.refused += 1
            raise Overloaded(f"{self.requests} HTTP requests are under way at this server; ask again")
        self.requests += 1
        load = RequestBytes(self)
        try:
            yield load
        finally:
            self.requests -= 1
            load.leave()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A place for a watch. Raises Overloaded."""
        if self.watches >= self._watches_max:
            self.refused += 1
            raise Overloaded(f"{self.watches} watches over HTTP are open at this server; ask again")
        self.watches += 1
        try:
            yield
        finally:
            self.watches -= 1

    def take(self, size: int, *, must: bool) -> None:
        """Raises Overloaded, unless it `must` be taken."""
        if not must and self.bytes and self.bytes + size > self._bytes_max:
            self.refused += 1
            raise Overloaded("the HTTP bodies and answers under way are too large together; ask again")
        self.bytes += size


class RequestBytes:
    """The bytes of one request."""

    def __init__(self, room: GatewayCapacity) -> None:
        self._room, self._bytes = room, 0

    def take(self, size: int, *, must: bool = False) -> None:
        """Raises Overloaded. What has been done `must` be told, so its answer is always taken."""
        self._room.take(size, must=must)
        self._bytes += size

    def leave(self) -> None:
        self._room.bytes -= self._bytes
        self._bytes = 0
