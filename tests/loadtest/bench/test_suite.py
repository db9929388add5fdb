"""The benchmark suite leaves no process, and needs nothing that a fresh machine lacks."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import ClientConfig
from kvstore.devcluster.layout import ClusterFile, UpOptions
from kvstore.errors import ConfigError, Unavailable
from kvstore.loadtest.loads import LoadResult, LoadSpec
from loadtest.bench import redis_lines, suite
from loadtest.bench.redis_lines import Figure, Line


@pytest.mark.parametrize("failure", [Unavailable("n2 ended while starting"), KeyboardInterrupt()], ids=repr)
def test_processes_started_before_the_cluster_failed_are_ended(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    tried: list[int] = []

    class Failing:
        def __init__(self, data_dir: Path, _progress: Any) -> None:
            self.data_dir = data_dir

        def up(self, wish: UpOptions) -> None:
            tried.append(wish.port_offset)
            self.data_dir.mkdir()
            if len(tried) == 1:
                self.data_dir.rmdir()
                raise ConfigError("taken by another process: 127.0.0.1:31401")
            if len(tried) == 2:
                raise Unavailable("node n1 ended while starting; it said:\nOSError: [Errno 98] Address already in use")
            running.update(("zookeeper", "n1"))
            raise failure

        def down(self) -> None:
            running.clear()

    monkeypatch.setattr(suite, "LocalCluster", Failing)
    with pytest.raises(type(failure)), suite._cluster(None, tmp_path):
        raise AssertionError("there is no cluster to measure")
    assert tried == list(suite.OFFSETS[:3]), "ports that are taken are passed over, and nothing else"
    assert running == set()


def test_unknown_lines_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def subject(_file: ClusterFile) -> None:
        return None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "_cluster", lambda _data_dir, _folder: nullcontext())
    monkeypatch.setattr(suite, "_subject", subject)
    monkeypatch.setattr(suite, "_lines", lambda _subject, _seconds: iter(()))
    monkeypatch.setattr(sys, "argv", ["suite", "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "suite: no line that can be measured here holds 'nothing' in its name\n"


def test_store_and_the_floors_take_turns_and_ratios_are_of_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []
    rates = {"s:1": 10.0, "f:1": 20.0, "g:1": 40.0}

    def run_line(line: Line, address: str, requests: int) -> Figure:
        asked.append((address, line.tag, requests))
        return Figure(rates[address] * len(asked), 1.0, 1.0)

    for module in (suite, redis_lines):
        monkeypatch.setattr(module, "run_line", run_line)
    places = {"the store": ("s:1", "t1"), "the floor": ("f:1", "t2"), "the floor with lookup": ("g:1", "t2")}
    found = list(suite._in_turn("SET", Line("set", 1, tag="tag"), places, 2, 1_000.0))
    assert asked[0] == ("s:1", "t1", 2_000), "how fast the store is"
    s, f, g = (("s:1", "t1", 10_000), ("f:1", "t2", 10_000), ("g:1", "t2", 10_000))
    assert asked[1:] == [s, f, g, g, f, s]
    assert [(each.name.removeprefix("floor: SET: "), each.values) for each in found] == [
        ("the store", [20.0, 70.0]),
        ("the floor", [60.0, 120.0]),
        ("the floor with lookup", [160.0, 200.0]),
        ("the store / the floor", [20 / 60, 70 / 120]),
        ("the store / the floor with lookup", [20 / 160, 70 / 200]),
    ]


def test_measuring_only_store_lines_starts_no_floor() -> None:
    subject = suite.Subject.__new__(suite.Subject)
    for only in ("SET, 50 connections", "GET", "nothing", "floor: nothing"):
        assert list(suite._beside_floor(subject, 1, 1.0, only)) == []


def test_without_redis_benchmark_the_lines_of_our_own_clients_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = suite.Subject(
        ClusterFile.__new__(ClusterFile), "127.0.0.1:6401", "t0", ClientConfig(endpoints=("127.0.0.1:7401",))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    without = [measured.name for measured, _ in suite._lines(subject, 1.0)]
    assert without == [
        "AsyncClient put, 1,000 in flight, 1 KB",
        "AsyncClient get, 1,000 in flight, 1 KB",
        "unary gRPC Put, 64 in flight",
        "unary gRPC Get, 64 in flight",
    ]
    assert "redis-tools" in capsys.readouterr().err
    program = tmp_path / "redis-benchmark"
    program.touch(0o755)
    assert [measured.name for measured, _ in suite._lines(subject, 1.0)][-4:] == without
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [["--runs", "0"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_suite_of_nothing_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", *words])
    monkeypatch.setattr(suite, "run_suite", lambda **_: pytest.fail("it was begun"))
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    assert "expected 1 run or more" in capsys.readouterr().err


def test_failed_operations_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line showed only the rate of the completed operations."""
    outcome = LoadResult(LoadSpec(), took_s=1.0, errors=Counter({"Unavailable": 3}))

    async def run_load(_client: Any, _load: LoadSpec) -> LoadResult:
        return outcome

    monkeypatch.setattr(suite, "run_load", run_load)
    monkeypatch.setattr(suite, "AsyncClient", lambda _config: nullcontext())
    monkeypatch.setattr(suite, "_on_loop", lambda work: asyncio.run(work()))
    subject = suite.Subject(ClusterFile.__new__(ClusterFile), "", "", ClientConfig(endpoints=("a:1",)))
    measured = suite.Measured("put")
    suite._async_client(subject, LoadSpec(), measured)
    assert measured.row()["note"] == "errors: {'Unavailable': 3}"
