"""Watches over HTTP: the change feed as server-sent events.

    id: p1=17                      the position at which the watch continues after this event
    event: change                  or position (a heartbeat without news), or error (the last event)
    data: {…}

A browser's EventSource reconnects by itself with the last id. A client that reads nothing is disconnected, as at the
other endpoints. One message of one partition waits for it, and no other client does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvstore.env.networks import network_of
from kvstore.env.shared_slots import SharedSlots
from kvstore.errors import NotAuthenticated, PermissionDenied, StoreError, Unavailable
from kvstore.proto import kv_pb2
from kvstore.rpc.http.messages import HttpRequest
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.feed.feeds import Feeds
from kvstore.server.feed.watch import send_watch
from kvstore.server.gateway import answers, requests, routes
from kvstore.server.gateway.requests import ParsedRequest

RETRY_MS = 2_000
"""Milliseconds after which a browser whose stream has ended reconnects."""
EXACT_MAX = 16
"""Number of partitions up to which every change has an id. An id names all partitions that are followed. With more
partitions, only the last change of a message has an id, so a client that reconnects may see some changes of that
message again."""
WRITE_BYTES = 64 << 10
"""Approximate number of bytes written before the stream waits for the network."""
END_S = 5.0
"""Time in seconds that a client that reads nothing has to take the reason."""
HEADERS = {**answers.COMMON, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
STOPS = "the node is stopping; continue at another node after the last id"


class _OpenWatch:
    """A watch that is being served."""

    __slots__ = ("check", "refused", "timeout")

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check
        self.refused: StoreError | None = None
        self.timeout = asyncio.timeout(None)

    def end(self, why: StoreError) -> None:
        if self.refused is None:
            self.refused = why
            self.timeout.reschedule(asyncio.get_running_loop().time())


class HttpWatches:
    """The watches that one server serves over HTTP."""

    def __init__(self, feeds: Feeds, authenticator: HttpAuthenticator, watches_max: int) -> None:
        self._feeds = feeds
        self.slots = SharedSlots(watches_max, "HTTP watches")
        self._open: dict[_OpenWatch, None] = {}
        self._forget = authenticator.on_change(self._recheck)

    def close(self) -> None:
        """End all watches. Their clients reconnect to other nodes."""
        self._forget()
        for each in list(self._open):
            each.end(Unavailable(STOPS))

    async def serve(
        self,
        request: HttpRequest,
        asked: ParsedRequest,
        watch: kv_pb2.WatchRequest,
        check: Callable[[], None],
        note: Callable[[StoreError], None],
        user: str,
    ) -> None:
        """Send changes until the client disconnects. `check` must raise an error once the user may no longer see the
        changes; the watch then ends, and `note` is called with that error. `user` is empty if access control is off.
        Raises StoreError only if nothing has been sent yet."""
        stream, opened = EventStream(request, asked), _OpenWatch(check)
        owner = user or network_of(request.remote)
        self._open[opened] = None
        try:
            async with opened.timeout, self.slots.place(owner):
                await send_watch(self._feeds, watch, stream, owner)
        except ConnectionError:
            return
        except TimeoutError:
            if opened.refused is None:
                raise
            error: StoreError = opened.refused
            if isinstance(error, NotAuthenticated | PermissionDenied):
                note(error)
        except StoreError as failure:
            error = failure
        finally:
            self._open.pop(opened, None)
        if not stream.is_begun:
            raise error
        await stream.fail(error)

    def _recheck(self) -> None:
        """Apply a new access table: end the watches that are no longer allowed."""
        for opened in list(self._open):
            try:
                opened.check()
            except StoreError as error:
                opened.end(error)


class EventStream:
    """Writes the messages of one watch as server-sent events. The response headers are sent with the first event."""

    def __init__(self, request: HttpRequest, asked: ParsedRequest) -> None:
        self.is_begun = False
        self._request, self._send = request, request.connection.send
        self._as_base64 = asked.get(routes.ENCODING) == "base64"
        self._keys_only = bool(asked.get(routes.KEYS_ONLY))
        self._position: dict[str, int] = {}

    async def write(self, message: kv_pb2.WatchResponse) -> None:
        """Write the events of a message, and return when the network can accept more. Raises ConnectionError."""
        if not self.is_begun:
            self.is_begun = True
            await self._request.stream(HEADERS)
            await self._send(b"retry: %d\n\n" % RETRY_MS)
        if not message.changes:
            self._position = dict(message.positions)
            return await self._send(_event("position", b"{}", requests.token_text(self._position)))
        gathered, size = list[bytes](), 0
        for number, change in enumerate(message.changes, start=1):
            is_last = number == len(message.changes)
            self._position[message.partition] = message.sequence if is_last else change.sequence
            shown = answers.change_of(message.partition, change, as_base64=self._as_base64, keys_only=self._keys_only)
            has_id = is_last or len(self._position) <= EXACT_MAX
            event = _event("change", msgspec.json.encode(shown), self._id() if has_id else "")
            gathered.append(event)
            size += len(event)
            if size >= WRITE_BYTES or is_last:
                await self._send(b"".join(gathered))
                gathered, size = [], 0
        return None

    async def fail(self, error: StoreError) -> None:
        """Send the reason why the watch ends. If the client reads nothing, abort the connection."""
        try:
            async with asyncio.timeout(END_S):
                await self._send(_event("error", answers.error_reply(error).body, ""))
        except ConnectionError:
            return  # the client has disconnected
        except TimeoutError:
            self._request.connection.abort()

    def _id(self) -> str:
        return requests.token_text(self._position)


def _event(kind: str, data: bytes, id_: str) -> bytes:
    head = f"id: {id_}\n" if id_ else ""
    return b"%bevent: %b\ndata: %b\n\n" % (head.encode(), kind.encode(), data)
