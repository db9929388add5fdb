"""Errors of streams that cannot be read, because of their options or because PySpark is too old."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kvstore.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class FailedReader(DataSourceStreamReader):
    """A stream reader that raises an error on first use. PySpark hides errors that `streamReader` raises behind an
    error of its own about an unset variable."""

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
    """Return the error for a feature that needs a later PySpark. Other features work."""
    return ConfigError(f"{what} needs PySpark {since} or later, got {pyspark.__version__}")
