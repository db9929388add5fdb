"""Standing watches of paths: decides which are called after an event of etcd's. One watch of the whole tree feeds them
all."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.meta import paths
from kvstore.meta.etcd.keys import EtcdKeys
from kvstore.meta.watch_call import WatchCall
from kvstore.proto.etcd_pb2 import Event


class EtcdWatches:
    """The open watches of a metadata store in etcd, by path."""

    def __init__(self, keys: EtcdKeys) -> None:
        self._keys = keys
        self._standing: dict[str, list[EtcdPathWatch]] = {}

    def add(self, path: str, changed: Callable[[], None]) -> EtcdPathWatch:
        """Add a watch. Raises ValueError for a malformed path."""
        paths.check(path)
        watch = EtcdPathWatch(self, path, changed)
        self._standing.setdefault(path, []).append(watch)
        return watch

    def remove(self, watch: EtcdPathWatch) -> None:
        standing = self._standing.get(watch.path, [])
        if watch in standing:
            standing.remove(watch)
            if not standing:
                del self._standing[watch.path]

    def has(self, watch: EtcdPathWatch) -> bool:
        return watch in self._standing.get(watch.path, ())

    def on_event(self, event: Event) -> None:
        """Call the watches of a node that has changed, and those of a node whose set of children has changed."""
        path = self._keys.path_or_none(event.kv.key)
        if path is None:
            return
        self._call(path)
        if event.type == Event.DELETE or event.kv.version == 1:
            self._call(paths.parent(path))

    def call_all(self) -> None:
        """Call all watches, because anything may have changed."""
        for path in list(self._standing):
            self._call(path)

    def _call(self, path: str) -> None:
        for watch in list(self._standing.get(path, ())):
            watch.call_soon()


class EtcdPathWatch:
    """One caller's watch of a path."""

    def __init__(self, watches: EtcdWatches, path: str, changed: Callable[[], None]) -> None:
        self.path = path
        self._watches = watches
        self.call_soon = WatchCall(changed, lambda: watches.has(self)).call_soon

    def close(self) -> None:
        self._watches.remove(self)
