"""The streaming sink. Apart from the bulk load, since PySpark before 4.1 has no such writer: there that still works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from kvstore.client.core.config import ClientConfig
from kvstore.spark.columns import ColumnPlan
from kvstore.spark.options import WriteOptions
from kvstore.spark.writer import Tasks, WrittenRows, tell

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("kvstore")`: each micro-batch as a load of its own."""

    def __init__(self, config: ClientConfig, plan: ColumnPlan, options: WriteOptions) -> None:
        self._tasks = Tasks(config, plan, options)

    def write(self, iterator: Iterator[RecordBatch]) -> WrittenRows:
        return self._tasks.run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        tell(f"micro-batch {batchId} done", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        tell(f"micro-batch {batchId} failed: what was written stays", messages)
