"""The streaming sink. It is in its own module because PySpark before 4.1 lacks the base class, and bulk loads must
work there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from kvstore.client.core.config import ClientConfig
from kvstore.spark.columns import ColumnPlan
from kvstore.spark.options import WriteOptions
from kvstore.spark.writer import WriteTasks, WrittenRows, log_result

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of `df.writeStream.format("kvstore")`. It writes each micro-batch like a separate bulk load."""

    def __init__(self, config: ClientConfig, plan: ColumnPlan, options: WriteOptions) -> None:
        self._tasks = WriteTasks(config, plan, options)

    def write(self, iterator: Iterator[RecordBatch]) -> WrittenRows:
        return self._tasks.run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        log_result(f"micro-batch {batchId} done", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        log_result(f"micro-batch {batchId} failed; rows already written stay", messages)
