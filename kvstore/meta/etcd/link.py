"""One connection with one of etcd's endpoints: requests that take no longer than they may, and errors of ours for
etcd's.

With a login each call carries a token that etcd has given for user and password. It forgets tokens: after some time,
when it restarts, when users are changed. It does nothing for a call with one that it does not know, so a new one is
asked for and the call is made again, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc.aio import AioRpcError

from kvstore.env.events import is_cancelled
from kvstore.env.nursery import shielded
from kvstore.env.tls import Tls
from kvstore.errors import MetadataDenied, MetadataError, MetadataUnavailable, MetadataUnknown
from kvstore.meta.etcd.keys import KeySpan
from kvstore.meta.login import MetadataLogin
from kvstore.proto.etcd_pb2 import (
    AuthenticateRequest,
    Compare,
    LeaseGrantRequest,
    LeaseKeepAliveRequest,
    LeaseRevokeRequest,
    RangeRequest,
    RangeResponse,
    TxnRequest,
    TxnResponse,
    WatchCreateRequest,
    WatchRequest,
    WatchResponse,
)
from kvstore.proto.etcd_pb2_grpc import AuthStub, KVStub, LeaseStub, WatchStub
from kvstore.rpc.channels import aio_channel, blocking_channel

log = logging.getLogger(__name__)
T = TypeVar("T")

REVOKE_S = 2.0
ANSWER_BYTES_MAX = 32 << 20
"""A page of names, or what a transaction has changed, for watches."""
_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # closing the channel closes its connection
    ("grpc.enable_retries", 0),  # a write that is sent twice could be done twice
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
)

_ERRORS: dict[grpc.StatusCode, type[MetadataError]] = {
    grpc.StatusCode.UNAVAILABLE: MetadataUnknown,
    grpc.StatusCode.DEADLINE_EXCEEDED: MetadataUnknown,
    grpc.StatusCode.CANCELLED: MetadataUnknown,
    grpc.StatusCode.UNKNOWN: MetadataUnknown,
    grpc.StatusCode.INTERNAL: MetadataUnknown,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MetadataUnavailable,  # no room, or too many requests; a write may be done
}
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")
"""What etcd says of a token that it does not know, or from before users or roles were changed."""
_DENIED = ("authentication failed", "authentication is not enabled", "permission denied", "user name is empty")
_ETCDS_OWN = "etcdserver:"
"""So begins what etcd itself gives as a reason."""


class Outdated(Exception):
    """A call rests on what is not so any more: a revision that is not kept, a lease that has gone, a node that another
    writer has changed. Nothing was done: whoever asked reads anew."""


class _OldToken(MetadataDenied):
    """The call was not made: its token is not known any more."""


class EtcdLink:
    """A connection that is used until `close`, or until `broken` is set: then its session makes another one."""

    def __init__(
        self, endpoint: str, tls: Tls | None, login: MetadataLogin | None = None, places: Sequence[str] = ()
    ) -> None:
        """`places`: the addresses of the endpoint's host, unless it is given by one. Raises OSError if a TLS file
        cannot be read."""
        self.endpoint = endpoint
        self.broken = asyncio.Event()
        self.session = 0
        """The session that it carries. This and the guard are set before anybody but the session uses the link."""
        self.guard = Compare()
        """Holds as long as the session lives and has no later connection: the condition of every write."""
        self._given_up: set[asyncio.Task[TxnResponse]] = set()
        """Writes whose askers were cancelled."""
        self._credentials = None if tls is None else grpc.ssl_channel_credentials(*tls.contents())
        self._places = places
        self._channel = aio_channel(endpoint, places, self._credentials, _OPTIONS)
        self._login = login
        self._carried: tuple[tuple[str, str], ...] = ()
        self._auth: Any = AuthStub(self._channel)
        self._kv: Any = KVStub(self._channel)
        self._lease: Any = LeaseStub(self._channel)
        self._watch: Any = WatchStub(self._channel)

    async def opened(self) -> None:
        """Return when the endpoint has taken the connection, or refused it: then the first call says why."""
        state = self._channel.get_state(try_to_connect=True)
        while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def log_in(self) -> None:
        """Say who we are, if anybody: before anything else. Raises MetadataDenied, MetadataUnknown."""
        if self._login is not None:
            request = AuthenticateRequest(name=self._login.user, password=self._login.secret)
            answer = await self._once(lambda: self._auth.Authenticate(request))
            self._carried = (("token", answer.token),)

    async def range(self, request: RangeRequest) -> RangeResponse:
        return await self._call(lambda: self._kv.Range(request, metadata=self._carried))

    async def txn(self, request: TxnRequest) -> TxnResponse:
        return await self._call(lambda: self._kv.Txn(request, metadata=self._carried))

    async def write(self, request: TxnRequest) -> TxnResponse:
        """A transaction that changes something. It goes on if whoever asked is cancelled: etcd takes nothing back.
        MetadataUnavailable may be raised for one that is done."""
        sent = asyncio.get_running_loop().create_task(self.txn(request), name="metadata write")
        try:
            return await shielded(sent)
        except asyncio.CancelledError:
            self._given_up.add(sent)
            sent.add_done_callback(self._end_given_up)
            raise

    def _end_given_up(self, sent: asyncio.Task[TxnResponse]) -> None:
        self._given_up.discard(sent)
        if not sent.cancelled():
            sent.exception()  # there is nobody to tell

    async def settled(self) -> None:
        """Return when no write is under way whose asker was cancelled: what follows sees it done, or it never is."""
        while self._given_up:
            await asyncio.wait(self._given_up)

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id."""
        answer = await self._call(lambda: self._lease.LeaseGrant(LeaseGrantRequest(TTL=ttl_s), metadata=self._carried))
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> bool:
        """Renew the lease; False if there is no such lease any more."""

        async def exchange() -> bool:
            call = self._lease.LeaseKeepAlive(metadata=self._carried)
            try:
                await call.write(LeaseKeepAliveRequest(ID=lease))
                answer = await call.read()
            finally:
                call.cancel()
            if answer is grpc.aio.EOF:
                raise MetadataUnknown(f"{self.endpoint}: no answer about lease {lease:x}")
            return bool(answer.TTL > 0)

        return await self._call(exchange)

    async def revoke(self, lease: int) -> None:
        """End the lease, and with it all that is tied to it."""
        await self._call(lambda: self._lease.LeaseRevoke(LeaseRevokeRequest(ID=lease), metadata=self._carried))

    def revoke_at_once(self, lease: int) -> None:
        """End the lease from another thread than the event loop's, over a connection of its own. Waits REVOKE_S at most
        and raises nothing: the lease expires in any case."""
        with blocking_channel(self.endpoint, self._places, self._credentials, _OPTIONS) as channel:
            stub: Any = LeaseStub(channel)
            try:
                stub.LeaseRevoke(LeaseRevokeRequest(ID=lease), metadata=self._carried, timeout=REVOKE_S)
            except grpc.RpcError as error:
                log.warning("metadata session=%x was not revoked, it expires: %s", lease, error)

    async def watch(self, span: KeySpan, start_revision: int) -> AsyncGenerator[WatchResponse, None]:
        """Give what changes in the span from that revision on. Ends when etcd ends it; raises MetadataUnknown."""
        create = WatchCreateRequest(key=span.start, range_end=span.end, start_revision=start_revision, fragment=True)
        call = self._watch.Watch(metadata=self._carried)
        try:
            await self._call(lambda: call.write(WatchRequest(create_request=create)))
            while (answer := await self._call(call.read)) is not grpc.aio.EOF:
                yield answer
        finally:
            call.cancel()

    def give_up(self) -> None:
        """Nothing is to be hoped for from this connection."""
        self.broken.set()

    async def close(self) -> None:
        """Calls under way end with MetadataUnknown."""
        self.broken.set()
        await self._channel.close()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Raises what `_once` raises."""
        try:
            return await self._once(call)
        except _OldToken:
            await self.log_in()
            return await self._once(call)

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        """Raises MetadataUnknown, after which the link is broken, MetadataDenied, Outdated, and other
        MetadataErrors."""
        try:
            return await call()
        except AioRpcError as error:
            code, details = error.code(), f"{self.endpoint}: {error.details()}"
            if code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND):
                raise Outdated(details) from None
            said = str(error.details())
            if any(each in said for each in _OLD_TOKEN):
                raise (_OldToken if self._login is not None else MetadataDenied)(details) from None
            if any(each in said for each in _DENIED):
                who = "nobody" if self._login is None else self._login.user
                raise MetadataDenied(f"{details}: etcd does not let {who}; see metadata.user") from None
            kind = _ERRORS.get(code, MetadataError)
            if kind is MetadataUnavailable and not str(error.details()).startswith(_ETCDS_OWN):
                kind = MetadataUnknown  # said by HTTP/2, or by something in between: what was sent may arrive still
            if kind is MetadataUnknown:
                self.give_up()
            raise kind(details) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise MetadataUnknown(f"{self.endpoint}: the connection was given up") from None
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:  # of a channel that is closed already
            raise MetadataUnknown(f"{self.endpoint}: {error}") from error
