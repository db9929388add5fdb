"""The calls of a gRPC server by where they come from, and those whose message has not come yet.

gRPC counts a call from its headers on and waits for its message for ever: a few connections that send headers alone
would take all calls. So of these there are few, and the oldest gives way: a message comes with its headers, or soon.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import grpc

from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.rpc.channels import CONCURRENT_CALLS_MAX
from kvstore.rpc.status import abort

HALF_SENT_MAX = CONCURRENT_CALLS_MAX // 8
"""Calls whose message has not come."""
MESSAGE_S = 30.0
"""How long one may take to come."""
ADDRESS_CALLS_MAX = CONCURRENT_CALLS_MAX // 2
"""Of one address, so that a stranger does not take them all with streams in which nothing happens."""
FEW = 16
"""Calls at once that read much of the metadata store."""
_IPV6_PREFIX = 64
"""One machine may have all addresses of such a network."""


def check_cluster(wanted: str, here: str) -> None:
    """Raises Unavailable if a request names another cluster: its client asks elsewhere."""
    if wanted and wanted != here:
        raise Unavailable(f"this server is of another cluster: want {wanted[:80]}, got {here}")


class _Wait:
    """For one message."""

    __slots__ = ("since", "timeout")

    def __init__(self, since: float) -> None:
        self.since = since
        self.timeout = asyncio.timeout(None)

    def end(self, now: float) -> None:
        if not self.timeout.expired():
            self.timeout.reschedule(now)


class Calls:
    """The calls of one gRPC server."""

    def __init__(self) -> None:
        self._of_address: dict[str, int] = {}
        self._half_sent: dict[_Wait, None] = {}
        """The oldest is the first."""
        self._sweep: asyncio.TimerHandle | None = None

    async def begin(self, context: Any) -> str:
        """Count a call; returns its address. Aborts it if that has too many."""
        address = address_of(context.peer())
        count = self._of_address.get(address, 0)
        if count >= ADDRESS_CALLS_MAX:
            await abort(context, Overloaded(f"{ADDRESS_CALLS_MAX} calls of one address are under way"))
        self._of_address[address] = count + 1
        return address

    def end(self, address: str) -> None:
        count = self._of_address.pop(address)
        if count > 1:
            self._of_address[address] = count - 1

    async def message(self, context: Any) -> Any:
        """The message of a call that has one. Aborts it if that does not come in time, or others wait as well."""
        now = asyncio.get_running_loop().time()
        wait = _Wait(now)
        try:
            async with wait.timeout:
                self._half_sent[wait] = None
                self._bound(now)
                message = await context.read()
        except TimeoutError:
            await abort(context, Overloaded("the call's message has not come, and other calls have"))
        finally:
            self._half_sent.pop(wait, None)
        if message is grpc.aio.EOF:
            await abort(context, InvalidRequest("a call without its message"))
        return message

    def _bound(self, now: float) -> None:
        if len(self._half_sent) > HALF_SENT_MAX:
            oldest = next(iter(self._half_sent))
            del self._half_sent[oldest]
            oldest.end(now)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(MESSAGE_S, self._end_old)

    def _end_old(self) -> None:
        self._sweep = None
        now = asyncio.get_running_loop().time()
        for each in [each for each in self._half_sent if each.since <= now - MESSAGE_S]:
            each.end(now)
        if self._half_sent:
            self._sweep = asyncio.get_running_loop().call_later(MESSAGE_S, self._end_old)


class Few:
    """Calls that are costly, for the metadata store too: few at once, so that strangers do not keep it busy, and of one
    address half of them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._of_address: Counter[str] = Counter()

    @contextmanager
    def place(self, context: Any) -> Iterator[None]:
        """Raises Overloaded."""
        address = address_of(context.peer())
        if self._of_address.total() >= FEW or self._of_address[address] >= FEW // 2:
            raise Overloaded(f"{FEW} {self._what} at once, {FEW // 2} of one address; ask again")
        self._of_address[address] += 1
        try:
            yield
        finally:
            self._of_address[address] -= 1
            self._of_address += Counter()  # forgets those that have none


def address_of(peer: str) -> str:
    """Of a peer as gRPC names it, for example `ipv4:10.0.0.9:51112`, without its port."""
    address, _, _ = peer.rpartition(":")
    return _network(address) if address.startswith("ipv6:") else address


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    host = unquote(address.removeprefix("ipv6:")).strip("[]").partition("%")[0]
    try:
        found = ipaddress.IPv6Address(host)
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return f"ipv4:{found.ipv4_mapped}"
    return str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False))
