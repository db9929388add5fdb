"""The state with which a watch begins, so that its reader has what is there and then each change of it: none missed,
none twice (docs/protocol.md F8). Decides only.

The watch begins first, at some positions. Then the range is read, no older than these (P22): so what was written up to
them is in the state, and what was written behind them is in the watch, and perhaps in the state too. Such a key is
remembered with its version until the watch has come past it: versions of one key rise over all partitions (M9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from kvstore.client.core.fanout import Answers, RangeScan
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.scanning import Bounds
from kvstore.client.core.session import ClientState
from kvstore.client.core.values import Item, Level
from kvstore.client.core.watching import Change, WatchedKeys
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.proto import kv_pb2

REMEMBERED_MAX = 100_000
"""Keys that were written while the state was read; or all that were read after the ring had changed meanwhile."""
RESTARTS_MAX = 3
"""Times that a watch begins anew because nothing was read by the ring that its client had known before."""


class FirstState:
    """The state of a watched range, item by item. `begin` when the watch has its positions."""

    def __init__(self, watched: WatchedKeys, seen: ClientState, absorb: Callable[[Mapping[str, int]], None]) -> None:
        """`absorb` lets the client's reads name positions."""
        self._watched, self._seen, self._absorb = watched, seen, absorb
        self._ring_version = seen.routing.ring_version
        """Before the watch began: by this ring, what has come to a partition came before the watch's positions."""
        self._begin: dict[str, int] = {}
        self._scan: RangeScan | None = None
        self._has_read = False
        self._restarts = 0
        self._found: deque[tuple[bytes, Item]] = deque()
        self._owners = set[str]()
        """The partitions that owned what is remembered, when it was read."""
        self._versions: dict[bytes, int] = {}
        """Keys whose changes up to this version are in the state, and may come by the watch too."""
        self._failure = ""
        """Why there is no rest of the state."""
        self._end: dict[str, int] = {}
        """No sequence in the state lies behind these."""

    @staticmethod
    def of(
        watched: WatchedKeys,
        after: Mapping[str, int] | None,
        seen: ClientState,
        absorb: Callable[[Mapping[str, int]], None],
    ) -> FirstState:
        """Raises InvalidRequest for a watch that goes on at a position: what was there before, its reader has had."""
        if after:
            raise InvalidRequest("want a position to go on from (`after`), or the state first (`with_state`), not both")
        return FirstState(watched, seen, absorb)

    def begin(self, position: Mapping[str, int]) -> None:
        """Take the positions at which the watch begins; from the second time on nothing. Raises Overloaded if `take`
        has: what it had read lacks keys, and a reader who goes on would not see which."""
        if self._failure:
            raise Overloaded(self._failure)
        if self._scan is not None:
            return
        self._begin = dict(position)
        self._absorb(position)  # reads name it from now on: a leader that is behind it refuses
        flags = kv_pb2.KEYS_ONLY * self._watched.keys_only
        bounds = Bounds(self._watched.start, self._watched.end)
        self._scan = RangeScan(self._seen.routing, bounds, limit=0, level=Level.LINEARIZABLE, flags=flags)

    # docs/protocol.md F8
    def should_restart(self) -> bool:
        """Whether the watch shall take new positions, for another `begin`. A client that was idle hears of the present
        ring by its first read: judged by the ring that it had known, everything would count as written meanwhile."""
        known = self._seen.routing.ring_version
        if self._scan is None or self._has_read or known == self._ring_version or self._restarts == RESTARTS_MAX:
            return False
        self._restarts += 1
        self._ring_version, self._scan = known, None
        return True

    @property
    def is_over(self) -> bool:
        """Whether all of it has been given out."""
        return self._scan is not None and self._scan.is_done and not self._found and not self._failure

    @property
    def is_short(self) -> bool:
        """Whether more must be read before something is given out: who gets the last item shall see that it is that."""
        return self._scan is not None and not self._scan.is_done and len(self._found) < 2

    @property
    def has_more(self) -> bool:
        return bool(self._found)

    def wanted(self) -> list[ClientOperation]:
        assert self._scan is not None, "the watch has begun"
        return self._scan.wanted()

    def take(self, answers: Answers) -> None:
        """Take in what was read. Raises Moved if no newer ring is known by which to ask again, and Overloaded if too
        much was written meanwhile."""
        assert self._scan is not None, "the watch has begun"
        routing = self._seen.routing
        for key, item in self._scan.take(answers):
            self._has_read = True
            is_old = routing.ring_version == self._ring_version and item.version <= self._begin.get(
                routing.partition_of(key), -1
            )
            if not is_old:
                if len(self._versions) >= REMEMBERED_MAX:
                    self._failure = f"more than {REMEMBERED_MAX} keys were written while the state was read"
                    raise Overloaded(self._failure)
                self._versions[key] = item.version
                self._owners.add(routing.partition_of(key))
            self._found.append((key, item))
        if self._scan.is_done:
            self._end = dict(self._seen.tokens)

    def give(self) -> Change:
        """The next item, as the change that wrote it."""
        key, item = self._found[0]
        partition = self._seen.routing.partition_of(key)
        given = Change(key, item, item.version, item.written_ms, partition, False)
        del self._found[0]  # as the last step: an exception of a signal handler strikes before it or after it
        return given

    def is_news(self, change: Change, position: Mapping[str, int]) -> bool:
        """Whether a change of the watch is not in the state already. `position` is the watch's, before the change or
        behind it. May be asked again of the same change."""
        if not self._versions:
            return True
        had = self._versions.get(change.key, 0)
        # One that owns such a key and is not followed yet has all of its log before it.
        if all(position.get(owner, -1) >= self._end.get(owner, 0) for owner in self._owners):
            self._versions.clear()
        return change.version > had
