"""A watch as its reader sees it: changes, and the position behind the changes that were returned. Decides only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstore.client.core.operations import as_bytes, as_mapping
from kvstore.client.core.scanning import scan_bounds
from kvstore.client.core.values import Item
from kvstore.errors import InvalidRequest, OutcomeUnknown, Retryable, StoreError
from kvstore.proto import kv_pb2

HEARTBEAT_S, HEARTBEAT_S_MAX = 5.0, 86_400.0
SILENT_HEARTBEATS = 3
"""Number of heartbeats without a message after which the client changes to another server."""
POSITION_MAX = (1 << 63) - 1
Check = Callable[[kv_pb2.TopologyResponse, str], None]
"""Raises Unavailable if the topology that an address has sent belongs to another cluster."""


class Change(NamedTuple):
    """One put or delete, exactly as it was logged."""

    key: bytes
    item: Item | None
    """Item that the key holds now; None if it was deleted."""
    version: int
    """Version of a put, sequence of a delete. Rises with each change of a key."""
    time_ms: int
    """Time of the write by the leader's clock, in milliseconds since 1970."""
    partition: str
    expired: bool
    """True if the store deleted the key because it expired."""
    transaction: str = ""
    """Name of the transaction over several partitions that made the change, equal in all partitions. Empty for every
    other change."""
    transaction_keys: int = 0
    """Number of different keys that this transaction writes in all partitions. Some writes may change nothing."""


class WatchedKeys(NamedTuple):
    """The keys that a watch follows."""

    start: bytes
    end: bytes
    keys_only: bool = False
    heartbeat_s: float = HEARTBEAT_S

    @staticmethod
    def of(
        key: bytes | None, prefix: bytes, start: bytes, end: bytes, *, keys_only: bool, heartbeat_s: float
    ) -> WatchedKeys:
        """Return the keys to watch. Raises InvalidRequest unless the arguments name a key, a prefix, a range or
        everything."""
        if not isinstance(heartbeat_s, int | float) or not 0 < heartbeat_s <= HEARTBEAT_S_MAX:
            raise InvalidRequest(
                f"expected heartbeat_s to be more than 0 and at most {HEARTBEAT_S_MAX:g}, got {heartbeat_s!r}"
            )
        if key is not None:
            key = as_bytes(key)
            if prefix or start or end or not key:
                raise InvalidRequest("expected a key, a prefix or bounds to watch, got several of them")
            return WatchedKeys(key, key + b"\0", keys_only, heartbeat_s)
        return WatchedKeys(*scan_bounds(start, end, prefix), keys_only, heartbeat_s)

    @property
    def key(self) -> bytes | None:
        return self.start if self.end == self.start + b"\0" else None

    @property
    def patience_s(self) -> float:
        return SILENT_HEARTBEATS * self.heartbeat_s + 1.0


class WatchCursor:
    """The position of one reader. `take` receives a server's message, `give` returns its changes one by one, `request`
    resumes."""

    def __init__(self, watched: WatchedKeys, after: Mapping[str, int] | None, seen: Mapping[str, int]) -> None:
        self.watched = watched
        self.position: dict[str, int] = checked_positions("after", {} if after is None else after)
        """Position behind all changes that were returned; empty until a server reports where the watch begins."""
        self.is_ready = False
        """True if a server watches since the last `request`."""
        self._seen = dict(seen)
        self._changes: deque[tuple[kv_pb2.Change, str, int]] = deque()
        """Changes with their partition and the position behind them."""

    def request(self) -> kv_pb2.WatchRequest:
        """Return the request for any server. Changes that another server has sent and that are not returned yet come
        again."""
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
        """Forget the position, so that a server reports where the watch begins."""
        self._changes.clear()
        self.position = {}
        self.is_ready = False

    def take(self, message: kv_pb2.WatchResponse) -> None:
        """Take a server's next message. All changes of the previous message have been returned."""
        assert not self._changes, "the previous message must be consumed before the next one is taken"
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
        """Return the change that `give` returns next."""
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
        return Change(
            change.key,
            item,
            change.sequence,
            change.time_ms,
            partition,
            change.expired,
            change.transaction,
            change.transaction_keys,
        )

    def give(self) -> Change:
        """Return the next change and move `position` behind it."""
        given = self.next_change()
        _, partition, position = self._changes[0]
        # Nothing is called from here on, so an exception of a signal handler strikes before both statements or after
        # both. A change that a caller did not receive is returned again, and `position` is not behind it.
        self.position[partition] = position
        del self._changes[0]
        return given


def checked_positions(name: str, positions: Mapping[str, int]) -> dict[str, int]:
    """Return positions as a dict. Raises InvalidRequest for an impossible position: it would never reach a server, and
    the cluster would seem to be down."""
    for partition, sequence in as_mapping(name, positions, "partitions to sequences").items():
        if not isinstance(partition, str) or not is_count(sequence, POSITION_MAX):
            raise InvalidRequest(
                f"expected `{name}` as {{partition: sequence}} with sequences from 0 on, got "
                f"{partition!r}: {sequence!r}"
            )
    return dict(positions)


def is_count(value: object, most: int) -> bool:
    """Return True for a whole number from 0 to `most`. A bool is not one, although protobuf would accept it as
    0 or 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def is_final(error: StoreError) -> bool:
    """Return True if no server can continue the watch."""
    return not isinstance(error, Retryable | OutcomeUnknown)
