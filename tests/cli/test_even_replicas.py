"""`kvstore partition even-replicas`, with a server that answers late."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvstore.cli import even_replicas as command
from kvstore.proto.admin_pb2 import ClusterReport
from tests.commands import kvstore
from tests.server.placement.test_balancing import cluster


def balanced() -> ClusterReport:
    return cluster(dict.fromkeys("abc", ""), "abc")


def reports(late: int) -> Iterator[ClusterReport]:
    """Yield reports of which the first `late` ones lack one server's answer."""
    for _ in range(late):
        report = balanced()
        report.nodes[0].no_answer = "timed out"
        yield report
    while True:
        yield balanced()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.0)


def test_even_replicas_waits_for_a_server_that_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without a busy server looked balanced: the command then moved nothing and said so."""
    found = reports(late=3)
    monkeypatch.setattr(command, "cluster_report", lambda where: next(found))
    done = kvstore("partition", "even-replicas", "--server", "x:1", "--json")
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"moved": [], "replicas": {"a": 1, "b": 1, "c": 1}}


def test_even_replicas_names_servers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "COMPLETE_S", 0.0)
    found = reports(late=1)
    monkeypatch.setattr(command, "cluster_report", lambda where: next(found))
    done = kvstore("partition", "even-replicas", "--server", "x:1")
    assert "not considered, because they do not answer or are not ready: a" in done.stderr
    assert "0 moved; replicas: b 1, c 1" in done.stdout
