"""An endpoint that leads to a server of another cluster: one of a list that names two clusters, or a name that leads
elsewhere by now. Servers and partitions of both have the same names."""

from __future__ import annotations

from random import Random

import grpc
import pytest

from kvstore.client import AsyncClient, Client, ClientConfig, Level
from kvstore.errors import OtherCluster, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error
from kvstore.types import ServerId
from tests.client.model import ModelCluster
from tests.client.serving import PATIENT, Servers, serving, serving_in_a_thread
from tests.waiting import PATIENCE_S

KEY, OURS, THEIRS = b"k", "ours", "theirs"


def endpoint(servers: Servers, id: str) -> str:
    return servers.cluster.endpoints[ServerId(id)].grpc


def url(ours: Servers, theirs: Servers, *, patience: str = PATIENT) -> str:
    """Own addresses first, so that the client belongs to that cluster."""
    return f"kv://{endpoint(ours, 'n1')},{endpoint(theirs, 'n1')}{patience}"


async def test_async_client_writes_nothing_to_another_cluster() -> None:
    async with serving(ModelCluster(id=OURS)) as ours, serving(ModelCluster(id=THEIRS)) as theirs:
        async with AsyncClient(url(ours, theirs)) as client:
            await client.put(KEY, b"1")
            for id in ours.cluster.ids:
                await ours.kill(id)
            with pytest.raises(StoreError):
                await client.put(KEY, b"2", timeout_s=1.0)
        async with AsyncClient(theirs.patient_url) as client:
            assert await client.get(KEY) is None


def test_client_writes_nothing_to_another_cluster() -> None:
    with serving_in_a_thread(ModelCluster(id=OURS)) as ours, serving_in_a_thread(ModelCluster(id=THEIRS)) as theirs:
        with Client(url(ours, theirs)) as client:
            client.put(KEY, b"1")
            for id in ours.cluster.ids:
                ours.kill_from_outside(id)
            with pytest.raises(StoreError):
                client.put(KEY, b"2", timeout_s=1.0)
        with Client(theirs.patient_url) as client:
            assert client.get(KEY) is None


async def test_error_names_the_other_cluster_when_no_own_server_answers() -> None:
    async with (
        serving(ModelCluster(id=OURS)) as ours,
        serving(ModelCluster(id=THEIRS)) as theirs,
        AsyncClient(url(ours, theirs)) as client,
    ):
        link = client._engine.links.open(endpoint(theirs, "n1"))  # type: ignore[union-attr]
        assert link is not None
        with pytest.raises(OtherCluster, match="expected a server of cluster ours, got one of theirs"):
            await link.wait_up()
        watchers = client._engine.routing.watchers_of(None, Random(1), client._config.endpoints)  # type: ignore[union-attr]
        assert sorted(watchers) == sorted(each.grpc for each in ours.cluster.endpoints.values())


async def test_watch_skips_replicas_at_addresses_of_another_cluster() -> None:
    async with serving(ModelCluster(id=OURS)) as ours, AsyncClient(ours.patient_url) as client:
        routing = client._engine.routing  # type: ignore[union-attr]
        for id in ("n1", "n2"):
            routing.answered.discard(endpoint(ours, id))
            routing.foreign.add(endpoint(ours, id))
        assert routing.watchers_of(KEY, Random(1), client._config.endpoints) == [endpoint(ours, "n3")]
        assert client.watch(KEY)._check == routing.check


async def test_servers_without_a_cluster_id_are_used() -> None:
    async with serving(ModelCluster(id="")) as servers, AsyncClient(servers.patient_url) as client:
        await client.put(KEY, b"1")
        assert client._engine.routing.cluster == ""  # type: ignore[union-attr]


def test_client_notices_another_cluster_at_a_known_address() -> None:
    ours, theirs = ModelCluster(id=OURS), ModelCluster(id=THEIRS)
    with serving_in_a_thread(ours) as before, Client(before.patient_url) as client:
        client.put(KEY, b"1")
        for id in ours.ids:
            before.kill_from_outside(id)
        theirs.endpoints |= ours.endpoints
        with serving_in_a_thread(theirs) as after:
            assert client._engine is not None
            client._engine._read_at = -1e9  # ten seconds later
            with pytest.raises(StoreError):
                client.put(KEY, b"2", timeout_s=2.0)
            with Client(after.patient_url) as other:
                assert other.get(KEY) is None


# docs/protocol.md P12
def test_client_uses_no_server_of_another_cluster_at_its_own_address() -> None:
    """The other servers of its cluster answer, and only they are asked for the topology."""
    ours, theirs = ModelCluster(id=OURS), ModelCluster(servers=1, id=THEIRS)
    with serving_in_a_thread(ours) as before, Client(before.patient_url) as client:
        engine = client._engine
        assert engine is not None
        keys = [ours.key_of(partition) for partition in ours.partitions]
        client.put_many(dict.fromkeys(keys, b"1"))
        for favourite in range(3):  # connected to all
            engine._favourite = favourite
            client.get_many(keys, level=Level.STALE)
        before.kill_from_outside(ours.ids[1])
        for partition, leader in ours.leaders.items():
            if leader == ours.ids[1]:
                before.loop.call_soon_threadsafe(ours.lead, partition, ours.ids[0])
        theirs.endpoints = {theirs.ids[0]: ours.endpoints[ours.ids[1]]}
        with serving_in_a_thread(theirs) as after:
            for favourite in range(3):
                engine._favourite = favourite
                for key in keys:
                    found = client.get(key, level=Level.STALE)
                    assert found is not None
                    assert found.value == b"1"
                    client.put(key, b"1")
            before.kill_from_outside(ours.ids[0])
            for favourite in range(3):  # requests for this leader are forwarded to its successor
                engine._favourite = favourite
                client.put_many(dict.fromkeys(keys, b"2"))
            assert not any(each.data for each in theirs.partitions.values())
            with pytest.raises(Unavailable, match="of another cluster: expected ours, got theirs"):
                _sent_to(endpoint(after, "n1"), OURS)
            _sent_to(endpoint(after, "n1"), "")


def _sent_to(address: str, cluster: str) -> None:
    """Open a stream with a frame without operations."""
    with open_channel(address, None) as channel:
        try:
            list(kv_pb2_grpc.KVStub(channel).Session(iter([kv_pb2.Frame(cluster=cluster)]), timeout=PATIENCE_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


@pytest.mark.parametrize("has_streams", [True, False], ids=["streams", "gRPC"])
async def test_nothing_is_written_to_another_cluster_at_a_known_address(*, has_streams: bool) -> None:
    ours, theirs = ModelCluster(id=OURS), ModelCluster(id=THEIRS)
    async with serving(ours, has_streams=has_streams) as before, AsyncClient(before.patient_url) as client:
        await client.put(KEY, b"1")
        for id in ours.ids:
            await before.kill(id)
        theirs.endpoints |= ours.endpoints
        async with serving(theirs, has_streams=has_streams) as after:
            with pytest.raises(StoreError):
                await client.put(KEY, b"2", timeout_s=2.0)
            async with AsyncClient(after.patient_url) as other:
                assert await other.get(KEY) is None


async def test_server_is_called_by_its_id_when_it_knows_no_clusters() -> None:
    """A server of version 0.1, in a cluster that is being upgraded; another server has reported the cluster's id."""
    async with serving(ModelCluster(id=OURS)) as servers:
        for each in servers.streams.values():
            each._cluster = ""
        async with AsyncClient(servers.patient_url) as client:
            await client.put(KEY, b"1")
            assert client.statistics()["streams_up"] == client.statistics()["links_up"]
            assert client._engine.routing.cluster == OURS  # type: ignore[union-attr]


async def test_client_configured_for_another_cluster_is_refused_by_type() -> None:
    async with serving(ModelCluster(id=THEIRS)) as theirs:
        config = ClientConfig(endpoints=(endpoint(theirs, "n1"),), cluster=OURS, timeout_s=0.2)
        with pytest.raises(OtherCluster, match="expected a server of cluster ours, got one of theirs"):
            async with AsyncClient(config):
                pass


def test_blocking_client_configured_for_another_cluster_is_refused_by_type() -> None:
    with serving_in_a_thread(ModelCluster(id=THEIRS)) as theirs:
        config = ClientConfig(endpoints=(endpoint(theirs, "n1"),), cluster=OURS, timeout_s=0.2)
        with pytest.raises(OtherCluster, match="expected a server of cluster ours, got one of theirs"), Client(config):
            pass
