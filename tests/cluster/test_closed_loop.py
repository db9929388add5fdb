"""The load generator of the benchmark suite, against real nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.bench import closed_loop
from loadtest.bench.closed_loop import Request
from tests.cluster.harness import Cluster, running_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("go") is None, reason="no Go here"),
]
KEYS = 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("closed_loop")) as started:
        yield started


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return closed_loop.build(tmp_path_factory.mktemp("program"))


def endpoints_of(cluster: Cluster, protocol: str) -> list[str]:
    name = {"kv": "grpc", "http": "http"}.get(protocol, "resp")
    return [getattr(node, name) for node in cluster.local.load().nodes]


@pytest.mark.parametrize("protocol", ["resp", "cluster", "kv", "http"])
def test_generator_sets_and_gets_through_each_protocol(protocol: str, cluster: Cluster, program: Path) -> None:
    request = Request(
        protocol, endpoints_of(cluster, protocol), "fill", 8, prefix=f"{protocol}:", keys=KEYS, warmup_s=0.1
    )
    filled = closed_loop.run(program, request)
    assert (filled.operations, filled.errors) == (KEYS, {})
    borders: list[None] = []
    for op in ("get", "set"):
        found = closed_loop.run(program, request._replace(op=op, seconds=1.0), lambda: borders.append(None))
        assert found.errors == {}
        assert found.operations > 0
        assert found.rate == pytest.approx(found.operations, rel=0.5), "operations of about a second"
        assert 0 < found.p50_ms <= found.p99_ms
    assert len(borders) == 4, "two of each run"


@pytest.mark.parametrize("protocol", ["resp", "cluster", "kv", "http"])
def test_gets_of_absent_keys_are_errors(protocol: str, cluster: Cluster, program: Path) -> None:
    request = Request(protocol, endpoints_of(cluster, protocol), "get", 2, prefix="absent:", seconds=0.2)
    found = closed_loop.run(program, request)
    assert found.operations == 0
    assert sum(found.errors.values()) > 0


def test_pipelined_operations_are_counted_one_by_one(cluster: Cluster, program: Path) -> None:
    request = Request("resp", endpoints_of(cluster, "resp"), "fill", 2, pipeline=16, prefix="pipelined:", keys=KEYS)
    assert closed_loop.run(program, request).operations == KEYS


def test_unreachable_server_is_reported(program: Path) -> None:
    with pytest.raises(RuntimeError, match="connection refused"):
        closed_loop.run(program, Request("resp", ["127.0.0.1:1"], "set", 1))


def test_sources_are_formatted_and_pass_their_own_tests() -> None:
    for words in (["gofmt", "-l", "."], ["go", "vet", "."], ["go", "test", "."]):
        done = subprocess.run(
            words, cwd=closed_loop.SOURCE, capture_output=True, text=True, check=False, env=os.environ, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert words[0] == "go" or done.stdout == ""
