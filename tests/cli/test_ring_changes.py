"""`kvstore ring`: incompatible options are refused at once, and the status is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import admin, replicas, ring_changes
from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.ring_views import status_text
from kvstore.errors import OutcomeUnknown, Unavailable
from kvstore.proto import admin_pb2
from tests.commands import kvstore

NOWHERE = ClusterOptions(Path("nowhere"))
Ring, RingStatus = admin_pb2.RingResponse, admin_pb2.RingStatusResponse


class Cluster:
    """The answers of the servers in turn; an error: they are unavailable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.left = list(answers)
        self.changed = 0
        for module in (admin, replicas, ring_changes):
            monkeypatch.setattr(module, "ask_admin", self.ask, raising=False)
        monkeypatch.setattr("time.sleep", lambda _: None)

    def ask(self, *_: Any, again: bool = False) -> Any:
        if again:
            self.changed += 1
            return admin_pb2.ChangeRingResponse(version=7)
        found = self.left.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--add", "p4", "--add-count", "2"), "expected --add or --add-count, got both"),
        (("plan", "--add", "p4", "--remove", "p1"), "to add or to remove, got both"),
        (("add",), "expected either ids of new partitions or --count"),
        (("add", "p4", "--count", "2"), "expected either ids of new partitions or --count"),
        (("move", "p1"), "expected --source and --share, or --first and --last"),
        (("throttle",), "expected --mib-per-s, --parallel or both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_go_together_are_wrong_usage(arguments: tuple[str, ...], words: str) -> None:
    answer = kvstore("ring", *arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert words in answer.stderr.splitlines()[-1]


def test_paused_moves_are_reported_even_while_there_are_none() -> None:
    assert "no moves (paused: `kvstore ring resume`)" in status_text(admin_pb2.RingStatusResponse(paused=True))
    assert status_text(admin_pb2.RingStatusResponse()).endswith("no moves")


def test_waiting_for_paused_moves_reports_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is the same in a script."""
    moves = [admin_pb2.MoveStatus(id=1)]
    looks = [admin_pb2.RingStatusResponse(moves=moves, paused=each) for each in (False, True, True)]
    looks.append(admin_pb2.RingStatusResponse())
    monkeypatch.setattr(ring_changes, "ring_status", lambda *_: looks.pop(0))
    monkeypatch.setattr(ring_changes.time, "sleep", lambda _: None)
    ring_changes._follow(ClusterOptions(), quiet=True)
    assert (looks, capsys.readouterr().err.count("moves are paused")) == ([], 1)


def test_planned_moves_are_done_though_servers_are_unavailable_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If it were reported as failed, it would be requested again and done twice."""
    moves = RingStatus(moves=[admin_pb2.MoveStatus(id=1)])
    away = (Unavailable("connection refused"), OutcomeUnknown("Socket closed"))
    cluster = Cluster(monkeypatch, *away, moves, away[0], RingStatus())
    ring_changes.add(count=1, wait=True, json=True)
    shown = capsys.readouterr()
    assert (cluster.changed, cluster.left, json.loads(shown.out)["version"]) == (1, [], 7)
    assert shown.err.count("the change continues") == 2, "once each time"


def test_plan_is_shown_before_its_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ring_changes.add(count=1, wait=True, json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["version"] == 7
    assert "the moves continue: wait for them with `kvstore ring status --wait`" in shown.err


def test_servers_unavailable_for_long_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "OUTAGE_S_MAX", -1.0)
    cluster = Cluster(monkeypatch, *[Unavailable("connection refused")] * 5)
    with pytest.raises(Unavailable, match="connection refused"):
        ring_changes.add(count=1, wait=True)
    assert len(cluster.left) == 3


def test_waiting_for_moves_of_an_unavailable_cluster_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, Unavailable("connection refused"), RingStatus())
    with pytest.raises(Unavailable):
        ring_changes.status(wait=True)
    assert len(cluster.left) == 1


def test_finished_change_is_no_failure_where_moves_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch, Unavailable("connection refused"))
    ring_changes.cancel(json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"version": 7}
    assert "the change is made as ring version 7" in shown.err


def test_position_of_a_replica_can_be_unknown() -> None:
    """The metadata store does not answer: the message must not say that all data is lost."""
    level = admin_pb2.ReplicaMove(partition="p1", newcomer="n4", leaving="n1", newcomer_sequence=0, leader_sequence=0)
    unknown = admin_pb2.ReplicaMove(partition="p2", newcomer="n4", leaving="n1")
    shown = status_text(RingStatus(replacing=[level, unknown])).splitlines()
    assert [line.split()[3:] for line in shown[-2:]] == [["0", "0"], ["-", "-"]]


def test_moved_replica_is_reported_though_servers_were_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Unavailable("connection refused")
    moving = RingStatus(replacing=[admin_pb2.ReplicaMove(partition="p1", newcomer="n4", leaving="n1")])
    ring = Ring(partitions=[admin_pb2.RingPartition(id="p1", replicas=["n2", "n3", "n4"])])
    cluster = Cluster(monkeypatch, away, moving, RingStatus(), away, RingStatus(), ring)
    replicas.move_replica("p1", "n1", "n4")
    assert (cluster.changed, cluster.left) == (1, [])
    Cluster(monkeypatch, away)
    with pytest.raises(Unavailable, match="no server reports whether the replica of p1 on n4 has caught up within"):
        replicas.wait_until_replaced("p1", "n4", NOWHERE, timeout_s=-1)


def test_node_is_reported_empty_though_servers_were_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Ring(partitions=[admin_pb2.RingPartition(id="p1", replicas=each)]) for each in (["n1"], ["n2"])]
    cluster = Cluster(monkeypatch, held[0], Unavailable("connection refused"), held[1])
    replicas.wait_until_empty("n1", NOWHERE, timeout_s=9)
    assert cluster.left == []
