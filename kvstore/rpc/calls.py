"""The calls of a gRPC server by network: in total, those whose message has not come yet, and those that need no user.

gRPC counts a call from its headers on and waits for its message for ever, and a health watch lasts as long as its
client likes: a few connections of unauthenticated peers would take all calls. So both kinds have a small part of the
calls each, and when it runs out the oldest call of the network with the most of them is ended (kvstore/env/shares.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from kvstore.env.networks import KnownNetworks, address_of
from kvstore.env.shares import Shares
from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.rpc.callers import caller_of, note_caller
from kvstore.rpc.channels import CONCURRENT_CALLS_MAX
from kvstore.rpc.status import abort

HALF_SENT_MAX = CONCURRENT_CALLS_MAX // 8
"""Calls whose message has not come."""
MESSAGE_S = 30.0
"""How long one may take to come."""
OPEN_CALLS_MAX = CONCURRENT_CALLS_MAX // 8
"""Calls that need no user, which are those of health."""
ADDRESS_WATCHES_MAX = 64
"""Health watches of one network. Each connection of a load balancer, or of a client that watches health, has one."""
ADDRESS_CALLS_MAX = CONCURRENT_CALLS_MAX // 2
"""Calls of one network, so that it does not take them all with streams in which nothing happens."""
FEW = 16
"""Calls at once that read much of the metadata store."""


def check_cluster(wanted: str, here: str) -> None:
    """Raises Unavailable if a request names another cluster: its client asks elsewhere."""
    if wanted and wanted != here:
        raise Unavailable(f"this server is of another cluster: want {wanted[:80]}, got {here}")


class _Wait:
    """A call that may be ended: one whose message has not come, or one that needs no user."""

    __slots__ = ("since", "timeout")

    def __init__(self, since: float) -> None:
        self.since = since
        self.timeout = asyncio.timeout(None)

    def end(self, now: float) -> None:
        if not self.timeout.expired():
            self.timeout.reschedule(now)


class ServerCalls:
    """The calls of one gRPC server."""

    def __init__(self, known: KnownNetworks | None = None, carried: Mapping[str, str] | None = None) -> None:
        """`carried`: the addresses of callers whose connections a front carries, by those that gRPC sees."""
        known = KnownNetworks() if known is None else known
        self._carried = {} if carried is None else carried
        self._of_address: dict[str, int] = {}
        self._half_sent: Shares[_Wait] = Shares(known)
        self._open: Shares[_Wait] = Shares(known)
        """Calls that need no user."""
        self._watches: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    async def begin(self, context: Any) -> str:
        """Count a call; returns its address. Aborts it if that has too many."""
        note_caller(context, self._carried)
        address = address_of(caller_of(context))
        count = self._of_address.get(address, 0)
        if count >= ADDRESS_CALLS_MAX:
            await abort(context, Overloaded(f"{ADDRESS_CALLS_MAX} calls of one address are under way"))
        self._of_address[address] = count + 1
        return address

    def end(self, address: str) -> None:
        count = self._of_address.pop(address)
        if count > 1:
            self._of_address[address] = count - 1

    @asynccontextmanager
    async def without_user(self, context: Any, address: str, *, lasts: bool) -> AsyncIterator[None]:
        """Count a call that needs no user while it is answered. Aborts it if its network has too many that last, or
        when it gives way to another one."""
        if lasts and self._watches[address] >= ADDRESS_WATCHES_MAX:
            text = f"{ADDRESS_WATCHES_MAX} watches of health of one address are under way; end one of them"
            await abort(context, Overloaded(text))
        now = asyncio.get_running_loop().time()
        wait = _Wait(now)
        self._watches[address] += lasts
        self._open.add(wait, address, now)
        if len(self._open) > OPEN_CALLS_MAX:
            self._end(self._open, self._open.first_to_go(), now)
        try:
            async with wait.timeout:
                yield
        except TimeoutError:
            await abort(context, Overloaded(f"{OPEN_CALLS_MAX} calls without a user are under way; call again"))
        finally:
            self._open.discard(wait)
            self._watches[address] -= lasts
            if not self._watches[address]:
                del self._watches[address]

    async def message(self, context: Any, address: str) -> Any:
        """The message of a call that has one. Aborts it if that does not come in time, or others wait as well."""
        now = asyncio.get_running_loop().time()
        wait = _Wait(now)
        try:
            async with wait.timeout:
                self._half_sent.add(wait, address, now)
                self._bound(now)
                message = await context.read()
        except TimeoutError:
            await abort(context, Overloaded("the call's message has not come, and other calls have"))
        finally:
            self._half_sent.discard(wait)
        if message is grpc.aio.EOF:
            await abort(context, InvalidRequest("a call without its message"))
        return message

    def _bound(self, now: float) -> None:
        if len(self._half_sent) > HALF_SENT_MAX:
            self._end(self._half_sent, self._half_sent.first_to_go(), now)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(MESSAGE_S, self._end_old)

    def _end(self, shares: Shares[_Wait], wait: _Wait | None, now: float) -> None:
        assert wait is not None, "calls of which there are too many are there"
        shares.discard(wait)
        wait.end(now)

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
        address = address_of(caller_of(context))
        if self._of_address.total() >= FEW or self._of_address[address] >= FEW // 2:
            raise Overloaded(f"{FEW} {self._what} at once, {FEW // 2} of one address; ask again")
        self._of_address[address] += 1
        try:
            yield
        finally:
            self._of_address[address] -= 1
            self._of_address += Counter()  # forgets those that have none
