"""Loads a snapshot into a cluster of any shape. Every record is written once or more, always with the same bytes: a
restore that was interrupted is simply run again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.client.blocking.client import Client
from kvstore.client.core.config import ClientConfig
from kvstore.errors import Corrupted, InvalidRequest, StoreError
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.create import ProgressCallback
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.tables import Tables

T = TypeVar("T")
LOOK_S = 1.0
COLUMNS, COUNTS = ("key", "value", "expires_at"), ("written", "expired")


@dataclass(frozen=True, slots=True)
class Restored:
    """How many records a restore has written, by kind."""

    written: int
    expired: int
    """Left out: their time was over."""


def restore(
    tables: Tables[T],
    store: SnapshotStore,
    chain: Sequence[Manifest],
    cut: Cut,
    cluster: ClientConfig,
    *,
    into_filled: bool,
    progress: ProgressCallback,
) -> Restored:
    """Write the records at the cut. Raises InvalidRequest if the cluster holds keys, unless `into_filled`: then keys
    that the snapshot does not have stay as they are."""
    with Client(cluster) as client:
        there, now_ms = client.count(), client.cluster.time_ms()  # by this machine's date what lives could be left out
    if there and not into_filled:
        raise InvalidRequest(
            f"the cluster holds {there} keys: restore into an empty one, or say --merge to overwrite what the snapshot "
            "has and keep the rest"
        )
    total = sum(manifest.rows for manifest in chain)
    records = tables.folded(store, chain, cut)
    with _watched(cluster, there, total, progress):
        try:
            write = partial(_write, cluster, now_ms, is_new=not into_filled)
            return Restored(**tables.work_through(records, COLUMNS, write, COUNTS))
        except Corrupted:
            raise
        except StoreError as error:
            if type(error).__init__ is not StoreError.__init__:
                raise  # it says what to do by itself
            raise type(error)(f"{error}; what is written stays: run it again with --merge") from error


def _write(cluster: ClientConfig, now_ms: int, batches: Iterator[Any], *, is_new: bool) -> dict[str, int]:
    """One task's records. `is_new`: only those whose keys are not there. An attempt that the driver has given up may
    write on when the job has ended and applications have begun: it must not overwrite what they write."""
    from kvstore.client.bulk import Loader
    from kvstore.env.real import run

    expired = 0

    async def load() -> int:
        nonlocal expired
        async with Loader(cluster, if_absent=is_new) as loader:
            for batch in batches:
                living = _living(batch, now_ms)
                expired += batch.num_rows - living.num_rows
                expiry = pc.fill_null(living["expires_at"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64()), 0)
                columns = (living["key"].to_pylist(), living["value"].to_pylist(), expiry.to_pylist())
                await loader.add(zip(*columns, strict=True))
        return loader.written + loader.kept  # what an earlier attempt wrote is there as well

    return {"written": run(load()), "expired": expired}


def _living(batch: Any, now_ms: int) -> Any:
    moment = pa.scalar(now_ms * 1000, pa.timestamp("us", "UTC"))
    return batch.filter(pc.fill_null(pc.greater(batch["expires_at"], moment), True))


@contextmanager
def _watched(cluster: ClientConfig, before: int, total: int, progress: ProgressCallback) -> Iterator[None]:
    """Tells how many keys the cluster has, while the job runs."""
    ended = threading.Event()

    def watch() -> None:
        with suppress(StoreError), Client(cluster) as client:
            while not ended.wait(LOOK_S):
                try:
                    progress("restoring", max(0, client.count() - before), total)
                except StoreError:
                    continue  # tasks wait for the cluster too

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
