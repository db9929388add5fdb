"""Runs of Locust against a Redis endpoint with known faults: the report shows them."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.loadtest.generator.values import decode, run_of
from kvstore.loadtest.report.spoiled import EXIT
from kvstore.loadtest.run import LOCUSTFILE
from tests.beside import beside
from tests.conftest import ROOT
from tests.loadtest.generator.headless import COMMAND, run_locust
from tests.loadtest.generator.small_redis import SmallRedis, small_redis

pytestmark = [pytest.mark.slow]
PATIENT = ROOT / "tests" / "loadtest" / "generator" / "patient_users.py"


def run(redis: SmallRedis, folder: Path, *options: str, file: Path = LOCUSTFILE) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the document and the output."""
    words = ("--resp", redis.address, "--keys", "20", "--warmup", "1")
    code, made, _, said = run_locust(folder, *words, *options, "RespUser", file=file)
    return code, made, said


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["alone", "workers"])
def test_operations_never_begun_and_the_last_ones_are_reported(tmp_path: Path, processes: tuple[str, ...]) -> None:
    """Each user has five operations per second due. Its second one is in progress at the end, and for longer than the
    Locust master listens. A busy machine may take seconds to start it: the first one ends in time anyway."""
    options = ("--workload", "ycsb-c", "--rate", "20", "--seconds", "12", "--achieved-min", "0.9")
    with small_redis(answer_s=8.0) as redis:
        code, made, said = run(redis, tmp_path, *options, *processes, file=PATIENT)
    assert code in (1, EXIT), said
    assert made["total"]["due"] > 100, said
    assert made["total"]["done"] == redis.reads == 8
    assert made["seconds"] < redis.last_answer_at - redis.first_read_at, "the last ones ended after the run"


def test_store_that_loses_the_first_write_to_every_key_is_detected(tmp_path: Path) -> None:
    """The store returns the records that were loaded before the run."""
    with small_redis(is_forgetful=True) as redis:
        code, made, said = run(redis, tmp_path, "--workload", "ycsb-a", "--rate", "50", "--seconds", "3")
    assert code == 1, said
    assert made["total"]["wrong"] > 10
    assert all("an earlier run" in message for message in made["wrong"])


def test_two_workers_write_values_of_one_run(tmp_path: Path) -> None:
    options = ("--workload", "writes", "--rate", "50", "--seconds", "3", "--processes", "2", "--no-preload")
    with small_redis() as redis:
        code, _, said = run(redis, tmp_path, *options)
    assert code in (0, EXIT), said
    writers = {decode(key, value).writer for key, value in redis.records.items()}
    assert len(writers) == 2
    assert len({run_of(writer) for writer in writers}) == 1


def test_generator_that_stalls_repeatedly_spoils_its_run(tmp_path: Path) -> None:
    """The store answers at once; callers would have waited for the load machine."""
    report = tmp_path / "report.html"
    words = ("--workload", "ycsb-c", "--keys", "20", "--rate", "50", "--seconds", "8", "--warmup", "1")
    with small_redis() as redis:
        where = ("--report", str(report), "--resp", redis.address)
        command = [*COMMAND, "-f", str(LOCUSTFILE), *where, *words, "RespUser"]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "All users spawned" in line)
            with beside(lambda _: process.stderr.read()):
                while process.poll() is None:
                    for how, seconds in ((signal.SIGSTOP, 0.3), (signal.SIGCONT, 0.2)):
                        process.send_signal(how)
                        with suppress(subprocess.TimeoutExpired):
                            process.wait(seconds)
    assert process.returncode == EXIT, said
    verdict = json.loads(report.with_suffix(".json").read_text())["verdict"]
    assert verdict["reasons"] == []
    assert "the load generator was late" in verdict["spoiled"][0]
