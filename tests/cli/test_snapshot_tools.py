"""The cluster of commands of `kvstore snapshot`."""

from __future__ import annotations

from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.snapshot_tools import cluster_of
from kvstore.types import ServerId
from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread


def test_cluster_id_needs_neither_admin_calls_nor_metadata_store() -> None:
    """A user with the rights to restore could not, because the id was read from the metadata store."""
    with serving_in_a_thread(ModelCluster(id="ours")) as servers:
        config, instance = cluster_of(ClusterOptions(server=servers.cluster.endpoints[ServerId("n1")].grpc))
    assert (instance, len(config.endpoints)) == ("ours", 1)
