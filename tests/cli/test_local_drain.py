"""`kvstore node drain` and `undrain` of all processes of a machine."""

from __future__ import annotations

import json

import pytest

from kvstore.cli import local, replicas
from kvstore.errors import InvalidRequest
from kvstore.proto.admin_pb2 import ChangeReplicasRequest, RingStatusResponse
from tests.commands import kvstore


class Ring:
    """The servers that are draining, and the calls in their order."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.draining: list[str] = []
        self.calls: list[str] = []

    def change(self, request: ChangeReplicasRequest, cluster: object) -> RingStatusResponse:
        if request.drain and request.drain == self.refused:
            raise InvalidRequest("no other server can take the replicas of p1; add a server first")
        if request.drain:
            self.draining.append(request.drain)
        else:
            self.draining.remove(request.undrain)
        return RingStatusResponse(draining=self.draining)

    def wait(self, node: str, cluster: object, *, timeout_s: float) -> None:
        self.calls.append(f"{node} is empty of {','.join(self.draining)}")

    def hand_over(self, node: str, cluster: object, timeout_s: float, *, may_be_down: bool) -> list[str]:
        self.calls.append(f"{node} hands over")
        return [f"lead of {node}"]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    found = Ring()
    monkeypatch.setattr(replicas, "change_replicas", found.change)
    monkeypatch.setattr(replicas, "wait_until_empty", found.wait)
    monkeypatch.setattr(local, "_hand_over", found.hand_over)
    return found


def test_processes_are_drained_together(ring: Ring) -> None:
    """All are marked before one is waited for, so that no replica moves from one to another."""
    done = kvstore("node", "drain", "n1", "n1.2", "--json")
    assert done.returncode == 0
    assert ring.calls == ["n1 is empty of n1,n1.2", "n1.2 is empty of n1,n1.2", "n1 hands over", "n1.2 hands over"]
    assert json.loads(done.stdout) == [
        {"node": node, "handed_over": [f"lead of {node}"], "replicas_left": None} for node in ("n1", "n1.2")
    ]


def test_one_node_is_one_document(ring: Ring) -> None:
    document = {"node": "n1", "handed_over": ["lead of n1"], "replicas_left": None}
    assert json.loads(kvstore("node", "drain", "n1", "--json").stdout) == document


def test_no_process_is_drained_if_one_cannot_be(ring: Ring) -> None:
    ring.refused = "n1.2"
    done = kvstore("node", "drain", "n1", "n1.2")
    assert done.returncode == 1
    assert ring.draining == []
    assert ring.calls == ["n1 hands over", "n1.2 hands over"]
    assert done.stdout.count("keeps its replicas: no other server can take the replicas of p1") == 2


def test_processes_are_undrained_together(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    ring.draining = ["n1", "n1.2", "n2"]
    states = {"n1": local._Undrained.SERVES, "n1.2": local._Undrained.DOWN}
    monkeypatch.setattr(local, "_serve_again", lambda node, cluster: states[node])
    answer = kvstore("node", "undrain", "n1", "n1.2", "--json")
    assert answer.returncode == 0, answer.stderr
    done = json.loads(answer.stdout)
    assert (done["draining"], done["nodes"]) == (["n2"], {"n1": "serves", "n1.2": "down"})
    ring.draining = ["n1", "n1.2"]
    last = kvstore("node", "undrain", "n1", "n1.2").stdout.splitlines()[-2:]
    assert last == ["n1 accepts operations again", "n1.2 is not up; it accepts operations once it is started"]
