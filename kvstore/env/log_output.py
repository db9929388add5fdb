"""The log of a process, set up the same way for all processes, as text or as JSON lines. Code that logs calls the
standard library's loggers; structlog formats the lines."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from kvstore.env.files.private import FOLDER_MODE
from kvstore.env.log_config import LogFormat, LogOutput
from kvstore.env.logs.audit_lines import AuditLines, QueuedAuditLines
from kvstore.env.logs.fields import as_plain, fields_of, on_one_line
from kvstore.env.logs.limit import WINDOW_S, LogLimit
from kvstore.env.logs.writer import LogWriter, QueuedHandler, RotatedFile, StandardError

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

log = logging.getLogger(__name__)

OWN = "kvstore"
LOUD = ("kazoo",)
"""Libraries whose INFO lines nobody needs."""
LOGGERS_SET_MAX = 64
"""Maximum number of loggers with their own level."""


def _structlog() -> Any:
    """Import structlog as if rich were not installed. Otherwise structlog imports rich for logs on terminals, for which
    a node has no memory budget (tests/cli/test_node_run.py)."""
    modules: dict[str, Any] = sys.modules
    known = modules.get("rich")
    modules["rich"] = None  # makes its import fail
    try:
        return importlib.import_module("structlog.stdlib")
    finally:
        if known is None:
            del modules["rich"]
        else:
            modules["rich"] = known


_STRUCTLOG = _structlog()


class Output:
    """The log of this process from `open_log` on: its handler's filter, and the levels that were set at run time."""

    def __init__(self, config: LogOutput, now: Callable[[], float] = time.monotonic) -> None:
        self._level = config.level.value
        self._limit, self._now = LogLimit(), now
        self._turn, self._is_in_turn = threading.RLock(), False
        self._counts: Counter[int] = Counter()
        self._set: dict[str, str] = {}
        self._handler: logging.Handler
        self._writer: LogWriter | None = None
        self.audit = AuditLines()
        """Destination of the audit log's lines. No level that is set here applies to it."""

    def use(self, handler: logging.Handler, writer: LogWriter | None = None) -> None:
        """Write with this handler, whose lines are queued at `writer`."""
        self._handler, self._writer = handler, writer
        handler.addFilter(self._admit)

    def statistics(self) -> dict[str, int]:
        counts = self._counts
        return {
            "log_warnings_total": counts[logging.WARNING],
            "log_errors_total": counts[logging.ERROR] + counts[logging.CRITICAL],
            "log_lines_left_out_total": self._limit.left_out,
            "log_lines_dropped_total": 0 if self._writer is None else self._writer.dropped,
        }

    def levels(self) -> dict[str, str]:
        """Return the lowest level that is written, by logger: of this package as a whole, and of loggers set at run
        time."""
        return {OWN: self._level, **self._set}

    def set_level(self, logger: str, level: str) -> None:
        """Set the level of a logger and of those below it until the process ends; an empty level restores the one from
        the start. Raises ValueError."""
        if logger != OWN and not logger.startswith(f"{OWN}."):
            raise ValueError(f"expected the logger {OWN} or one below it, for example {OWN}.wal, got {logger[:100]!r}")
        if level and level not in logging.getLevelNamesMapping():
            raise ValueError(f"expected one of DEBUG, INFO, WARNING, ERROR and CRITICAL, got {level[:100]!r}")
        if not is_there(logger):
            raise ValueError(f"no logger {logger[:100]!r} here; expected a module or package, for example {OWN}.wal")
        if level and logger not in self._set and len(self._set) >= LOGGERS_SET_MAX:
            raise ValueError(f"{LOGGERS_SET_MAX} loggers have their own level; reset one of them first")
        if level:
            self._set[logger] = level
        else:
            self._set.pop(logger, None)
        logging.getLogger(logger).setLevel(level or (self._level if logger == OWN else logging.NOTSET))

    def _admit(self, record: logging.LogRecord) -> bool:
        """Return True if the line is written. Lines that were left out are reported once their window is over, before
        another line.

        A finalizer may log in the middle of this in the same thread, because the garbage collector runs at any time.
        Such a line is written at once.
        """
        if getattr(record, "is_about_limit", False):
            return True
        with self._turn:
            self._counts[record.levelno] += 1
            if self._is_in_turn:
                return True
            self._is_in_turn = True
            try:
                now = self._now()
                ended = self._limit.ended(now)
                admitted = record.levelno >= logging.CRITICAL or self._limit.admit((record.name, record.msg), now)
            finally:
                self._is_in_turn = False
        for (name, text), count in ended:
            self._handler.handle(_about_limit(name, text, count))
        return admitted


def open_log(config: LogOutput, *, process: str, directory: Path | None = None, is_shared: bool = False) -> Output:
    """Set up this process's log: `<directory>/<process>.log`, which is rotated, else standard error. JSON lines name
    the process, and text lines do if other processes share standard error (`is_shared`). Uncaught exceptions of
    finalizers and threads are logged, too. Raises OSError."""
    writer = LogWriter()
    if directory is not None:
        directory.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    sink = StandardError() if directory is None else RotatedFile(directory / f"{process}.log")
    handler = QueuedHandler(writer, sink)
    handler.setFormatter(formatter(config.format, process, is_shared=is_shared and directory is None))
    output = Output(config)
    output.use(handler, writer)
    logging.basicConfig(
        level=max(logging.INFO, logging.getLevelNamesMapping()[config.level]), handlers=[handler], force=True
    )
    logging.getLogger(OWN).setLevel(config.level.value)
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)
    output.audit = QueuedAuditLines(writer, handler if directory is None else _audit_file(writer, directory, process))
    logging.captureWarnings(True)
    sys.unraisablehook, threading.excepthook = _log_ignored, _log_uncaught
    return output


def _log_ignored(ignored: sys.UnraisableHookArgs) -> None:
    """Log an exception of a finalizer. Python would write it to standard error, possibly on the event loop's thread,
    and wait for the reader."""
    log.error("ignored an exception: %s %r", ignored.err_msg or "in", ignored.object, exc_info=_raised(ignored))


def _log_uncaught(uncaught: threading.ExceptHookArgs) -> None:
    """Log the exception that ended a thread."""
    if uncaught.exc_type is not SystemExit:
        log.error("thread %r was ended by an exception", uncaught.thread, exc_info=_raised(uncaught))


def _raised(
    args: sys.UnraisableHookArgs | threading.ExceptHookArgs,
) -> tuple[type[BaseException], BaseException, TracebackType | None] | None:
    """Return the exception as a log line needs it, or None if Python does not provide it."""
    return None if args.exc_value is None else (args.exc_type, args.exc_value, args.exc_traceback)


def formatter(format: LogFormat, process: str, *, is_shared: bool = False) -> logging.Formatter:
    """Return the formatter of log lines. With `is_shared`, text lines begin with the process."""
    ends: list[Processor] = [_STRUCTLOG.ProcessorFormatter.remove_processors_meta]
    ends.append(_as_json if format is LogFormat.JSON else _as_shared_text if is_shared else _as_text)
    made: logging.Formatter = _STRUCTLOG.ProcessorFormatter(
        foreign_pre_chain=[_Head(process)], processors=ends, pass_foreign_args=True
    )
    return made


def is_there(logger: str) -> bool:
    """Return True if there is a logger of this name, or of a module below it."""
    names = list(logging.root.manager.loggerDict)
    return logger in names or any(name.startswith(f"{logger}.") for name in names)


class _Head:
    """Adds the parts of each line besides its message."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        record: logging.LogRecord = event["_record"]
        fields = fields_of(record.msg, event["positional_args"])
        if isinstance(more := getattr(record, "fields", None), Mapping):
            fields |= as_plain(more)
        event["head"] = (record.created, record.levelname, record.name, self._process, event["event"])
        event["fields"] = fields
        event["trace"] = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        return event


def _as_text(logger: Any, method: str, event: EventDict) -> str:
    created, level, name, _, message = event["head"]
    date = datetime.fromtimestamp(created).astimezone()
    line = f"{date:%Y-%m-%d %H:%M:%S},{date.microsecond // 1000:03d} {level} {name} {on_one_line(message)}"
    return f"{line}\n{event['trace']}" if event["trace"] else line


def _as_shared_text(logger: Any, method: str, event: EventDict) -> str:
    return f"{event['head'][3]} {_as_text(logger, method, event)}"


def _as_json(logger: Any, method: str, event: EventDict) -> str:
    created, level, name, process, message = event["head"]
    date = datetime.fromtimestamp(created, UTC)
    line = {
        "time": f"{date:%Y-%m-%dT%H:%M:%S}.{date.microsecond // 1000:03d}Z",
        "level": level,
        "logger": name,
        "process": process,
        "event": message,
        **event["fields"],
    }
    if event["trace"]:
        line["exception"] = event["trace"]
    try:
        return orjson.dumps(line).decode()
    except TypeError:  # text that is not Unicode, for example a file name
        return json.dumps(line)


def _about_limit(name: str, text: object, count: int) -> logging.LogRecord:
    message = "left out %d lines within %d s of: %s"
    record = logging.LogRecord(name, logging.WARNING, "", 0, message, (count, round(WINDOW_S), str(text)), None)
    record.is_about_limit = True
    record.fields = {"left_out": count}
    return record


def _audit_file(writer: LogWriter, directory: Path, process: str) -> QueuedHandler:
    """Open the audit log's own file, which is rotated and holds only lines of JSON. Raises OSError."""
    handler = QueuedHandler(writer, RotatedFile(directory / f"{process}.audit.jsonl"))
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
