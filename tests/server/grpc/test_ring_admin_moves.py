"""Changes of replicas are reported as done while their progress is unknown."""

from __future__ import annotations

import pytest

from kvstore.errors import MetadataUnavailable, NoSuchNode, StoreError
from kvstore.partition.election.leader_znode import Claims
from kvstore.proto.admin_pb2 import ChangeReplicasRequest
from kvstore.server.grpc.ring_admin import RingAdmin
from kvstore.types import ServerId
from tests.client.model import Endpoint
from tests.server.grpc.test_ring_admin import Node, admin, node

__all__ = ["admin", "node"]


@pytest.mark.parametrize("error", [MetadataUnavailable("session lost"), NoSuchNode("/partitions/p1/replicas")])
async def test_replica_move_is_reported_when_its_progress_is_unknown(
    admin: RingAdmin, node: Node, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    async def away(_: Claims) -> None:
        raise error

    monkeypatch.setattr(Claims, "published", away)
    node.topology.servers[ServerId("n4")] = Endpoint("n4:1", "n4:2", "n4:3", "")
    [move] = (await admin.change_replicas(ChangeReplicasRequest(partition="p1", newcomer="n4", leaving="n1"))).replacing
    assert (move.partition, move.newcomer) == ("p1", "n4")
    assert not move.HasField("newcomer_sequence"), "0 would say that all it had is lost"
    assert not move.HasField("leader_sequence")
    assert (await admin.change_replicas(ChangeReplicasRequest(drain="n1"))).draining == ["n1"]
