"""Tables of records that this process reads batch by batch, without Spark.

Rows are streamed. Memory holds batches of some MiB. It also holds the key and some hundred bytes for each key that
incremental snapshots change or that is compared. So full snapshots of any size can be restored, more slowly than with
Spark.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.client.pinned.arrow import TIMESTAMP
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.runners import SMALL_ROWS
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.table import read_table
from kvstore.spark.snapshots.tables import Differences, Read, Work
from kvstore.spark.snapshots.usable import stored_files

_NO_TIME = -1


def is_small(chain: Sequence[Manifest]) -> bool:
    """Return True if these snapshots have so few rows that starting a JVM would take longer than the work."""
    return sum(manifest.rows for manifest in chain) <= SMALL_ROWS


@dataclass(frozen=True, slots=True)
class Rows:
    """A table whose batches can be read repeatedly."""

    batches: Read


class LocalTables:
    """Tables that this process computes without Spark."""

    def folded(self, store: SnapshotStore, chain: Sequence[Manifest], cut: Cut, later: Sequence[Read] = ()) -> Rows:
        full, *incrementals = [[partial(read_table, stored) for stored in stored_files(store, each)] for each in chain]
        changes = [partial(_within, cut, part) for parts in incrementals for part in parts]
        found = Rows(partial(_last_rows, full, [*changes, *later]))
        return found if cut.time_ms is None else self.living(found, cut.time_ms)

    def read(self, parts: Sequence[Read]) -> Rows:
        return Rows(lambda: (batch for part in parts for batch in part()))

    def living(self, table: Rows, horizon_ms: int) -> Rows:
        def is_living(batch: Any) -> Any:
            return pc.fill_null(pc.greater(batch["expires_at"], _moment(horizon_ms)), True)

        return Rows(lambda: (batch.filter(is_living(batch)) for batch in table.batches()))

    def differences(self, old: Rows, new: Rows, columns: Sequence[str], examples: int) -> Differences:
        waiting: dict[bytes, bytes] = {}
        counts = {"same": 0, "added": 0, "removed": 0, "changed": 0}
        shown: list[tuple[bytes, str]] = []
        sizes = [0, 0]
        for batch in old.batches():
            sizes[0] += _size(batch)
            waiting.update(_contents(batch, columns))
        for batch in new.batches():
            sizes[1] += _size(batch)
            for key, content in _contents(batch, columns):
                before = waiting.pop(key, None)
                kind = "added" if before is None else "same" if before == content else "changed"
                counts[kind] += 1
                if kind != "same" and len(shown) < examples:
                    shown.append((key, kind))
        counts["removed"] = len(waiting)
        shown += [(key, "removed") for key, _ in zip(waiting, range(examples - len(shown)), strict=False)]
        return Differences(**counts, old_bytes=sizes[0], new_bytes=sizes[1], examples=tuple(sorted(shown)))

    def work_through(self, table: Rows, columns: Sequence[str], work: Work, counts: Sequence[str]) -> dict[str, int]:
        found = work(batch.select(list(columns)) for batch in table.batches())
        return {name: found[name] for name in counts}


def _last_rows(full: Sequence[Read], changes: Sequence[Read]) -> Iterator[Any]:
    """Yield the row with the highest version of each key, across all partitions, without deleted keys. Reads the
    changes twice: first their versions, then their rows. Snapshots may repeat a row of an intent that was present at
    both of their positions (docs/protocol.md Tx13); the last of these rows counts."""
    last: dict[bytes, tuple[int, int]] = {}
    """Key → version and number of its last row."""
    none = -1, -1
    numbers = count()
    for part in changes:
        for batch in part():
            for key, version in _versions(batch):
                last[key] = max(last.get(key, none), (version, next(numbers)))
    for part in full:
        for batch in part():
            yield batch.filter(_mask(batch, [last.get(key, none)[0] < version for key, version in _versions(batch)]))
    numbers = count()
    for part in changes:
        for batch in part():
            newest = _mask(batch, [last[key][1] == next(numbers) for key, _ in _versions(batch)])
            yield batch.filter(pc.and_(newest, pc.is_valid(batch["value"])))


def _versions(batch: Any) -> Iterator[tuple[bytes, int]]:
    return zip(batch["key"].to_pylist(), batch["version"].to_pylist(), strict=True)


def _mask(batch: Any, found: list[bool]) -> Any:
    return pa.array(np.fromiter(found, bool, batch.num_rows))


def _within(cut: Cut, part: Read) -> Iterator[Any]:
    """Yield the rows of an incremental snapshot before the cut."""
    for batch in part():
        inside = pa.repeat(pa.scalar(True), batch.num_rows)
        if cut.time_ms is not None:
            inside = pc.and_(inside, pc.less_equal(batch["written_at"], _moment(cut.time_ms)))
        for partition, sequence in (cut.sequences or {}).items():
            other = pc.not_equal(batch["partition"], partition)
            inside = pc.and_(inside, pc.or_(other, pc.less_equal(batch["version"], sequence)))
        yield batch.filter(inside)


def _moment(time_ms: int) -> Any:
    return pa.scalar(time_ms * 1000, TIMESTAMP)


def _size(batch: Any) -> int:
    return sum(pc.sum(pc.binary_length(batch[name])).as_py() or 0 for name in ("key", "value"))


def _contents(batch: Any, columns: Sequence[str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each key with a checksum of the named columns."""
    others = [pc.fill_null(batch[each].cast(pa.int64()), _NO_TIME).to_pylist() for each in columns if each != "value"]
    packed = struct.Struct(f"<{len(others)}q").pack
    for key, value, *rest in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), *others, strict=True):
        yield key, hashlib.blake2b(packed(*rest) + value, digest_size=16).digest()
