"""How a process writes its log, from its settings. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LogFormat(StrEnum):
    TEXT = "text"
    """A line for people: date, level, logger, message."""
    JSON = "json"
    """A line of JSON for programs, with the fields of the message as fields of the line."""


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
    """Lowest level that is written, from the start on. `kvstore node log-level` changes it while the node runs."""
