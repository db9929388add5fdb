"""The planned layout of a local cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.devcluster.layout import (
    ClusterFile,
    UpOptions,
    addresses,
    free_offset,
    listeners,
    node_config,
    plan,
    store_listeners,
)
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.meta.address import MetadataKind
from kvstore.server.config import Role
from kvstore.wal.config import BookieKind, LogConfig

DATA = Path("/data")


def test_node_i_has_the_default_ports_plus_i() -> None:
    cluster = plan(UpOptions(data_dir=DATA), None)
    assert cluster.zookeeper == "127.0.0.1:2181/kvstore"
    assert [node.id for node in cluster.nodes] == ["n1", "n2", "n3"]
    second = cluster.nodes[1]
    assert (second.bookie, second.resp, second.grpc, second.http) == (
        *("127.0.0.1:3182", "127.0.0.1:6402", "127.0.0.1:7402", "127.0.0.1:8402"),
    )
    assert (second.data_dir, second.config) == ("/data/n2", "/data/n2/node.toml")


def test_etcd_replaces_zookeeper_if_requested_at_the_first_start() -> None:
    made = plan(UpOptions(data_dir=DATA, metadata=MetadataKind.ETCD, port_offset=20_000), None)
    assert made.zookeeper == "etcd://127.0.0.1:22379/kvstore"
    assert made.own_zookeeper
    assert dict(store_listeners(made)) == {"etcd": "127.0.0.1:22379", "etcd's members": "127.0.0.1:22380"}
    config = node_config(made, made.nodes[0], DATA)
    assert (config.zookeeper, config.metadata_address) == ("", "etcd://127.0.0.1:22379/kvstore")
    assert (
        plan(UpOptions(data_dir=DATA), made) == plan(UpOptions(data_dir=DATA, metadata=MetadataKind.ETCD), made) == made
    )
    with pytest.raises(ConfigError, match="--metadata zookeeper: the cluster in /data was created with etcd"):
        plan(UpOptions(data_dir=DATA, metadata=MetadataKind.ZOOKEEPER), made)
    assert dict(store_listeners(plan(UpOptions(data_dir=DATA), None))) == {"ZooKeeper": "127.0.0.1:2181"}


def test_offset_is_added_to_every_port() -> None:
    cluster = plan(UpOptions(data_dir=DATA, port_offset=20_100), None)
    assert cluster.zookeeper == "127.0.0.1:22281/kvstore"
    assert cluster.nodes[0].resp == "127.0.0.1:26501"


@pytest.mark.parametrize("offset", [-1, 100, 500, 1000, 20_050, 60_000])
def test_offset_that_would_mix_ports_up_is_refused(offset: int) -> None:
    with pytest.raises(ConfigError, match="--port-offset: expected"):
        plan(UpOptions(data_dir=DATA, port_offset=offset), None)


@pytest.mark.parametrize("offset", [0, 1, 99, 20_000, 24_300, 56_900])
def test_ports_of_one_cluster_never_meet(offset: int) -> None:
    cluster = plan(UpOptions(data_dir=DATA, port_offset=offset, nodes=99), None)
    ports = [int(a.rpartition(":")[2]) for _, a in listeners(cluster, {node.id for node in cluster.nodes})]
    ports.append(int(cluster.zookeeper.partition("/")[0].rpartition(":")[2]))
    assert len(set(ports)) == len(ports)
    assert max(ports) < 1 << 16


@pytest.mark.parametrize("nodes", [1, 2])
def test_fewer_than_three_nodes_only_if_that_is_meant(nodes: int) -> None:
    with pytest.raises(ConfigError, match="--unsafe"):
        plan(UpOptions(data_dir=DATA, nodes=nodes), None)
    cluster = plan(UpOptions(data_dir=DATA, nodes=nodes, unsafe=True), None)
    assert cluster.replicas == nodes
    quorum = node_config(cluster, cluster.nodes[0], DATA).log.quorum
    assert (quorum.ensemble, quorum.write, quorum.ack) == ((1, 1, 1) if nodes == 1 else (2, 2, 2))


@pytest.mark.parametrize(
    "wish",
    [
        UpOptions(data_dir=DATA, nodes=0),
        UpOptions(data_dir=DATA, nodes=100),
        UpOptions(data_dir=DATA, replicas=4),
        UpOptions(data_dir=DATA, partitions=0),
    ],
)
def test_numbers_that_do_not_fit_are_refused(wish: UpOptions) -> None:
    with pytest.raises(ConfigError, match="expected"):
        plan(wish, None)


def test_cluster_that_was_made_is_kept_as_it_is() -> None:
    made = plan(UpOptions(data_dir=DATA, port_offset=7), None)
    assert plan(UpOptions(data_dir=DATA), made) == made
    assert plan(UpOptions(data_dir=DATA, nodes=3, port_offset=7), made) == made


def test_existing_cluster_can_change_its_ports_and_nothing_else() -> None:
    made = plan(UpOptions(data_dir=DATA, port_offset=7), None)
    assert plan(UpOptions(data_dir=DATA, port_offset=20_000), made) == plan(
        UpOptions(data_dir=DATA, port_offset=20_000), None
    )
    elsewhere = plan(UpOptions(data_dir=DATA, zookeeper="zk:2181/kvstore"), None)
    assert plan(UpOptions(data_dir=DATA, port_offset=20_000), elsewhere).zookeeper == "zk:2181/kvstore"
    with pytest.raises(ConfigError, match="--port-offset: expected"):
        plan(UpOptions(data_dir=DATA, port_offset=500), made)
    moved = plan(UpOptions(data_dir=DATA, port_offset=8), made)
    for node in moved.nodes:
        said = {setting.name: setting.value for setting in addresses(moved, node)}
        config = node_config(moved, node, DATA)
        assert said == {name: getattr(config, name) for name in said}


def test_cluster_file_survives_its_document() -> None:
    made = plan(UpOptions(data_dir=DATA), None).with_pid("n2", 17)
    assert ClusterFile.from_document(json.loads(json.dumps(made.document()))) == made
    assert made.node("n2").pid == 17
    assert made.with_pids({}, None).node("n2").pid is None
    with pytest.raises(ConfigError, match="no node 'n9'"):
        made.node("n9")


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ([], "expected an object, got list"),
        ({"nodes": [{"id": "n1"}]}, "zookeeper: missing"),
        ({"zookeeper": 5, "zookeeper_pid": None, "nodes": []}, "zookeeper: expected a string, got 5"),
        (
            {"zookeeper": "z:1", "zookeeper_pid": None, "nodes": [{"pid": "7"}]},
            r"nodes\[0\].pid: expected a whole number, got '7'",
        ),
    ],
)
def test_invalid_cluster_file_is_refused_with_its_faults(document: object, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        ClusterFile.from_document(document)


def test_node_receives_the_settings_of_the_cluster_file() -> None:
    made = plan(UpOptions(data_dir=DATA, zookeeper="zk:2181/x"), None)
    assert not made.own_zookeeper
    config = node_config(made, made.nodes[2], DATA)
    assert (config.id, config.zookeeper, config.resp) == ("n3", "zk:2181/x", "127.0.0.1:6403")
    assert (config.log_dir, config.secret_file) == (Path("/data/logs"), Path("/data/cluster.secret"))


def test_external_bookies_are_found_by_their_store_and_take_no_ports() -> None:
    with pytest.raises(ConfigError, match="--bookies external: expected --metadata"):
        plan(UpOptions(data_dir=DATA, bookies=BookieKind.EXTERNAL), None)
    made = plan(UpOptions(data_dir=DATA, bookies=BookieKind.EXTERNAL, zookeeper="zk:2181"), None)
    assert not [name for name, _ in listeners(made, {"n1"}) if name.startswith("bookie")]
    config = node_config(made, made.nodes[0], DATA)
    assert (config.log.bookies, config.plays) == (BookieKind.EXTERNAL, (Role.SERVER,))
    assert ClusterFile.from_document(json.loads(json.dumps(made.document()))) == made
    assert plan(UpOptions(data_dir=DATA), made) == made
    with pytest.raises(ConfigError, match="--bookies nodes: the cluster in /data was created with external"):
        plan(UpOptions(data_dir=DATA, bookies=BookieKind.NODES), made)


def test_one_node_on_external_bookies_keeps_the_quorum() -> None:
    made = plan(UpOptions(data_dir=DATA, bookies=BookieKind.EXTERNAL, zookeeper="zk:2181", nodes=1, unsafe=True), None)
    log = node_config(made, made.nodes[0], DATA).log
    assert (log.quorum, log.unsafe) == (LogConfig().quorum, False)


def test_secure_cluster_names_its_files_and_stays_secure() -> None:
    made = plan(UpOptions(data_dir=DATA, secure=True), None)
    assert (made.secure, made.data_dir) == (True, DATA)
    config = node_config(made, made.nodes[1], DATA)
    own = DATA / "secure" / "n2.pem"
    assert config.tls == Tls(cert=own, key=own, ca=DATA / "secure" / "ca.pem", verify_clients=True)
    assert config.bookie_clients == (*(node.id for node in made.nodes), "bookie-tools")
    assert config.metadata.password_file == DATA / "secure" / "metadata.password"
    assert plan(UpOptions(data_dir=DATA), made) == plan(UpOptions(data_dir=DATA, secure=True), made) == made
    etcd = plan(UpOptions(data_dir=DATA, secure=True, metadata=MetadataKind.ETCD), None)
    assert node_config(etcd, etcd.nodes[0], DATA).metadata.password_file is None
    plain = plan(UpOptions(data_dir=DATA), None)
    assert not node_config(plain, plain.nodes[0], DATA).tls.serves
    with pytest.raises(ConfigError, match="--secure: the cluster in /data was created without it"):
        plan(UpOptions(data_dir=DATA, secure=True), plain)
    with pytest.raises(ConfigError, match="--secure: expected the nodes' own bookies"):
        plan(UpOptions(data_dir=DATA, secure=True, bookies=BookieKind.EXTERNAL, zookeeper="127.0.0.1:1"), None)


def test_free_offset_is_the_lowest_with_which_every_port_is_free(tmp_path: Path) -> None:
    cluster = plan(UpOptions(data_dir=tmp_path), None)
    taken = {"127.0.0.1:28401", "127.0.0.1:22281"}  # the first is the HTTP port of n1 at 20,000, the second ZooKeeper's
    assert free_offset(cluster, lambda address: address not in taken) == 20_200
    assert free_offset(cluster, lambda address: False) is None
