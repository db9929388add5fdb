"""Bulk load. Each task writes its rows with the client's batches and reports the number of rows.

Rows are written at least once. A task that is retried, or that speculation runs twice, writes the same rows again, so
the final state of the store is the same. Versions still rise, and a retried row may overwrite a newer write of another
client (but not with onConflict=keep). A failed job leaves the rows that it has written; run the job again to complete
them. Each attempt uses its own request ids, because an id identifies one request and Spark does not promise that two
attempts of a task send the same rows in the same order.
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
    """The number of rows that one task wrote, and the number of rows that it skipped because their keys existed
    (`kept`)."""

    written: int
    kept: int


class WriteTasks:
    """The part of a bulk load that runs in a task, shared by both writers. Spark pickles it, so it has no open
    connections."""

    def __init__(self, config: ClientConfig, plan: ColumnPlan, options: WriteOptions) -> None:
        self._config, self._plan, self._options = config, plan, options

    def run(self, batches: Iterator[RecordBatch]) -> WrittenRows:
        # Import gRPC only after the fork that created this process.
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
        f"{error}; this task has written part of its rows; write them again when the cluster is healthy "
        f"(`kvstore status`), or raise the option timeout above {config.timeout_s:g}s"
    )


class BulkWriter(DataSourceArrowWriter):
    """The bulk writer of `df.write.format("kvstore")`."""

    def __init__(self, config: ClientConfig, plan: ColumnPlan, options: WriteOptions) -> None:
        self._tasks = WriteTasks(config, plan, options)

    def write(self, iterator: Iterator[RecordBatch]) -> WrittenRows:
        return self._tasks.run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        log_result("load done", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        log_result("load failed; rows already written stay", messages)


def log_result(what: str, messages: list[Any]) -> None:
    done = [each for each in messages if isinstance(each, WrittenRows)]
    written, kept = sum(each.written for each in done), sum(each.kept for each in done)
    logger.info("%s tasks=%d of=%d rows=%d kept=%d", what, len(done), len(messages), written, kept)
