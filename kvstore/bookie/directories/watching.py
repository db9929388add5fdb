"""Makes the node's metadata session depend on the disks of its bookie."""

from __future__ import annotations

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.spread import AnyStorage, SpreadStorage
from kvstore.env.liveness.port import Hung, Liveness


# docs/protocol.md P45, B24
def watch_disks(liveness: Liveness, config: BookieConfig, storage: AnyStorage) -> None:
    """Watch the disks of every directory. If one of several hangs, it is treated as if a write had failed. Raises
    OSError."""
    if isinstance(storage, SpreadStorage):
        for part in storage.parts:
            _watch(liveness, part.config, part.storage.journal.fail)
    else:
        _watch(liveness, config, None)


def _watch(liveness: Liveness, config: BookieConfig, on_hung: Hung | None) -> None:
    for path in dict.fromkeys((config.journal_dir, config.index_dir)):
        liveness.watch_disk(path, on_hung)
