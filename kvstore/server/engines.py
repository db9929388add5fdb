"""Where the partitions' states are on this disk, and what becomes of one that is damaged: it is set aside, and the
replica is made anew as a newcomer's is, from the log or from another replica. One whose replica is not here any more is
retired: set aside for a while, and taken back into use if the replica comes back (docs/protocol.md H10).

    partitions/<id>/engine                    the state
    partitions/<id>/DAMAGED                   why the process ended: the next start sets the state aside
    partitions/<id>/engine.damaged            a state that was set aside. It is never removed by itself, nor replaced
    partitions/<id>.retired-<number>-<age>    all that there was of a replica that has left. The last number is the
                                              latest; the age is of seconds that processes ran, never by a date
    partitions/<id>.removed-<number>          what is being removed: what a crash leaves of it is never opened
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
    """`end` ends the process at once; it is called in any thread."""

    def __init__(self, disk: Disk, config: PartitionConfig, end: Callable[[str], None]) -> None:
        self._disk, self._config, self._end = disk, config, end
        self._memory = RocksMemory(config.memory_bytes)
        self._delete([f"{STATES}/{name}" for name in self._disk.list(STATES) if _REMOVED.fullmatch(name)])

    def open(self, partition: PartitionId) -> Engine:
        """The state, or the one that was retired last. Raises OSError; ConfigError if it is damaged and one
        was set aside before."""
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
        """Set aside all that is here of the partition's state, which nobody uses. Raises OSError."""
        if self._disk.exists(_home(partition)):
            number = 1 + max((number for id_, number, _, _ in self._retired() if id_ == partition), default=0)
            self._rename(_home(partition), f"{_home(partition)}.retired-{number}-0")

    def age_retired(self, seconds: int, keep_s: float) -> None:
        """Make what is set aside older, and remove what has been so for `keep_s`. Raises OSError."""
        for partition, number, age, path in self._retired():
            if age + seconds >= keep_s:
                log.info("partition=%s has left long ago, what was set aside of it is removed: %s", partition, path)
                self._remove(partition, path)
            else:
                # Not synced: a power cut that takes the step back keeps the state for longer.
                self._disk.rename(path, f"{_home(partition)}.retired-{number}-{age + seconds}")

    def spoil(self, partition: PartitionId) -> None:
        """Set aside the state of a replica that others have outvoted. One that was set aside before stays, as the first
        evidence, and this one goes. Raises OSError."""
        if self._disk.exists(_aside(partition)):
            self._remove(partition, _state(partition))
        else:
            self._set_aside(partition)

    def find(self) -> list[PartitionId]:
        """The partitions of which there is something here that is not set aside."""
        names = [name for name in self._disk.list(STATES) if not name.startswith(".")]
        return [PartitionId(name) for name in names if not (_RETIRED.fullmatch(name) or _REMOVED.fullmatch(name))]

    def statistics(self) -> dict[str, int]:
        """Return what the states that are open take of the memory that they share."""
        return self._memory.statistics()

    def _take_back(self, partition: PartitionId) -> None:
        """Of a replica that has come back: others count on nothing that it has, but it may be all that is left."""
        found = [each for each in self._retired() if each[0] == partition]
        if found and not self._disk.exists(_home(partition)):
            path = max(found, key=lambda each: each[1])[3]
            self._rename(path, _home(partition))
            log.info("partition=%s is here again, its state is taken back from %s", partition, path)

    def _retired(self) -> list[tuple[PartitionId, int, int, str]]:
        """(partition, number, age, path) of each."""
        names = filter(None, map(_RETIRED.fullmatch, self._disk.list(STATES)))
        return [(PartitionId(name[1]), int(name[2]), int(name[3]), f"{STATES}/{name[0]}") for name in names]

    def _rename(self, old: str, new: str) -> None:
        self._disk.rename(old, new)
        self._disk.sync_dir(STATES)

    def _remove(self, partition: PartitionId, path: str) -> None:
        """As one step: half a state could look like a whole one, or like one that is damaged."""
        found = filter(None, map(_REMOVED.fullmatch, self._disk.list(STATES)))
        number = 1 + max((int(each[2]) for each in found if each[1] == partition), default=0)
        removed = f"{_home(partition)}.removed-{number}"
        self._rename(path, removed)
        self._delete([removed])

    def _delete(self, paths: list[str]) -> None:
        """In a thread that nobody waits for: a large state takes seconds, and leases are renewed meanwhile."""
        if paths:
            real = [self._disk.real_path(path) for path in paths]
            Thread(target=_delete_trees, args=(real,), name="delete states", daemon=True).start()

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
        """Reads of it may fail for ever, and whatever is in memory came from it: go on without it. Where the mark
        cannot be written, on a full disk, the next process finds the damage again."""
        try:
            mark = self._disk.open(_mark(partition), create=True)
            mark.pwrite(0, why.encode())
            mark.sync()
            mark.close()
            self._disk.sync_dir(_home(partition))
        except OSError as error:
            log.error("partition=%s its state is damaged, and that could not be marked: %s", partition, error)
        self._end(f"partition {partition}: the state on this disk is damaged; the next start makes it anew: {why}")

    def _set_aside(self, partition: PartitionId) -> None:
        """First the state, then the mark: a crash in between leaves a mark of a state that is set aside already."""
        state, aside, mark = _state(partition), _aside(partition), _mark(partition)
        if self._disk.exists(state):
            if self._disk.exists(aside):
                raise ConfigError(
                    f"partition {partition}: the state on this disk is damaged, and one was set aside before: remove "
                    f"{self._disk.real_path(aside)} if the partition's other replicas are well, and start again"
                )
            self._disk.rename(state, aside)
            self._disk.sync_dir(_home(partition))
            log.error(
                "partition=%s the damaged state is set aside as %s, and made anew from the log or another replica",
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
