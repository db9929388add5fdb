"""A watch as its reader sees it: changes, and the position behind those that he has had. Decides only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstore.client.core.operations import as_bytes
from kvstore.client.core.scanning import scan_bounds
from kvstore.client.core.values import Item
from kvstore.errors import InvalidRequest, OutcomeUnknown, Retryable, StoreError
from kvstore.proto import kv_pb2

HEARTBEAT_S, HEARTBEAT_S_MAX = 5.0, 86_400.0
SILENT_HEARTBEATS = 3
"""A server that has sent nothing for so many heartbeats is left for another."""
POSITION_MAX = (1 << 63) - 1
Check = Callable[[kv_pb2.TopologyResponse, str], None]
"""Raises Unavailable if the topology that an address has given is another cluster's."""


class Change(NamedTuple):
    """One put or delete, exactly as it was logged."""

    key: bytes
    item: Item | None
    """What the key holds now; None: it was deleted."""
    version: int
    """A put's version, a delete's sequence. Those of one key rise."""
    time_ms: int
    """When it was written, by the leader's clock: milliseconds since 1970."""
    partition: str
    expired: bool
    """Of a delete: by the store, because the key's time was over."""


class WatchedKeys(NamedTuple):
    """The keys that a watch is about."""

    start: bytes
    end: bytes
    keys_only: bool = False
    heartbeat_s: float = HEARTBEAT_S

    @staticmethod
    def of(
        key: bytes | None, prefix: bytes, start: bytes, end: bytes, *, keys_only: bool, heartbeat_s: float
    ) -> WatchedKeys:
        """Raises InvalidRequest unless it is one of a key, a prefix, a range, or everything."""
        if not 0 < heartbeat_s <= HEARTBEAT_S_MAX:
            raise InvalidRequest(
                f"want a heartbeat_s of more than 0 and at most {HEARTBEAT_S_MAX:g}, got {heartbeat_s!r}"
            )
        if key is not None:
            key = as_bytes(key)
            if prefix or start or end or not key:
                raise InvalidRequest("want a key, or a prefix, or bounds to watch, not several of them")
            return WatchedKeys(key, key + b"\0", keys_only, heartbeat_s)
        return WatchedKeys(*scan_bounds(start, end, prefix), keys_only, heartbeat_s)

    @property
    def key(self) -> bytes | None:
        return self.start if self.end == self.start + b"\0" else None

    @property
    def patience_s(self) -> float:
        return SILENT_HEARTBEATS * self.heartbeat_s + 1.0


class WatchCursor:
    """The place of one reader. `take` what a server sends; `give` it out change by change; `request` to go on."""

    def __init__(self, watched: WatchedKeys, after: Mapping[str, int] | None, seen: Mapping[str, int]) -> None:
        self.watched = watched
        self.position: dict[str, int] = checked_positions("after", after or {})
        """Behind everything that was given out; empty as long as no server has said where the watch begins."""
        self.is_ready = False
        """Whether a server watches since the last `request`."""
        self._seen = dict(seen)
        self._changes: deque[tuple[kv_pb2.Change, str, int]] = deque()
        """With its partition, and the position once it has been given."""

    def request(self) -> kv_pb2.WatchRequest:
        """To be sent to a server, any one; what another had sent and is not given out yet comes again."""
        self._changes.clear()
        self.is_ready = False
        watched = self.watched
        return kv_pb2.WatchRequest(
            start=watched.start,
            end=watched.end,
            after=self.position,
            seen={} if self.position else self._seen,
            heartbeat_ms=max(1, int(watched.heartbeat_s * 1000)),
            keys_only=watched.keys_only,
        )

    def restart(self) -> None:
        """Forget where it stands; a server says where it begins."""
        self._changes.clear()
        self.position = {}
        self.is_ready = False

    def take(self, message: kv_pb2.WatchResponse) -> None:
        """The server's next message. All of the former one has been given out."""
        assert not self._changes, "messages are taken one by one"
        self.is_ready = True
        if message.positions:
            self.position = dict(message.positions)
        last = len(message.changes) - 1
        for place, change in enumerate(message.changes):
            position = message.sequence if place == last else change.sequence
            self._changes.append((change, message.partition, position))
        if message.partition and last < 0:
            self.position[message.partition] = message.sequence

    @property
    def has_more(self) -> bool:
        return bool(self._changes)

    def next_change(self) -> Change:
        """The change that `give` returns next."""
        change, partition, _ = self._changes[0]
        item = None
        if change.HasField("record"):
            item = Item(
                change.record.value,
                change.record.version,
                change.record.created,
                change.record.written_ms,
                change.record.expires_ms,
            )
        return Change(change.key, item, change.sequence, change.time_ms, partition, change.expired)

    def give(self) -> Change:
        """The next change; `position` moves behind it."""
        given = self.next_change()
        _, partition, position = self._changes[0]
        # Nothing is called from here on, so an exception of a signal handler strikes before both or after both: a
        # change that a caller did not get is given again, and `position` is not behind it.
        self.position[partition] = position
        del self._changes[0]
        return given


def checked_positions(name: str, positions: Mapping[str, int]) -> dict[str, int]:
    """Raises InvalidRequest for what no position can be: no server would hear of it, so that it seemed to be away."""
    for partition, sequence in positions.items():
        if not isinstance(partition, str) or not is_count(sequence, POSITION_MAX):
            raise InvalidRequest(
                f"want `{name}` as {{partition: sequence}}, from 0 on, got {partition!r}: {sequence!r}"
            )
    return dict(positions)


def is_count(value: object, most: int) -> bool:
    """Whether it is a whole number from 0 to `most`. A bool is none: protobuf would take it for 0 or 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def is_final(error: StoreError) -> bool:
    """Whether no server will go on with the watch."""
    return not isinstance(error, Retryable | OutcomeUnknown)
