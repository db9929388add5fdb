"""A stream that cannot be: by its options, or by the PySpark that is here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kvstore.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class FailedReader(DataSourceStreamReader):
    """Raises an error when it is first asked for anything. PySpark hides what `streamReader` raises behind an error of
    its own, of a variable that it has not set."""

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
    """PySpark lacks what this needs; all else works with it."""
    return ConfigError(f"{what} needs PySpark {since} or later, and this is {pyspark.__version__}")
