"""How a process writes its log, as its settings say it. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LogFormat(StrEnum):
    TEXT = "text"
    """A line for people: date, level, logger, message."""
    JSON = "json"
    """A line of JSON for programs, with the fields of the message beside it (docs/how-to/read-logs.md)."""


class LogLevel(StrEnum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutput:
    """The log of one process."""

    format: LogFormat = LogFormat.TEXT
    """`text` or `json`."""
    level: LogLevel = LogLevel.INFO
    """The least level that is written, from the start; `kvstore node log-level` changes it while the node runs."""
