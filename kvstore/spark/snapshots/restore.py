"""Loads a snapshot into a cluster of any shape. Writes are idempotent, so run an interrupted restore again to
complete it."""

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
from kvstore.server.status.sizes import count
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.create import ProgressCallback
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.tables import Tables

T = TypeVar("T")
POLL_S = 1.0
COLUMNS, COUNTS = ("key", "value", "expires_at"), ("written", "expired")


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore: how many records were written, and how many had expired."""

    written: int
    expired: int
    """Number of records that were left out because they had expired."""


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
    """Write the records of the chain at the cut into a cluster, and report the progress.

    Raises InvalidRequest if the cluster has keys, unless `into_filled` is True. With `into_filled`, keys that are not
    in the snapshot stay as they are.
    """
    with Client(cluster) as client:
        # With this machine's clock, live records could be left out.
        there, now_ms = client.count(), client.cluster.time_ms()
    if not into_filled:
        _check_empty(there)
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
                raise  # its message already has advice
            raise type(error)(f"{error}; records already written stay; run it again with --merge") from error


def require_empty(cluster: ClientConfig) -> None:
    """Raise InvalidRequest if the cluster has keys."""
    with Client(cluster) as client:
        _check_empty(client.count())


def _check_empty(keys: int) -> None:
    if keys:
        raise InvalidRequest(
            f"expected an empty cluster, got one with {count(keys, 'key')}; restore into an empty cluster, or pass "
            "--merge to overwrite keys of the snapshot and keep other keys"
        )


def _write(cluster: ClientConfig, now_ms: int, batches: Iterator[Any], *, is_new: bool) -> dict[str, int]:
    """Write the records of one task, and return its counts. If `is_new`, write only absent keys: an attempt that the
    driver has abandoned may continue to write after the job has ended, and must not overwrite the writes of
    applications."""
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
        return loader.written + loader.kept  # includes what an earlier attempt wrote

    return {"written": run(load()), "expired": expired}


def _living(batch: Any, now_ms: int) -> Any:
    moment = pa.scalar(now_ms * 1000, pa.timestamp("us", "UTC"))
    return batch.filter(pc.fill_null(pc.greater(batch["expires_at"], moment), True))


@contextmanager
def _watched(cluster: ClientConfig, before: int, total: int, progress: ProgressCallback) -> Iterator[None]:
    """Report the number of keys in the cluster while the job runs."""
    ended = threading.Event()

    def watch() -> None:
        with suppress(StoreError), Client(cluster) as client:
            while not ended.wait(POLL_S):
                try:
                    progress("restoring", max(0, client.count() - before), total)
                except StoreError:
                    continue  # tasks wait for the cluster, too

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
