"""The Spark session of a command: it is quiet, ends on an interrupt, and reports an error in one line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.errors import AnalysisException

from kvstore.cli import snapshot_spark, snapshot_tools
from kvstore.errors import InvalidRequest, StoreError, Unavailable
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (InvalidRequest("the cluster holds keys"), "the cluster holds keys"),
        (ConnectionRefusedError(111, "refused"), "the Spark job failed: its JVM was killed"),
        (AnalysisException("[PATH_NOT_FOUND] Path does not exist: x"), "Path does not exist: x"),
    ],
)
def test_error_of_a_job_is_reported_though_its_jvm_cannot_be_ended(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    def fail(_: object) -> None:
        raise raised

    def stop() -> None:
        raise ConnectionRefusedError(111, "nobody there")

    session = SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda level: None), stop=stop)
    monkeypatch.setattr("kvstore.spark.session.open_session", lambda *_, **__: session)
    with pytest.raises(StoreError, match=re.escape(message)), snapshot_tools.Bar() as bar:
        snapshot_spark.in_session(fail, "local[1]", None, bar)


@pytest.mark.parametrize(
    ("master", "opened"),
    [("local[*]", "local[*,3]"), ("local[1]", "local[1,3]"), ("local[2,7]", "local[2,7]"), ("yarn", "yarn")],
)
def test_tasks_on_this_machine_are_tried_again(monkeypatch: pytest.MonkeyPatch, master: str, opened: str) -> None:
    seen = list[str]()
    session = SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda level: None), stop=lambda: None)

    def open_session(_: str, *, master: str, **__: object) -> SimpleNamespace:
        seen.append(master)
        return session

    monkeypatch.setattr("kvstore.spark.session.open_session", open_session)
    with snapshot_tools.Bar() as bar:
        snapshot_spark.in_session(lambda _: None, master, None, bar)
    assert seen == [opened]


def test_workers_import_nothing_from_the_current_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark starts them with `python -m` in the directory of the command."""
    (tmp_path / "this.py").write_text("print('a module of the current directory')")
    imported = list[bytes]()

    def open_session(*_: object, **__: object) -> None:
        imported.append(subprocess.check_output([sys.executable, "-m", "this"], cwd=tmp_path))
        raise Unavailable("no Java")

    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr("kvstore.spark.session.open_session", open_session)
    with pytest.raises(Unavailable, match="no Java"), snapshot_tools.Bar() as bar:
        snapshot_spark.in_session(lambda _: None, "local[1]", None, bar)
    assert imported[0].startswith(b"The Zen of Python")


def test_interrupt_ends_the_jvm_and_is_not_raised_within_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = threading.Event(), list[str]()

    def job(_: object) -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert ended.wait(PATIENCE_S), "nobody ended the JVM for whose answer it waits"
            raise ConnectionRefusedError(111, "nobody there")
        finally:
            said.append("pin given back")

    session = SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda level: None), stop=lambda: None)
    monkeypatch.setattr("kvstore.spark.session.open_session", lambda *_, **__: session)
    monkeypatch.setattr("kvstore.spark.session.end_jvm", ended.set)
    with pytest.raises(KeyboardInterrupt), snapshot_tools.Bar() as bar:
        snapshot_spark.in_session(job, "local[1]", None, bar)
    assert said == ["pin given back"]


def test_spark_banner_is_not_shown_as_a_start_error() -> None:
    greeting = "26/11/22 16:03:12 WARN NativeCodeLoader: Unable to load native-hadoop library"
    assert snapshot_spark.error_line(f"{greeting}\n") == ""
    assert snapshot_spark.error_line(f"Error: no heap\n{greeting}\n") == "Error: no heap"
