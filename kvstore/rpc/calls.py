"""Limits the calls of a gRPC server per network: all calls, calls whose message has not arrived, and calls that need no
login.

gRPC counts a call from its headers on and waits forever for its message, and a health watch lasts as long as its client
wants. A few connections of unauthenticated peers could use up all calls. Therefore each of these two kinds has a small
share of the calls. When the share is used up, the oldest call of the network with the most such calls is ended
(kvstore/env/shares.py).
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
"""Maximum number of calls whose message has not arrived."""
MESSAGE_S = 30.0
"""Maximum time in seconds until the message arrives."""
OPEN_CALLS_MAX = CONCURRENT_CALLS_MAX // 8
"""Maximum number of calls without a login, which are health calls."""
ADDRESS_WATCHES_MAX = 64
"""Maximum number of health watches of one network. Each connection of a load balancer, or of a client that watches
health, has one."""
ADDRESS_CALLS_MAX = CONCURRENT_CALLS_MAX // 2
"""Maximum number of calls of one network, so that a network cannot use up all calls with idle streams."""
FEW = 16
"""Maximum number of concurrent calls that read much of the metadata store."""


def check_cluster(wanted: str, here: str) -> None:
    """Raise Unavailable if the request names a cluster other than `here`, so that the client tries another server."""
    if wanted and wanted != here:
        raise Unavailable(f"this server is of another cluster: expected {wanted[:80]}, got {here}")


class _Wait:
    """A call that may be ended early: its message has not arrived, or it needs no login."""

    __slots__ = ("since", "timeout")

    def __init__(self, since: float) -> None:
        self.since = since
        self.timeout = asyncio.timeout(None)

    def end(self, now: float) -> None:
        if not self.timeout.expired():
            self.timeout.reschedule(now)


class ServerCalls:
    """Counts the running calls of one gRPC server and enforces their limits."""

    def __init__(self, known: KnownNetworks | None = None, carried: Mapping[str, str] | None = None) -> None:
        """`carried` maps the addresses that gRPC sees to the addresses of the clients whose connections a front
        forwards."""
        known = KnownNetworks() if known is None else known
        self._carried = {} if carried is None else carried
        self._of_address: dict[str, int] = {}
        self._half_sent: Shares[_Wait] = Shares(known)
        self._open: Shares[_Wait] = Shares(known)
        """Calls that need no login."""
        self._watches: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    async def begin(self, context: Any) -> str:
        """Count a call and return the address of its client. Aborts the call with Overloaded if the client's network
        already has ADDRESS_CALLS_MAX calls. The caller must call `end` with the returned address when the call is
        over."""
        note_caller(context, self._carried)
        address = address_of(caller_of(context))
        count = self._of_address.get(address, 0)
        if count >= ADDRESS_CALLS_MAX:
            await abort(
                context,
                Overloaded(f"expected at most {ADDRESS_CALLS_MAX} concurrent calls from one address; end some calls"),
            )
        self._of_address[address] = count + 1
        return address

    def end(self, address: str) -> None:
        count = self._of_address.pop(address)
        if count > 1:
            self._of_address[address] = count - 1

    @asynccontextmanager
    async def without_user(self, context: Any, address: str, *, lasts: bool) -> AsyncIterator[None]:
        """Count a call without a login while it is answered. `lasts` is True for a health watch. Aborts the call
        with Overloaded if its network already has ADDRESS_WATCHES_MAX watches. Also aborts it later if another call
        needs the slot."""
        if lasts and self._watches[address] >= ADDRESS_WATCHES_MAX:
            text = f"expected at most {ADDRESS_WATCHES_MAX} health watches from one address; end one of them"
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
            await abort(
                context, Overloaded(f"expected at most {OPEN_CALLS_MAX} concurrent calls without a login; retry")
            )
        finally:
            self._open.discard(wait)
            self._watches[address] -= lasts
            if not self._watches[address]:
                del self._watches[address]

    async def message(self, context: Any, address: str) -> Any:
        """Read and return the message of a call. Aborts the call with Overloaded if the message does not arrive
        within MESSAGE_S seconds or if another call needs the slot, and with InvalidRequest if the client sends no
        message."""
        now = asyncio.get_running_loop().time()
        wait = _Wait(now)
        try:
            async with wait.timeout:
                self._half_sent.add(wait, address, now)
                self._bound(now)
                message = await context.read()
        except TimeoutError:
            await abort(context, Overloaded("the message of the call did not arrive in time"))
        finally:
            self._half_sent.discard(wait)
        if message is grpc.aio.EOF:
            await abort(context, InvalidRequest("expected a message in the call, got none"))
        return message

    def _bound(self, now: float) -> None:
        if len(self._half_sent) > HALF_SENT_MAX:
            self._end(self._half_sent, self._half_sent.first_to_go(), now)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(MESSAGE_S, self._end_old)

    def _end(self, shares: Shares[_Wait], wait: _Wait | None, now: float) -> None:
        assert wait is not None, "too many calls include at least one"
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
    """Limits calls that are expensive for this server and for the metadata store. At most FEW of them run at once,
    and at most half of FEW from one address, so that unauthenticated peers cannot keep the metadata store busy."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._of_address: Counter[str] = Counter()

    @contextmanager
    def place(self, context: Any) -> Iterator[None]:
        """Hold a slot for one call while the context is open. Raises Overloaded if no slot is free."""
        address = address_of(caller_of(context))
        if self._of_address.total() >= FEW or self._of_address[address] >= FEW // 2:
            raise Overloaded(f"expected at most {FEW} concurrent {self._what}, and {FEW // 2} from one address; retry")
        self._of_address[address] += 1
        try:
            yield
        finally:
            self._of_address[address] -= 1
            self._of_address += Counter()  # drops zero counts
