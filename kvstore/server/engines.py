"""Manages the states of replicas on this disk.

A damaged state is set aside, and the replica is rebuilt like a new one, from the log or from another replica. The state
of a replica that has left this server is retired: it is kept for a while and reused if the replica comes back
(docs/protocol.md H10).

    partitions/<id>/engine                    the state
    partitions/<id>/DAMAGED                   why the process ended: the next start sets the state aside
    partitions/<id>/engine.damaged            a damaged state that was set aside; never removed or replaced
    automatically
    partitions/<id>.retired-<number>-<age>    everything of a replica that has left. The highest number is the latest;
                                              the age is in seconds of running processes, independent of wall clocks
    partitions/<id>.removed-<number>          being removed: what a crash leaves of it is never opened
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from threading import Thread

from kvstore.env.ports import Disk
from kvstore.errors import ConfigError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.engine_rocks import EngineDamaged, RocksEngine
from kvstore.partition.state.rocks_memory import RocksMemory
from kvstore.server.config import STATES
from kvstore.types import PartitionId

log = logging.getLogger(__name__)

_REMOVED = re.compile(r"(.+)\.removed-(\d+)")
_RETIRED = re.compile(r"(.+)\.retired-(\d+)-(\d+)")


class Engines:
    """The states of the replicas on one disk. `end` ends the process at once and may be called in any thread."""

    def __init__(self, disk: Disk, config: PartitionConfig, end: Callable[[str], None]) -> None:
        self._disk, self._config, self._end = disk, config, end
        self._memory = RocksMemory(config.memory_bytes)
        self._delete([f"{STATES}/{name}" for name in self._disk.list(STATES) if _REMOVED.fullmatch(name)])

    def open(self, partition: PartitionId) -> Engine:
        """Open the partition's state, or the state that was retired last. Raises OSError, and ConfigError if the state
        is damaged and another damaged state was already set aside."""
        self._take_back(partition)
        if self._disk.exists(_mark(partition)):
            self._set_aside(partition)
        try:
            return self._open(partition)
        except EngineDamaged as error:
            log.error("partition=%s %s", partition, error)
            self._set_aside(partition)
            return self._open(partition)

    def retire(self, partition: PartitionId) -> None:
        """Set aside everything of a partition whose state is not in use. Raises OSError."""
        if self._disk.exists(_home(partition)):
            number = 1 + max((number for id_, number, _, _ in self._retired() if id_ == partition), default=0)
            self._rename(_home(partition), f"{_home(partition)}.retired-{number}-0")

    def age_retired(self, seconds: int, keep_s: float) -> None:
        """Age the retired states by `seconds` and remove those of at least `keep_s`. Raises OSError."""
        for partition, number, age, path in self._retired():
            if age + seconds >= keep_s:
                log.info(
                    "partition=%s removing its retired state, which has reached its age limit: %s", partition, path
                )
                self._remove(partition, path)
            else:
                # Not synced: if a power failure undoes the step, the state is kept longer.
                self._disk.rename(path, f"{_home(partition)}.retired-{number}-{age + seconds}")

    def set_damaged_aside(self, partition: PartitionId) -> None:
        """Set aside the state of a replica that others have outvoted. If a damaged state was set aside before, it is
        kept as the first evidence and this state is removed. Raises OSError."""
        if self._disk.exists(_aside(partition)):
            self._remove(partition, _state(partition))
        else:
            self._set_aside(partition)

    def find(self) -> list[PartitionId]:
        """Return the partitions that have a state here which is not retired."""
        names = [name for name in self._disk.list(STATES) if not name.startswith(".")]
        return [PartitionId(name) for name in names if not (_RETIRED.fullmatch(name) or _REMOVED.fullmatch(name))]

    def statistics(self) -> dict[str, int]:
        """Return how much of the shared memory the open states use."""
        return self._memory.statistics()

    def _take_back(self, partition: PartitionId) -> None:
        """Reuse the retired state of a replica that has come back. Other replicas do not rely on it, but it may be the
        last copy."""
        found = [each for each in self._retired() if each[0] == partition]
        if found and not self._disk.exists(_home(partition)):
            path = max(found, key=lambda each: each[1])[3]
            self._rename(path, _home(partition))
            log.info("partition=%s is assigned here again, reusing its retired state %s", partition, path)

    def _retired(self) -> list[tuple[PartitionId, int, int, str]]:
        """Return (partition, number, age, path) of each retired state."""
        names = filter(None, map(_RETIRED.fullmatch, self._disk.list(STATES)))
        return [(PartitionId(name[1]), int(name[2]), int(name[3]), f"{STATES}/{name[0]}") for name in names]

    def _rename(self, old: str, new: str) -> None:
        self._disk.rename(old, new)
        self._disk.sync_dir(STATES)

    def _remove(self, partition: PartitionId, path: str) -> None:
        """Remove a state in one step. A partly removed state could look complete or damaged."""
        found = filter(None, map(_REMOVED.fullmatch, self._disk.list(STATES)))
        number = 1 + max((int(each[2]) for each in found if each[1] == partition), default=0)
        removed = f"{_home(partition)}.removed-{number}"
        self._rename(path, removed)
        self._delete([removed])

    def _delete(self, paths: list[str]) -> None:
        """Delete trees in a background thread: a large state takes seconds, and leases must be renewed meanwhile."""
        if paths:
            real = [self._disk.real_path(path) for path in paths]
            try:
                Thread(target=_delete_trees, args=(real,), name="delete states", daemon=True).start()
            except RuntimeError as error:
                log.warning("removed states stay on the disk until the next start: %s", error)

    def _open(self, partition: PartitionId) -> Engine:
        path = _state(partition)
        self._disk.mkdir(path)
        return RocksEngine(
            self._disk.real_path(path),
            memory=self._memory,
            write_buffer_bytes=self._config.write_buffer_bytes,
            on_damage=partial(self._note_damage, partition),
        )

    def _note_damage(self, partition: PartitionId, why: str) -> None:
        """Mark the state as damaged and end the process, because reads may fail forever and everything in memory came
        from this state. If the mark cannot be written, for example on a full disk, the next process detects the damage
        again."""
        try:
            mark = self._disk.open(_mark(partition), create=True)
            mark.pwrite(0, why.encode())
            mark.sync()
            mark.close()
            self._disk.sync_dir(_home(partition))
        except OSError as error:
            log.error("partition=%s its state is damaged, and the mark could not be written: %s", partition, error)
        self._end(f"partition {partition}: the state on this disk is damaged; the next start rebuilds it: {why}")

    def _set_aside(self, partition: PartitionId) -> None:
        """Set aside the state first and remove the mark second, so that a crash in between leaves only a mark without a
        state."""
        state, aside, mark = _state(partition), _aside(partition), _mark(partition)
        if self._disk.exists(state):
            if self._disk.exists(aside):
                raise ConfigError(
                    f"partition {partition}: the state on this disk is damaged, and an earlier damaged state is "
                    "still set "
                    f"aside. If the partition's other replicas are healthy, remove {self._disk.real_path(aside)} and "
                    "start again"
                )
            self._disk.rename(state, aside)
            self._disk.sync_dir(_home(partition))
            log.error(
                "partition=%s the damaged state is set aside as %s and rebuilt from the log or another replica",
                partition,
                self._disk.real_path(aside),
            )
        if self._disk.exists(mark):
            self._disk.remove(mark)
            self._disk.sync_dir(_home(partition))


def _delete_trees(paths: list[str]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _home(partition: PartitionId) -> str:
    return f"{STATES}/{partition}"


def _state(partition: PartitionId) -> str:
    return f"{_home(partition)}/engine"


def _aside(partition: PartitionId) -> str:
    return f"{_home(partition)}/engine.damaged"


def _mark(partition: PartitionId) -> str:
    return f"{_home(partition)}/DAMAGED"
