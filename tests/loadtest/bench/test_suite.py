"""The benchmark suite leaves no process behind, and asks for nothing that a fresh machine lacks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import ClientConfig
from kvstore.devcluster.layout import ClusterFile, Wish
from kvstore.errors import ConfigError, Unavailable
from loadtest.bench import suite


@pytest.mark.parametrize("failure", [Unavailable("n2 ended while starting"), KeyboardInterrupt()], ids=repr)
def test_what_was_started_before_the_cluster_failed_is_ended(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    tried: list[int] = []

    class Failing:
        def __init__(self, data_dir: Path, _progress: Any) -> None:
            self.data_dir = data_dir

        def up(self, wish: Wish) -> None:
            tried.append(wish.port_offset)
            if len(tried) == 1:
                raise ConfigError("taken by another process: 127.0.0.1:31401")
            running.update(("zookeeper", "n1"))
            raise failure

        def down(self) -> None:
            running.clear()

    monkeypatch.setattr(suite, "LocalCluster", Failing)
    with pytest.raises(type(failure)), suite._cluster(None, tmp_path):
        raise AssertionError("there is no cluster to measure")
    assert tried == list(suite.OFFSETS[:2]), "ports that are taken are passed over, and nothing else"
    assert running == set()


def test_lines_that_are_not_there_are_told_in_one_line(
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
