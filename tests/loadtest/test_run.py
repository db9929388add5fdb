"""A load test or drill that cannot run reports why in one line, before a cluster is started for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest import drill, ring_drill, run
from loadtest.budget import Load
from loadtest.budget import run_load as run_budget_load
from tests.conftest import ROOT
from tests.shell import run_by_shell
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "--rate: expected a number above 0"),
        (["--workload", "ycsb-z"], "--workload: expected one or more of ycsb-a"),
        (["--keys-by", "luck"], "luck"),
        (["--seconds", "5"], "--warmup: expected 0 up to but not including --seconds"),
        (["--rate", "inf"], "--rate: expected a number above 0 and below infinity"),
        (["--errors-max", "5"], "--errors-max: expected 0 to 1"),
        (["--report", "x.json"], "--report: expected an HTML file"),
        (["--report", "/dev/null/x.html"], "--report: cannot write /dev/null/x.html"),
        (["--baseline", "nosuch.json"], "--baseline: "),
        (["--data-dir", "nosuch"], "--data-dir: no cluster serves in nosuch"),
    ],
)
def test_wrong_options_are_refused_at_once(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run", *words])
    monkeypatch.delattr(run, "running_cluster")
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


BACKGROUND = """
import signal, time
try:
    print("runs", flush=True)
    while True:
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
"""Replaces Locust: it ends when it is interrupted."""


def test_one_sigterm_ends_a_load_test_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "locust.py").write_text(BACKGROUND)
    program = "from kvstore.loadtest.run import run_locust; run_locust([])"
    with subprocess.Popen(
        run_by_shell("trap '' INT; ", [sys.executable, "-c", program]),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        process.terminate()
        assert process.stdout.readline() == b"interrupted\n"
        assert process.wait(PATIENCE_S) == 0


DEAF = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
print("runs", flush=True)
while True:
    time.sleep(600)
"""
"""Replaces Locust: it does not end when it is asked to."""


def test_after_a_second_interrupt_no_load_reaches_the_stopping_cluster(tmp_path: Path) -> None:
    (tmp_path / "locust.py").write_text(DEAF)
    program = "from kvstore.loadtest.run import run_locust; run_locust([])"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        (locust,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    assert not locust.is_running()


@pytest.mark.parametrize(
    ("module", "words"),
    [(drill, []), (drill, ["--nemesis"]), (ring_drill, [])],
)
def test_drill_without_requirements_does_not_pass(
    module: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["drill", "--only", "kils", *words])
    for name in ("run_drill", "run_nemesis"):
        monkeypatch.setattr(module, name, lambda **_: True, raising=False)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert "kils" in capsys.readouterr().err


async def test_server_that_ends_ends_the_measurement_of_a_budget() -> None:
    """It read the end of the stream in an endless loop."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    with pytest.raises((RuntimeError, ConnectionError)):
        await asyncio.wait_for(run_budget_load(Load("SET", "SET", 1, 1, 4), f"{host}:{port}", "t"), PATIENCE_S)
    server.close()
