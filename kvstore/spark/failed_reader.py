"""Reports errors of streams that cannot be read because their options are wrong or PySpark is too old."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kvstore.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class FailedReader(DataSourceStreamReader):
    """A stream reader whose methods all raise one error.

    If `DataSource.streamReader` itself raised the error, PySpark would replace it by an unrelated error about an unset
    variable.
    """

    def __init__(self, error: StoreError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, *_: Any) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        raise self._error


def too_old(what: str, since: str) -> ConfigError:
    """Return the error for the feature `what`, which needs PySpark `since` or later. Other features still work."""
    return ConfigError(f"{what} needs PySpark {since} or later, got {pyspark.__version__}")
