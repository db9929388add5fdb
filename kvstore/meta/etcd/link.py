"""One connection to one of etcd's endpoints: requests with deadlines, and our errors for etcd's.

With a login each call carries a token that etcd has issued for user and password. etcd forgets tokens after some time,
when it restarts, and when users are changed. It does nothing for a call with an unknown token, so the link requests a
new token and repeats the call once.
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
"""Maximum bytes of an answer: a page of names, or the changes of a transaction for watches."""
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
    grpc.StatusCode.RESOURCE_EXHAUSTED: MetadataUnavailable,  # no space, or overloaded; a write may be done
}
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")
"""etcd's messages about a token that it does not know, or that is older than a change of users or roles."""
_DENIED = ("authentication failed", "authentication is not enabled", "permission denied", "user name is empty")
_ETCDS_OWN = "etcdserver:"
"""Prefix of reasons that etcd itself gives."""


class Outdated(Exception):
    """A call relied on outdated facts: a compacted revision, a lease that is gone, a node that another writer has
    changed. Nothing was done; the caller reads again."""


class _OldToken(MetadataDenied):
    """The call was not carried out, because its token is no longer known."""


class EtcdLink:
    """A connection that is used until `close`, or until `broken` is set. Then its session opens another one."""

    def __init__(
        self, endpoint: str, tls: Tls | None, login: MetadataLogin | None = None, places: Sequence[str] = ()
    ) -> None:
        """`places`: addresses of the endpoint's host, unless the host is an address. Raises OSError if a TLS file
        cannot be read."""
        self.endpoint = endpoint
        self.broken = asyncio.Event()
        self.session = 0
        """The session that uses the link. Set, like `guard`, before anything but the session uses the link."""
        self.guard = Compare()
        """Condition of every write: true while the session lives and has no later connection."""
        self._given_up: set[asyncio.Task[TxnResponse]] = set()
        """Writes whose callers were cancelled."""
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
        """Wait until the endpoint has accepted or refused the connection. If it refused, the first call names the
        reason."""
        state = self._channel.get_state(try_to_connect=True)
        while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def log_in(self) -> None:
        """Log in before any other call, if there is a login. Raises MetadataDenied, MetadataUnknown."""
        if self._login is not None:
            request = AuthenticateRequest(name=self._login.user, password=self._login.secret)
            answer = await self._once(lambda: self._auth.Authenticate(request))
            self._carried = (("token", answer.token),)

    async def range(self, request: RangeRequest) -> RangeResponse:
        return await self._call(lambda: self._kv.Range(request, metadata=self._carried))

    async def txn(self, request: TxnRequest) -> TxnResponse:
        return await self._call(lambda: self._kv.Txn(request, metadata=self._carried))

    async def write(self, request: TxnRequest) -> TxnResponse:
        """Carry out a transaction that changes something. It continues if the caller is cancelled, because etcd cannot
        undo it. MetadataUnavailable may be raised although the write was done."""
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
            sent.exception()  # nobody waits for it

    async def settled(self) -> None:
        """Wait until no write is in flight whose caller was cancelled. Each such write is then done or will
        never be."""
        while self._given_up:
            await asyncio.wait(self._given_up)

    async def grant(self, ttl_s: int) -> int:
        """Create a lease and return its id."""
        answer = await self._call(lambda: self._lease.LeaseGrant(LeaseGrantRequest(TTL=ttl_s), metadata=self._carried))
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> bool:
        """Renew the lease. Returns False if it does not exist any more."""

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
        """End the lease and delete all keys that depend on it."""
        await self._call(lambda: self._lease.LeaseRevoke(LeaseRevokeRequest(ID=lease), metadata=self._carried))

    def revoke_at_once(self, lease: int) -> None:
        """End the lease from another thread than the event loop's, over its own connection. Waits at most
        REVOKE_S. Errors are logged, because the lease expires in any case."""
        with blocking_channel(self.endpoint, self._places, self._credentials, _OPTIONS) as channel:
            stub: Any = LeaseStub(channel)
            try:
                stub.LeaseRevoke(LeaseRevokeRequest(ID=lease), metadata=self._carried, timeout=REVOKE_S)
            except grpc.RpcError as error:
                log.warning("cannot revoke the metadata lease, it expires session=%x error=%s", lease, error)

    async def watch(self, span: KeySpan, start_revision: int) -> AsyncGenerator[WatchResponse, None]:
        """Yield the changes of the span from that revision on. Ends when etcd ends the watch; raises
        MetadataUnknown."""
        create = WatchCreateRequest(key=span.start, range_end=span.end, start_revision=start_revision, fragment=True)
        call = self._watch.Watch(metadata=self._carried)
        try:
            await self._call(lambda: call.write(WatchRequest(create_request=create)))
            while (answer := await self._call(call.read)) is not grpc.aio.EOF:
                yield answer
        finally:
            call.cancel()

    def give_up(self) -> None:
        """Mark the connection as broken."""
        self.broken.set()

    async def close(self) -> None:
        """Close the connection. Calls in flight end with MetadataUnknown."""
        self.broken.set()
        await self._channel.close()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and repeat it with a new token if its token is unknown. Raises what `_once` raises."""
        try:
            return await self._once(call)
        except _OldToken:
            await self.log_in()
            return await self._once(call)

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call. Raises MetadataUnknown, after which the link is broken, MetadataDenied, Outdated, and other
        MetadataErrors."""
        try:
            return await call()
        except AioRpcError as error:
            code, details = error.code(), f"{self.endpoint}: {error.details()}"
            if code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND):
                raise Outdated(details) from None
            text = str(error.details())
            if any(each in text for each in _OLD_TOKEN):
                raise (_OldToken if self._login is not None else MetadataDenied)(details) from None
            if any(each in text for each in _DENIED):
                who = "nobody" if self._login is None else self._login.user
                raise MetadataDenied(
                    f"{details}: etcd refuses {who}; check metadata.user and its roles in etcd"
                ) from None
            kind = _ERRORS.get(code, MetadataError)
            if kind is MetadataUnavailable and not str(error.details()).startswith(_ETCDS_OWN):
                kind = MetadataUnknown  # from HTTP/2 or a proxy: a request that was sent may still arrive
            if kind is MetadataUnknown:
                self.give_up()
            raise kind(details) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise MetadataUnknown(f"{self.endpoint}: the connection was given up") from None
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:  # of a channel that is closed already
            raise MetadataUnknown(f"{self.endpoint}: {error}") from error
