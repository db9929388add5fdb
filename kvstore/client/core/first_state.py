"""The state with which a watch begins: its reader gets the present items and then each change of them, none missed and
none twice (docs/protocol.md F8). Decides only.

First the watch begins at some positions. Then the range is read, no older than these positions (P22). So everything
written up to the positions is in the state. Everything written behind them comes by the watch, and may be in the state
too. Keys of the second kind are remembered with their version until the watch has passed it: the versions of one key
rise over all partitions (M9).
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
"""Maximum number of remembered keys: keys that were written while the state was read, or all keys that were read after
the ring changed."""
RESTARTS_MAX = 3
"""Maximum number of restarts because no key was read with the ring that the client knew when the watch began."""


class FirstState:
    """The state of a watched range, item by item. Call `begin` when the watch has its positions."""

    def __init__(self, watched: WatchedKeys, seen: ClientState, absorb: Callable[[Mapping[str, int]], None]) -> None:
        """`absorb` makes the client's reads wait for positions."""
        self._watched, self._seen, self._absorb = watched, seen, absorb
        self._ring_version = seen.routing.ring_version
        """Ring before the watch began: a partition that owned a key by this ring had received it before the watch's
        positions."""
        self._begin: dict[str, int] = {}
        self._scan: RangeScan | None = None
        self._has_read = False
        self._restarts = 0
        self._found: deque[tuple[bytes, Item]] = deque()
        self._owners = set[str]()
        """Partitions that owned the remembered keys when they were read."""
        self._versions: dict[bytes, int] = {}
        """Version up to which the changes of a key are in the state; the watch may return these changes too."""
        self._failure = ""
        """Reason why the rest of the state cannot be read."""
        self._end: dict[str, int] = {}
        """No sequence in the state is behind these."""

    @staticmethod
    def of(
        watched: WatchedKeys,
        after: Mapping[str, int] | None,
        seen: ClientState,
        absorb: Callable[[Mapping[str, int]], None],
    ) -> FirstState:
        """Return the state of a watch. Raises InvalidRequest if the watch continues at a position, because its reader
        has had the state before."""
        if after:
            raise InvalidRequest(
                "expected either a position to continue from (`after`) or the state first (`with_state`), got both"
            )
        return FirstState(watched, seen, absorb)

    def begin(self, position: Mapping[str, int]) -> None:
        """Take the positions at which the watch begins; later calls do nothing. Raises Overloaded if `take` has: the
        state lacks keys, and a reader that continued would not see which."""
        if self._failure:
            raise Overloaded(self._failure)
        if self._scan is not None:
            return
        self._begin = dict(position)
        self._absorb(position)  # later reads wait for it: a leader that is behind the position refuses
        flags = kv_pb2.KEYS_ONLY * self._watched.keys_only
        bounds = Bounds(self._watched.start, self._watched.end)
        self._scan = RangeScan(self._seen.routing, bounds, limit=0, level=Level.LINEARIZABLE, flags=flags)

    # docs/protocol.md F8
    def should_restart(self) -> bool:
        """Return True if the watch must take new positions, for another `begin`. An idle client learns the current ring
        from its first read; by the older ring every key would count as written meanwhile."""
        known = self._seen.routing.ring_version
        if self._scan is None or self._has_read or known == self._ring_version or self._restarts == RESTARTS_MAX:
            return False
        self._restarts += 1
        self._ring_version, self._scan = known, None
        return True

    @property
    def is_over(self) -> bool:
        """True if the whole state has been returned."""
        return self._scan is not None and self._scan.is_done and not self._found and not self._failure

    @property
    def is_short(self) -> bool:
        """True if more must be read before an item can be returned. The reader must see that the last item is
        the last."""
        return self._scan is not None and not self._scan.is_done and len(self._found) < 2

    @property
    def has_more(self) -> bool:
        return bool(self._found)

    def wanted(self) -> list[ClientOperation]:
        assert self._scan is not None, "the watch has begun"
        return self._scan.wanted()

    def take(self, answers: Answers) -> None:
        """Take the results of reads. Raises Moved if no newer ring is known, and Overloaded if too many keys were
        written meanwhile."""
        assert self._scan is not None, "the watch has begun"
        routing = self._seen.routing
        for key, item in self._scan.take(answers):
            self._has_read = True
            is_old = routing.ring_version == self._ring_version and item.version <= self._begin.get(
                routing.partition_of(key), -1
            )
            if not is_old:
                if len(self._versions) >= REMEMBERED_MAX:
                    self._failure = (
                        f"more than {REMEMBERED_MAX} keys were written while the state was read; watch a smaller range"
                    )
                    raise Overloaded(self._failure)
                self._versions[key] = item.version
                self._owners.add(routing.partition_of(key))
            self._found.append((key, item))
        if self._scan.is_done:
            self._end = dict(self._seen.tokens)

    def give(self) -> Change:
        """Return the next item, as the change that wrote it."""
        key, item = self._found[0]
        partition = self._seen.routing.partition_of(key)
        given = Change(key, item, item.version, item.written_ms, partition, False)
        del self._found[0]  # the last step, so that an exception of a signal handler strikes before it or after it
        return given

    def is_news(self, change: Change, position: Mapping[str, int]) -> bool:
        """Return True if a change of the watch is not in the state already. `position` is the watch's, before or behind
        the change. Idempotent."""
        if not self._versions:
            return True
        had = self._versions.get(change.key, 0)
        # A partition that owns such a key and is not followed yet still has all of its log before it.
        if all(position.get(owner, -1) >= self._end.get(owner, 0) for owner in self._owners):
            self._versions.clear()
        return change.version > had
