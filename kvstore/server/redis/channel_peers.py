"""Sends published messages to the other servers, whose clients may subscribe to their channels.

    partition "channels", method "publish", body := MessagePack of [[channel, message], ...]

Every message goes to every other server, as in Redis Cluster: only the receiving server knows its subscribers. All
messages that are published while a call to a server is in progress leave in the next call. A message that cannot be
delivered is dropped, because Pub/Sub promises delivery at most once. The called server answers when it has delivered
the messages, so a server with many subscribers slows down its callers' calls and not its own event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.env import Env
from kvstore.errors import InvalidRequest, Overloaded, StoreError
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.server.peer_calls import PeerCalls
from kvstore.server.redis.channels import CHANNEL_BYTES_MAX, Channels
from kvstore.types import PartitionId, ServerId

CHANNELS = PartitionId("channels")
PUBLISH = "publish"
CALL_BYTES_MAX = 256 << 10
"""Maximum number of bytes of the messages of one call. A single message may be larger. Calls that renew leases wait
behind it on the same link."""
OUTBOX_BYTES_MAX = 8 << 20
"""Maximum number of bytes of messages that wait for one server. Further messages to that server are dropped."""
MESSAGE_BYTES = 160
"""Bytes of memory that a message takes in addition to its own bytes."""
TIMEOUT_S = 2.0
"""Time in seconds after which a call counts as failed. Its messages may or may not have arrived. The called server
drops the messages that it has not delivered by then."""
PAUSE_S = 0.5
"""Time in seconds between a failed call and the next call to the same server. To a server that refuses connections, a
busy publisher would otherwise connect a thousand times per second."""

_Messages = list[
    tuple[
        Annotated[bytes, Meta(min_length=1, max_length=CHANNEL_BYTES_MAX)],
        Annotated[bytes, Meta(max_length=VALUE_BYTES_MAX)],
    ]
]
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Messages)


class _Outbox:
    """The messages that wait for one server."""

    def __init__(self) -> None:
        self.messages: deque[tuple[bytes, bytes]] = deque()
        self.bytes = 0

    def add(self, message: tuple[bytes, bytes]) -> bool:
        """Add a message, or return False if the outbox is full."""
        size = _size(message)
        if self.bytes + size > OUTBOX_BYTES_MAX:
            return False
        self.messages.append(message)
        self.bytes += size
        return True

    def take(self) -> list[tuple[bytes, bytes]]:
        """Remove and return the messages for the next call, at least one."""
        taken = [self.messages.popleft()]
        size = _size(taken[0])
        while self.messages and size + (more := _size(self.messages[0])) <= CALL_BYTES_MAX:
            taken.append(self.messages.popleft())
            size += more
        self.bytes -= size
        return taken


def _size(message: tuple[bytes, bytes]) -> int:
    return len(message[0]) + len(message[1]) + MESSAGE_BYTES


class ChannelPeers:
    """Exchanges messages with the other servers. A server has one outbox and at most one call in progress for each
    other server, so that the messages of one publisher arrive in order."""

    def __init__(
        self,
        env: Env,
        server: ServerId,
        peers: PeerCalls,
        servers: Callable[[], Collection[ServerId]],
        channels: Channels,
    ) -> None:
        """`servers` returns the servers of the cluster."""
        self.dropped = 0
        """Number of messages that did not or may not have reached another server, counted once per server."""
        self._server, self._peers, self._servers, self._channels = server, peers, servers, channels
        self._nursery = env.nursery.child("channels")
        self._now = env.clock.now
        self._outboxes: dict[ServerId, _Outbox] = {}
        """Outboxes of the servers to which messages are being sent."""
        self._receiving: set[ServerId] = set()
        """Servers whose messages are being delivered."""
        self._is_closed = False
        channels.send = self.send

    def send(self, channel: bytes, message: bytes) -> None:
        """Send a message to all other servers soon."""
        if self._is_closed:
            return
        both = channel, message  # shared by all outboxes
        for server in sorted(self._servers()):
            if server == self._server:
                continue
            outbox = self._outboxes.get(server)
            if outbox is None:
                outbox = self._outboxes[server] = _Outbox()
                self._nursery.spawn(self._drain(server, outbox), name=f"to {server}")
            self.dropped += not outbox.add(both)

    async def _drain(self, server: ServerId, outbox: _Outbox) -> None:
        while outbox.messages:
            if server not in self._servers():  # it has left the cluster
                self.dropped += len(outbox.messages)
                break
            taken = outbox.take()
            try:
                await self._peers.call(server, CHANNELS, PUBLISH, _encoder.encode(taken), TIMEOUT_S)
            except StoreError:
                self.dropped += len(taken)
                await asyncio.sleep(PAUSE_S)
        del self._outboxes[server]

    async def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Deliver the messages that another server sent, in order. Raises InvalidRequest, and Overloaded if some of
        them were dropped because this server has too much to deliver."""
        try:
            messages = _decoder.decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"expected channels and messages: {error}") from error
        if server in self._receiving:  # its previous call timed out
            raise Overloaded(f"the previous messages of {server} are still being delivered")
        self._receiving.add(server)
        try:
            await self._deliver(messages)
        finally:
            self._receiving.discard(server)
        return b""

    async def _deliver(self, messages: _Messages) -> None:
        channels, until = self._channels, self._now() + TIMEOUT_S
        for channel, message in messages:
            if channels.work.is_busy:
                await channels.work.wait_free()
                if self._now() > until:
                    raise Overloaded("the subscribers of this server get more messages than it can send")
            channels.deliver(channel, message)

    def statistics(self) -> dict[str, int]:
        return {"channel_messages_dropped_total": self.dropped}

    async def close(self) -> None:
        self._is_closed = True
        await self._nursery.close()
