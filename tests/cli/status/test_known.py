"""Commands ask servers for facts that both servers and the metadata store know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.ring import locate
from kvstore.cli.status import known
from kvstore.errors import MetadataUnavailable, NoSuchLedger, PermissionDenied, StoreError, Unavailable
from kvstore.proto.admin_pb2 import RingRequest, RingResponse
from kvstore.ring import MURMUR3
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring


def result_of(monkeypatch: pytest.MonkeyPatch, cluster: ClusterOptions, servers: str | StoreError) -> str:
    """Return the view of a command if the servers answer so and the metadata store can be read."""

    def ask_admin(*_: Any) -> str:
        if isinstance(servers, StoreError):
            raise servers
        return servers

    async def work(_: Any) -> str:
        return ""

    monkeypatch.setattr(known, "ask_admin", ask_admin)
    monkeypatch.setattr(known, "with_tools", lambda *_: "from the store")
    return known.by_servers_or_store(cluster, lambda *_: "", work)


def test_server_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert result_of(monkeypatch, ClusterOptions(), "from a server") == "from a server"


@pytest.mark.parametrize("error", [Unavailable("nobody listens"), MetadataUnavailable("it is away from the server")])
def test_where_no_server_answers_the_store_is_read_and_that_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: StoreError
) -> None:
    assert result_of(monkeypatch, ClusterOptions(), error) == "from the store"
    assert f"no server answers ({error}); reading the metadata store" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [PermissionDenied("anna lacks the right admin"), NoSuchLedger("there is no ledger 9")]
)
def test_after_a_refusal_the_store_is_not_asked(monkeypatch: pytest.MonkeyPatch, error: StoreError) -> None:
    with pytest.raises(type(error)):
        result_of(monkeypatch, ClusterOptions(), error)


def test_servers_that_are_named_and_do_not_answer_are_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable):
        result_of(monkeypatch, ClusterOptions(server="127.0.0.1:1"), Unavailable("nobody listens"))


def test_metadata_store_that_is_named_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert result_of(monkeypatch, ClusterOptions(metadata="zk:2181"), "from a server") == "from the store"


def test_server_locates_a_key_as_its_ring_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the metadata store: includes keys before the first and after the last token of the ring."""
    names = [PartitionId(f"p{number}") for number in range(3)]
    ring = new_ring(names, {ServerId("n1"): ""}, 1)
    answer = RingResponse(tokens=ring.tokens.keys(), owners=[names.index(each) for each in ring.tokens.values()])
    for each in names:
        answer.partitions.add(id=each, leader="n1" if each == "p0" else "")

    class Stub:
        def Ring(self, request: RingRequest, timeout: float) -> RingResponse:
            return answer

    monkeypatch.setattr(known, "ask_admin", lambda cluster, work, timeout_s: work(Stub(), 1.0))
    keys = sorted((f"key{number}" for number in range(200)), key=lambda key: MURMUR3.token_of(key.encode()))
    for key in (keys[0], *keys[1:-1:20], keys[-1]):
        locate(key, ClusterOptions(server="n1:7401"), json=True)
        owner = ring.partition_of(key.encode())
        expected = {
            "token": MURMUR3.token_of(key.encode()),
            "partition": owner,
            "leader": "n1" if owner == "p0" else None,
        }
        assert json.loads(capsys.readouterr().out) == expected
