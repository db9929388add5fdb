"""The log as text and as JSON: fields, levels at run time, and messages that are too frequent."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.log_config import LogFormat, LogLevel, LogOutput
from kvstore.env.log_output import LOGGERS_SET_MAX, Output, formatter, open_log
from kvstore.env.logs.fields import fields_of
from kvstore.env.logs.limit import LINES_MAX, MESSAGES_MAX, WINDOW_S, LeftOut, LogLimit
from tests.beside import in_time

log = logging.getLogger("kvstore.tests.log_output")
pytestmark = pytest.mark.usefixtures("loggers")


def lines_of(path: Path) -> list[str]:
    for handler in logging.root.handlers:
        handler.flush()  # one writer serves all files
    return path.read_text(encoding="utf-8").splitlines()


def documents(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(tmp_path / "n1.log")]


def opened(tmp_path: Path, format: LogFormat = LogFormat.JSON, level: LogLevel = LogLevel.INFO) -> Output:
    return open_log(LogOutput(format=format, level=level), process="n1", directory=tmp_path)


def test_fields_of_a_message_become_fields_of_the_line(tmp_path: Path) -> None:
    opened(tmp_path)
    log.info("ledger=%d bookie=%s failed after %.1f s: %s", 7, "b3", 0.25, ValueError("no"))
    (line,) = documents(tmp_path)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "kvstore.tests.log_output",
        "process": "n1",
        "event": "ledger=7 bookie=b3 failed after 0.2 s: no",
        "ledger": 7,
        "bookie": "b3",
    }


def test_field_cannot_replace_a_field_of_each_line(tmp_path: Path) -> None:
    opened(tmp_path)
    log.info("level=%s time=%d", "low", 3)
    (line,) = documents(tmp_path)
    assert (line["level"], line["level_"], line["time_"]) == ("INFO", "low", 3)


@pytest.mark.parametrize(
    ("template", "arguments", "fields"),
    [
        ("session=%x at 100%% of %s", (255, "it"), {"session": "ff"}),
        ("a=%r b=%s", ("x", None), {"a": "'x'", "b": "None"}),
        ("huge=%d", (1 << 70,), {"huge": str(1 << 70)}),
        ("a=%s %s", ("one",), {}),
        ("a=%(a)s", ({"a": 1},), {}),
        ("nothing", (), {}),
        (ValueError("an object"), (), {}),
    ],
)
def test_fields_are_found_in_any_message(template: object, arguments: object, fields: dict[str, Any]) -> None:
    assert fields_of(template, arguments) == fields


def test_exception_is_a_field_and_stays_on_its_line(tmp_path: Path) -> None:
    opened(tmp_path)
    try:
        raise ValueError("what\nwas wrong")
    except ValueError:
        log.exception("task=%s failed", "t1")
    (line,) = documents(tmp_path)
    assert "ValueError: what\nwas wrong" in line["exception"]
    assert line["task"] == "t1"


def test_text_line_has_a_date_and_cannot_be_broken_by_input(tmp_path: Path) -> None:
    opened(tmp_path, LogFormat.TEXT)
    log.warning("address=%s says %s", "h:1", "x\n2026-01-01 INFO kvstore forged\x1b[2J")
    (line,) = lines_of(tmp_path / "n1.log")
    date, time, level, logger, rest = line.split(" ", 4)
    assert (len(date), len(time), level, logger) == (10, 12, "WARNING", "kvstore.tests.log_output")
    assert rest == "address=h:1 says x\\n2026-01-01 INFO kvstore forged\\x1b[2J"


def test_shared_text_line_begins_with_the_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    open_log(LogOutput(), process="n1.2", is_shared=True)
    log.warning("said")
    for handler in logging.root.handlers:
        handler.flush()
    assert capfd.readouterr().err.split()[0] == "n1.2"
    open_log(LogOutput(), process="n1.2", directory=tmp_path, is_shared=True)
    log.warning("said")
    assert not lines_of(tmp_path / "n1.2.log")[0].startswith("n1.2"), "no other process writes to this file"


def test_text_that_is_not_unicode_is_written_nevertheless(tmp_path: Path) -> None:
    opened(tmp_path)
    log.warning("path=%s", "a\udcff")
    assert documents(tmp_path)[0]["path"] == "a\udcff"


def test_level_applies_from_the_start(tmp_path: Path) -> None:
    opened(tmp_path, level=LogLevel.WARNING)
    log.info("quiet")
    log.warning("loud")
    assert [each["event"] for each in documents(tmp_path)] == ["loud"]


def test_level_set_at_run_time_applies_below_its_logger_until_reset(tmp_path: Path) -> None:
    output = opened(tmp_path)
    elsewhere = logging.getLogger("kvstore.env.nursery")
    log.debug("1")
    output.set_level("kvstore.tests", "DEBUG")
    log.debug("2")
    elsewhere.debug("3")
    assert output.levels() == {"kvstore": "INFO", "kvstore.tests": "DEBUG"}
    output.set_level("kvstore.tests", "")
    log.debug("4")
    output.set_level("kvstore", "ERROR")
    log.warning("5")
    output.set_level("kvstore", "")
    log.info("6")
    assert [each["event"] for each in documents(tmp_path)] == ["2", "6"]
    assert output.levels() == {"kvstore": "INFO"}


@pytest.mark.parametrize(
    ("logger", "level", "said"),
    [
        ("kazoo", "DEBUG", "expected the logger kvstore or one below it"),
        ("kvstorex", "DEBUG", "expected the logger kvstore or one below it"),
        ("kvstore.no.such", "DEBUG", "no logger 'kvstore.no.such' here"),
        ("kvstore", "LOUD", "expected one of DEBUG"),
        ("kvstore.audit", "ERROR", "no logger 'kvstore.audit' here"),
    ],
)
def test_impossible_level_is_refused(tmp_path: Path, logger: str, level: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        opened(tmp_path).set_level(logger, level)


def test_loggers_with_their_own_level_are_bounded() -> None:
    output = Output(LogOutput())
    for number in range(LOGGERS_SET_MAX):
        output._set[f"kvstore.x{number}"] = "DEBUG"
    with pytest.raises(ValueError, match="have their own level"):
        output.set_level("kvstore.tests.log_output", "DEBUG")


def test_frequent_message_is_counted_and_reported_after_its_window(tmp_path: Path) -> None:
    now = 0.0
    handler = logging.FileHandler(tmp_path / "n1.log")
    handler.setFormatter(formatter(LogFormat.JSON, "n1"))
    output = Output(LogOutput(), now=lambda: now)
    output.use(handler)
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    for number in range(LINES_MAX + 5):
        log.warning("bookie=%s fails again and again", number)
    log.critical("the end")
    log.info("another message")
    assert len(documents(tmp_path)) == LINES_MAX + 2
    now = WINDOW_S
    log.info("later")
    *_, about, later = documents(tmp_path)
    assert (about["left_out"], about["level"]) == (5, "WARNING")
    assert about["event"].endswith("of: bookie=%s fails again and again")
    assert later["event"] == "later"
    assert output.statistics() == {
        "log_warnings_total": LINES_MAX + 5,
        "log_errors_total": 1,
        "log_lines_left_out_total": 5,
        "log_lines_dropped_total": 0,
    }


def test_each_message_has_its_own_window_and_windows_are_bounded() -> None:
    limit, a, b = LogLimit(), ("x", "a"), ("x", "b")
    assert [limit.admit(a, 0.0) for _ in range(LINES_MAX + 1)] == [True] * LINES_MAX + [False]
    assert limit.admit(b, 1.0)
    assert limit.ended(WINDOW_S - 1) == []
    assert limit.ended(WINDOW_S) == [LeftOut(a, 1)]
    assert limit.admit(a, WINDOW_S)
    for number in range(3 * MESSAGES_MAX):
        limit.admit(("x", number), WINDOW_S)
    assert len(limit._windows) == MESSAGES_MAX


def test_count_of_a_window_that_ends_early_is_reported() -> None:
    limit, loud = LogLimit(), ("x", "loud")
    for _ in range(LINES_MAX + 3):
        limit.admit(loud, 0.0)
    for number in range(MESSAGES_MAX):
        limit.admit(("x", number), 0.0)
    assert limit.ended(0.0) == [LeftOut(loud, 3)]
    assert limit.ended(WINDOW_S) == []


def test_finalizer_may_log_while_a_line_is_logged() -> None:
    """The garbage collector runs it in the middle of anything, in the same thread."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    def now() -> float:
        if not written:
            log.error("a task was destroyed")
        return 0.0

    written: list[str] = []
    output = Output(LogOutput(), now)
    handler = Lines()
    output.use(handler)
    log.handlers, log.propagate = [handler], False
    in_time(lambda: log.warning("a line"))
    assert written == ["a task was destroyed", "a line"]
    assert output.statistics() == {
        "log_warnings_total": 1,
        "log_errors_total": 1,
        "log_lines_left_out_total": 0,
        "log_lines_dropped_total": 0,
    }


def test_audit_log_is_a_file_of_its_own_without_a_limit(tmp_path: Path) -> None:
    output = opened(tmp_path)
    for number in range(LINES_MAX + 5):
        output.audit.put(json.dumps({"call": number}))
    assert len(lines_of(tmp_path / "n1.audit.jsonl")) == LINES_MAX + 5
    assert lines_of(tmp_path / "n1.log") == []


@pytest.mark.parametrize("directory", [True, False])
async def test_audit_lines_are_written_at_any_level(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], directory: bool
) -> None:
    output = open_log(LogOutput(), process="n1", directory=tmp_path if directory else None)
    output.set_level("kvstore", "CRITICAL")
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)
    await output.audit.write('{"call":1}')
    written = (tmp_path / "n1.audit.jsonl").read_text() if directory else capfd.readouterr().err
    assert '{"call":1}' in written
    output.set_level("kvstore", "")
