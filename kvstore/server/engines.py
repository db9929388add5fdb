"""Where the partitions' states are on this disk, and what becomes of one that is damaged: it is set aside, and the
replica is made anew as a newcomer's is, from the log or from another replica.

    partitions/<id>/engine            the state
    partitions/<id>/DAMAGED           why the process ended: the next start sets the state aside
    partitions/<id>/engine.damaged    a state that was set aside. It is never removed by itself, nor replaced
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial

from kvstore.env.ports import Disk
from kvstore.errors import ConfigError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.engine import Engine
from kvstore.partition.engine_rocks import EngineDamaged, RocksEngine
from kvstore.types import PartitionId

log = logging.getLogger(__name__)


class Engines:
    """`end` ends the process at once; it is called in any thread."""

    def __init__(self, disk: Disk, config: PartitionConfig, end: Callable[[str], None]) -> None:
        self._disk, self._config, self._end = disk, config, end

    def open(self, partition: PartitionId) -> Engine:
        """Raises OSError; ConfigError if the state is damaged and one was set aside before."""
        if self._disk.exists(_mark(partition)):
            self._set_aside(partition)
        try:
            return self._open(partition)
        except EngineDamaged as error:
            log.error("partition=%s %s", partition, error)
            self._set_aside(partition)
            return self._open(partition)

    def drop(self, partition: PartitionId) -> None:
        """Remove all that is here of the partition's state."""
        shutil.rmtree(self._disk.real_path(_home(partition)), ignore_errors=True)

    def spoil(self, partition: PartitionId) -> None:
        """Set aside the state of a replica that others have outvoted. One that was set aside before stays, as the first
        evidence, and this one goes. Raises OSError."""
        if self._disk.exists(_aside(partition)):
            shutil.rmtree(self._disk.real_path(_state(partition)), ignore_errors=True)
        else:
            self._set_aside(partition)

    def find(self) -> list[PartitionId]:
        """The partitions of which there is something here."""
        return [PartitionId(name) for name in self._disk.list("partitions")]

    def _open(self, partition: PartitionId) -> Engine:
        path = _state(partition)
        self._disk.mkdir(path)
        return RocksEngine(
            self._disk.real_path(path),
            write_buffer_bytes=self._config.write_buffer_bytes,
            block_cache_bytes=self._config.block_cache_bytes,
            on_damage=partial(self._note_damage, partition),
        )

    def _note_damage(self, partition: PartitionId, why: str) -> None:
        """Reads of it may fail for ever, and whatever is in memory came from it: go on without it."""
        mark = self._disk.open(_mark(partition), create=True)
        mark.pwrite(0, why.encode())
        mark.sync()
        mark.close()
        self._disk.sync_dir(_home(partition))
        self._end(f"partition {partition}: the state on this disk is damaged; the next start makes it anew: {why}")

    def _set_aside(self, partition: PartitionId) -> None:
        aside = _aside(partition)
        if self._disk.exists(aside):
            raise ConfigError(
                f"partition {partition}: the state on this disk is damaged, and one was set aside before: remove "
                f"{self._disk.real_path(aside)} if the partition's other replicas are well, and start again"
            )
        if self._disk.exists(_mark(partition)):
            self._disk.remove(_mark(partition))
        self._disk.rename(_state(partition), aside)
        self._disk.sync_dir(_home(partition))
        log.error(
            "partition=%s the damaged state is set aside as %s, and made anew from the log or another replica",
            partition,
            self._disk.real_path(aside),
        )


def _home(partition: PartitionId) -> str:
    return f"partitions/{partition}"


def _state(partition: PartitionId) -> str:
    return f"{_home(partition)}/engine"


def _aside(partition: PartitionId) -> str:
    return f"{_home(partition)}/engine.damaged"


def _mark(partition: PartitionId) -> str:
    return f"{_home(partition)}/DAMAGED"
