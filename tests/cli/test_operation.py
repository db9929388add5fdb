"""Commands that change the ring repeat a request under one id, at any server that answers (H11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvstore.cli import admin, replicas, ring_changes
from kvstore.cli.cluster import ClusterOptions
from kvstore.errors import OutcomeUnknown, PermissionDenied, StoreError, Unavailable
from kvstore.proto import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from kvstore.rpc import channels

NOWHERE = ClusterOptions(Path("nowhere"))


class Lost(grpc.RpcError):
    """A request whose answer was lost."""

    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, text: str = "Socket closed") -> None:
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> tuple[()]:
        return ()


NOT_SENT = Lost(text="failed to connect to all addresses")


class Servers:
    """The answers of the servers in turn; None: a normal answer."""

    def __init__(self, *answers: Lost | None) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []
        self.clusters: list[str] = []
        """The clusters that the servers report in turn."""
        self.wanted = ""
        """The cluster of the folder."""

    def Topology(self, request: Any, timeout: float) -> kv_pb2.TopologyResponse:
        return kv_pb2.TopologyResponse(server="n1", cluster=self.clusters.pop(0) if self.clusters else "")

    def ChangeRing(self, request: Any, timeout: float) -> admin_pb2.ChangeRingResponse:
        self.asked.append(request.operation)
        if (lost := self._answers.pop(0)) is not None:
            raise lost
        return admin_pb2.ChangeRingResponse(version=7)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Servers]:
    def of(*answers: Lost | None, clusters: Sequence[str] = (), wanted: str = "") -> Servers:
        servers = Servers(*answers)
        servers.clusters, servers.wanted = list(clusters), wanted
        endpoints = [f"n{number}:1" for number in range(len(answers))]
        config = SimpleNamespace(endpoints=endpoints, tls=None, login=None, cluster=servers.wanted)
        monkeypatch.setattr(admin, "config_of", lambda *_: config)
        monkeypatch.setattr(channels, "open_channel", channel)
        monkeypatch.setattr(admin_pb2_grpc, "AdminStub", lambda _: servers)
        monkeypatch.setattr(kv_pb2_grpc, "KVStub", lambda _: servers)
        return servers

    @contextmanager
    def channel(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return of


def change(operation: str = "", *, dry_run: bool = False) -> admin_pb2.ChangeRingResponse:
    request = admin_pb2.ChangeRingRequest(
        action=admin_pb2.ChangeRingRequest.ADD, count=1, operation=operation, dry_run=dry_run
    )
    return ring_changes.change_ring(request, NOWHERE)


def test_after_a_lost_answer_another_server_is_asked_with_the_same_id(
    serve: Callable[..., Servers],
) -> None:
    servers = serve(NOT_SENT, Lost(), None)
    assert change().version == 7
    assert len(servers.asked) == 3
    assert len(set(servers.asked)) == 1
    assert servers.asked[0]


def test_each_command_has_its_own_id_unless_one_is_given(serve: Callable[..., Servers]) -> None:
    ids = []
    for operation in ("", "", "a1"):
        servers = serve(None)
        change(operation)
        ids += servers.asked
    assert len(set(ids)) == 3
    assert ids[2] == "a1"


@pytest.mark.parametrize("after", [(), (NOT_SENT,), (Lost(),)])
def test_unknown_outcome_shows_how_to_ask_again(serve: Callable[..., Servers], after: tuple[Lost]) -> None:
    servers = serve(Lost(), *after)
    with pytest.raises(OutcomeUnknown) as caught:
        change()
    assert f"--operation {servers.asked[0]}" in str(caught.value)


def test_request_that_reached_no_server_is_not_done(serve: Callable[..., Servers]) -> None:
    serve(NOT_SENT, NOT_SENT)
    with pytest.raises(Unavailable):
        change()


def test_read_only_commands_have_no_operation_id(serve: Callable[..., Servers]) -> None:
    servers = serve(Lost())
    with pytest.raises(StoreError):
        change(dry_run=True)
    assert servers.asked == [""]


def test_refusal_does_not_hide_that_an_attempt_before_it_may_be_done(serve: Callable[..., Servers]) -> None:
    """Another server may know an older ring, or fewer servers, and refuse the change that the first one has written."""
    servers = serve(
        Lost(), Lost(grpc.StatusCode.PERMISSION_DENIED, "want 3 replicas, but 2 servers can hold one"), None
    )
    with pytest.raises(OutcomeUnknown, match="want 3 replicas") as caught:
        change()
    assert f"--operation {servers.asked[0]}" in str(caught.value)


def test_refusal_after_an_unreachable_server_is_a_refusal(serve: Callable[..., Servers]) -> None:
    serve(NOT_SENT, Lost(grpc.StatusCode.PERMISSION_DENIED, "no"))
    with pytest.raises(PermissionDenied):
        change()


def test_interrupted_change_shows_how_to_ask_for_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ring_changes, "ask_admin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        change("a1")
    assert "the change may be applied; repeat the command with --operation a1" in capsys.readouterr().err
    monkeypatch.setattr(replicas, "ask_admin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replicas.change_replicas(admin_pb2.ChangeReplicasRequest(drain="n1"), ClusterOptions())
    assert "repeat the command; the change" in capsys.readouterr().err, "`node drain` has no such option"


def test_change_by_a_folder_is_not_made_in_another_cluster_at_its_ports(serve: Callable[..., Servers]) -> None:
    """Partitions and servers have the same names in every local cluster."""
    servers = serve(None, None, clusters=("b", "a"), wanted="a")
    assert change().version == 7
    assert len(servers.asked) == 1
    servers = serve(None, None, clusters=("b", "b"), wanted="a")
    with pytest.raises(Unavailable, match=r"expected a server of cluster a, got one of b"):
        change()
    servers.clusters = ["b", "b"]
    with pytest.raises(Unavailable, match="expected a server of cluster a, got one of b"):
        change(dry_run=True)
    assert servers.asked == []


def test_change_whose_outcome_is_unknown_is_not_made_in_another_cluster(serve: Callable[..., Servers]) -> None:
    servers = serve(Lost(), None, None, clusters=("a", "b", "a"))
    assert change().version == 7
    assert (len(servers.asked), servers.clusters) == (2, [])
    servers = serve(Lost(), None, clusters=("a", "b"))
    with pytest.raises(OutcomeUnknown, match="--operation"):
        change()
    assert len(servers.asked) == 1
