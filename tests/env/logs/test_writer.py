"""A thread of its own writes the lines of the log: callers never wait for it, and dropped lines are counted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvstore.env.log_config import LogOutput
from kvstore.env.log_output import open_log
from kvstore.env.logs import audit_lines
from kvstore.env.logs import writer as log_writer
from kvstore.env.logs.audit_lines import QueuedAuditLines
from kvstore.env.logs.writer import (
    AUDIT_BYTES_MAX,
    AUDIT_LINES_MAX,
    BYTES_MAX,
    FLUSH_S,
    LINES_MAX,
    LogWriter,
    QueuedHandler,
    RotatedFile,
)
from kvstore.env.real import EXIT_FATAL
from tests.pipes import full_pipe
from tests.waiting import PATIENCE_S, wait_until_blocking

log = logging.getLogger("kvstore.tests.log_writer")


class PipeSink:
    """Writes into a pipe that nobody reads before the test does."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def write(self, line: str) -> None:
        os.write(self._writer, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._writer)


def test_log_writer_drops_and_counts_lines_while_a_pipe_is_full() -> None:
    writer, sink = LogWriter(), PipeSink()
    began = time.monotonic()
    accepted = sum(writer.put(sink, "x" * 1000) for _ in range(LINES_MAX))
    assert BYTES_MAX // 1000 <= accepted < LINES_MAX
    # A full pipe holds 64 lines. If calls waited for it, thousands of them would.
    assert time.monotonic() - began < PATIENCE_S
    assert writer.dropped == LINES_MAX - accepted
    with open(sink.reader, "rb") as reader:
        read = [reader.readline() for _ in range(accepted)]
    assert read == [b"x" * 1000 + b"\n"] * accepted
    writer.close()


@pytest.mark.usefixtures("loggers")
def test_log_writer_reports_dropped_lines_once_when_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "BYTES_MAX", 100_000)
    path = tmp_path / "n1.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    output = open_log(LogOutput(), process="n1", directory=tmp_path)
    for number in range(500):
        logging.getLogger(f"kvstore.tests.log_writer.{number % 20}").warning("%s", "x" * 1000)
    dropped = output.statistics()["log_lines_dropped_total"]
    assert dropped > 200
    read = bytearray()

    def reported() -> bool:
        try:
            read.extend(os.read(reader, 1 << 20))
        except BlockingIOError:
            return False
        return b"dropped log lines" in read

    wait_until_blocking(reported, what="the line that states what was dropped")
    assert f"dropped log lines={dropped} total={dropped}: ".encode() in read
    assert read.count(b"dropped log lines") == 1
    os.close(reader)


def test_audit_lines_are_queued_while_log_lines_fill_the_queue() -> None:
    writer, sink = LogWriter(), PipeSink()
    while writer.put(sink, "x" * 1000):
        pass
    assert all(writer.put(sink, "y" * 1000, is_audit=True) for _ in range(AUDIT_LINES_MAX))
    assert not writer.put(sink, "y" * AUDIT_BYTES_MAX, is_audit=True), "audit lines are bounded too"
    os.close(sink.reader)  # ends the writer's wait
    writer.close()


class HeldSink:
    """Writes into a list once the test allows it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.let = threading.Event()

    def write(self, line: str) -> None:
        self.let.wait()
        self.lines.append(line)

    def close(self) -> None: ...


@pytest.mark.usefixtures("loggers")
def test_flush_under_the_handlers_lock_does_not_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_writer, "LINES_MAX", 1)
    writer, sink = LogWriter(), HeldSink()
    handler = QueuedHandler(writer, sink)
    monkeypatch.setattr(log_writer.log, "handlers", [handler])
    monkeypatch.setattr(log_writer.log, "propagate", False)
    assert writer.put(sink, "kept")
    assert not writer.put(sink, "dropped")
    with handler.lock or nullcontext():  # as logging.shutdown does
        sink.let.set()
        wait_until_blocking(lambda: len(sink.lines) == 2, what="the report of dropped lines")
        assert writer.flush()
    assert sink.lines[0] == "kept"
    assert "dropped log lines=1" in sink.lines[1]
    writer.close()


class ClosedSink:
    """A stream that was closed."""

    def write(self, line: str) -> None:
        raise ValueError("I/O operation on closed file")

    def close(self) -> None: ...


def test_log_writer_survives_a_sink_that_is_closed(tmp_path: Path) -> None:
    writer, path = LogWriter(), tmp_path / "n1.log"
    assert writer.put(ClosedSink(), "lost")
    assert writer.put(RotatedFile(path), "after")
    assert writer.flush()
    assert path.read_text(encoding="utf-8").splitlines()[-1] == "after"
    assert writer.dropped == 1
    writer.close()


async def test_audit_line_fails_when_its_file_cannot_be_written() -> None:
    writer = LogWriter()
    handler = QueuedHandler(writer, ClosedSink())
    with pytest.raises(OSError, match="the write of the line failed"):
        await QueuedAuditLines(writer, handler).write("a line")
    writer.close()


async def test_audit_line_fails_when_the_writer_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_lines, "WRITTEN_S", 0.05)
    writer, sink = LogWriter(), PipeSink()
    while writer.put(sink, "x" * 1000):
        pass
    with pytest.raises(OSError, match="was not written within"):
        await QueuedAuditLines(writer, QueuedHandler(writer, sink)).write("a line")
    os.close(sink.reader)
    writer.close()


def test_rotated_file_keeps_four_full_files_beside_the_current_one(tmp_path: Path) -> None:
    sink = RotatedFile(tmp_path / "n1.log", bytes_max=100)
    for number in range(70):
        sink.write(f"line {number:04d}")
    sink.close()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["n1.log", "n1.log.1", "n1.log.2", "n1.log.3", "n1.log.4"]
    newest_last = ["n1.log.4", "n1.log.3", "n1.log.2", "n1.log.1", "n1.log"]
    kept = [line for name in newest_last for line in (tmp_path / name).read_text(encoding="ascii").splitlines()]
    assert kept == [f"line {number:04d}" for number in range(70 - len(kept), 70)]
    assert all((tmp_path / name).stat().st_size <= 100 for name in names)


FILLING = """
import resource, sys
from pathlib import Path
from kvstore.env.logs.writer import RotatedFile
sink = RotatedFile(Path(sys.argv[1]))
sink.write("before")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
try:
    sink.write("x" * 100)
except OSError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
sink.write("after")
"""


def test_rotated_file_holds_no_partial_line_after_a_failed_write(tmp_path: Path) -> None:
    """The next line was appended to the part: neither could be read, and the audit log lacked both."""
    path = tmp_path / "n1.audit.jsonl"
    command = [sys.executable, "-c", FILLING, str(path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "OSError\n"
    assert path.read_text(encoding="ascii").splitlines() == ["before", "after"]


PROGRAM = """
import sys
from kvstore.env.log_config import LogOutput
from kvstore.env.log_output import open_log
from kvstore.env.real import end_process
import logging
open_log(LogOutput(), process="n1")
for number in range(int(sys.argv[1])):
    logging.getLogger(f"kvstore.x{number}").warning("x" * 1000)
end_process("the sync failed")
"""


def test_fatal_line_is_the_last_one_written_when_the_log_is_healthy() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, "20"], capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_FATAL
    assert len(ended.stderr.splitlines()) == 21
    assert ended.stderr.endswith("fatal: the sync failed\n")


def test_process_ends_within_the_flush_limit_when_nobody_reads_its_log() -> None:
    began = time.monotonic()
    with full_pipe() as writer, subprocess.Popen([sys.executable, "-c", PROGRAM, "200"], stderr=writer) as process:
        assert process.wait(timeout=PATIENCE_S) == EXIT_FATAL
    assert time.monotonic() - began >= FLUSH_S


IGNORING = """
import logging, threading
from kvstore.env.log_config import LogOutput
from kvstore.env.log_output import open_log

class Finalized:
    def __del__(self):
        raise ValueError("in a finalizer" + "x" * 8000)

def run():
    raise ValueError("in a thread" + "x" * 8000)

open_log(LogOutput(), process="test")
for number in range(LINES):
    logging.getLogger(f"kvstore.{number}").error("%s", "x" * 1000)
Finalized()
thread = threading.Thread(target=run)
thread.start()
thread.join()
print("goes on", flush=True)
"""


def test_uncaught_exception_blocks_no_thread_when_nobody_reads_the_log() -> None:
    command = [sys.executable, "-c", IGNORING.replace("LINES", "200")]
    with full_pipe() as writer, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert said == b"goes on\n"


def test_uncaught_exception_is_logged() -> None:
    program = IGNORING.replace("LINES", "0")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "ERROR kvstore.env.log_output ignored an exception: " in ended.stderr
    assert "ERROR kvstore.env.log_output thread " in ended.stderr
    assert ended.stderr.count("ValueError: in a") == 2
