"""Bulk load: each task writes its rows through the client's batches, and tells how many there were.

Rows are written at least once. A task that is tried again, or run twice by speculation, writes the same rows, so the
store ends up the same; versions rise, and a write of somebody else in between may be overwritten by the older row (not
with onConflict=keep). A job that fails leaves the rows that were written: writing them again puts that right. Request
ids are each attempt's own: they recognise one request, and Spark does not promise that two attempts of a task send
the same rows in the same order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from kvstore.client.core.config import ClientConfig
from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.spark.columns import ColumnPlan
from kvstore.spark.options import OnConflict, WriteOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenRows(WriterCommitMessage):
    """The rows that one task wrote."""

    written: int
    kept: int


class Tasks:
    """The work of a task of either writer. Pickled: it holds nothing that is open."""

    def __init__(self, config: ClientConfig, plan: ColumnPlan, options: WriteOptions) -> None:
        self._config, self._plan, self._options = config, plan, options

    def run(self, batches: Iterator[RecordBatch]) -> WrittenRows:
        # gRPC must begin behind the fork that made this process.
        from kvstore.env.real import run

        return run(self._load(batches))

    async def _load(self, batches: Iterator[RecordBatch]) -> WrittenRows:
        from kvstore.client.bulk import Loader

        loader = Loader(
            self._config,
            if_absent=self._options.on_conflict is OnConflict.keep,
            batch_rows=self._options.batch_rows,
            batch_bytes=self._options.batch_bytes,
        )
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "batches") as reader:
            coming = loop.run_in_executor(reader, next, batches, None)
            try:
                async with loader:
                    while (batch := await coming) is not None:
                        coming = loop.run_in_executor(reader, next, batches, None)
                        await loader.add(self._plan.rows(batch))
            except (Unavailable, OutcomeUnknown) as error:
                raise _advised(error, self._config) from None
        return WrittenRows(loader.written, loader.kept)


def _advised(error: StoreError, config: ClientConfig) -> StoreError:
    return type(error)(
        f"{error}; rows of this task are written in part: write them again when the cluster is well "
        f"(`kvstore status`), or raise the option timeout above {config.timeout_s:g}s"
    )


class BulkWriter(DataSourceArrowWriter):
    """`df.write.format("kvstore")`."""

    def __init__(self, config: ClientConfig, plan: ColumnPlan, options: WriteOptions) -> None:
        self._tasks = Tasks(config, plan, options)

    def write(self, iterator: Iterator[RecordBatch]) -> WrittenRows:
        return self._tasks.run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        tell("load done", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        tell("load failed: what was written stays", messages)


def tell(what: str, messages: list[Any]) -> None:
    done = [each for each in messages if isinstance(each, WrittenRows)]
    written, kept = sum(each.written for each in done), sum(each.kept for each in done)
    logger.info("%s tasks=%d of=%d rows=%d kept=%d", what, len(done), len(messages), written, kept)
