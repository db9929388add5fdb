"""A node's configuration: all faults are named at once, only intended ports leave loopback, and files are stable."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from kvstore import config as toml
from kvstore.env.networks import is_loopback
from kvstore.env.tls import Mode, Tls
from kvstore.errors import ConfigError
from kvstore.partition.config import PartitionConfig
from kvstore.server.config import Limits, NodeConfig, Role
from kvstore.server.node import FILES_MIN, raise_file_limit

GOOD: dict[str, Any] = {"id": "n1", "zookeeper": "127.0.0.1:2181/kvstore", "data_dir": "data/n1", "secret_file": "s"}


def test_few_lines_configure_a_node() -> None:
    config = toml.from_table(GOOD, NodeConfig)
    assert config.data_dir == Path("data/n1")
    assert config.plays == (Role.BOOKIE, Role.SERVER)
    assert config.limits == Limits()


def test_every_fault_is_named_at_once() -> None:
    table = {"id": 5, "data_dir": "d", "rols": ["bookie"], "roles": ["cook"], "limits": {"waiting_max": "x"}}
    with pytest.raises(ConfigError) as raised:
        toml.from_table(table, NodeConfig)
    message = str(raised.value)
    for fault in (
        "id: expected a string, got 5",
        "secret_file: missing",
        "rols: unknown",
        "roles[0]: expected one of bookie, server, got 'cook'",
        "limits.waiting_max: expected a whole number, got 'x'",
    ):
        assert fault in message


@pytest.mark.parametrize("name", ["processes", "repair_after_s", "id"])
def test_number_of_hundreds_of_digits_is_refused(name: str) -> None:
    _, faults = toml.build_or_faults({**GOOD, name: 10**400}, NodeConfig)
    assert [(each.name, each.text.partition(",")[0][:8]) for each in faults] == [(name, "expected")]


def test_path_with_a_null_character_is_refused() -> None:
    _, faults = toml.build_or_faults({**GOOD, "tls": {"cert": "/c\0", "key": "/k"}, "data_dir": "/d\0"}, NodeConfig)
    assert list(map(str, faults)) == [
        "data_dir: expected a path, got '/d\\x00'",
        "tls.cert: expected a path, got '/c\\x00'",
    ]


@pytest.mark.parametrize(
    "hiding", [{"rols": 1}, {"log": {"quorums": [3, 3, 2]}}, {"data_dir": None}], ids=["unknown", "nested", "missing"]
)
def test_unknown_and_missing_names_hide_no_other_fault(hiding: dict[str, Any]) -> None:
    """Each kind of fault used to need another run of `node check`."""
    table = {**GOOD, "http": "nowhere", "repair_after_s": -1, "storage": {"scrub_first_s": 0.5, "index": "x"}} | hiding
    found, faults = toml.build_or_faults(
        {name: value for name, value in table.items() if value is not None}, NodeConfig
    )
    assert found is None
    named = {name for name, _ in faults}
    assert named >= {"repair_after_s", "storage.scrub_first_s", "storage.index"}
    (other,) = named - {"http", "repair_after_s", "storage.scrub_first_s", "storage.index"}
    assert other in ("rols", "log.quorums", "data_dir")


@pytest.mark.parametrize("hiding", [{"rols": 1}, {"log": {"quorums": 1}}, {"data_dir": None}, {"id": None}])
def test_file_checks_run_with_unknown_and_missing_names(hiding: dict[str, Any]) -> None:
    table = {
        name: value for name, value in ({**GOOD, "http": "nowhere", "roles": []} | hiding).items() if value is not None
    }
    _, faults = toml.build_or_faults(table, NodeConfig)
    assert {"http", "roles"} < {name for name, _ in faults}
    assert len(faults) == 3


def test_semantic_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        toml.from_table({**GOOD, "id": "N 1", "roles": [], "http": "nowhere"}, NodeConfig)
    assert all(
        fault in str(raised.value)
        for fault in ("id: expected lower-case", "roles: expected", "http: expected host:port")
    )


@pytest.mark.parametrize("address", ["0.0.0.0:6401", "10.0.0.1:6401", "[::]:6401", "example.org:6401"])
def test_listener_beyond_loopback_is_refused_unless_insecure(address: str) -> None:
    with pytest.raises(ConfigError, match=r"resp: .*without TLS"):
        toml.from_table({**GOOD, "resp": address}, NodeConfig)
    assert toml.from_table({**GOOD, "resp": address, "insecure": True, "advertise": "n1"}, NodeConfig).resp == address


OPEN = {"resp": "10.0.0.1:6401", "grpc": "10.0.0.1:7401", "bookie": "10.0.0.1:3181", "http": "10.0.0.1:8401"}
FILES = {"cert": "n1.pem", "key": "n1.key", "ca": "ca.pem"}


@pytest.mark.parametrize("listener", ["resp", "grpc", "http"])
def test_public_client_listener_requires_access_control(listener: str) -> None:
    config = toml.from_table({**GOOD, listener: OPEN[listener], "tls": FILES}, NodeConfig)
    assert config.wants_access_control
    assert not toml.from_table({**GOOD, "tls": FILES}, NodeConfig).wants_access_control
    assert not toml.from_table({**GOOD, listener: OPEN[listener], "insecure": True}, NodeConfig).wants_access_control


def test_public_bookie_listener_requires_certificates() -> None:
    with pytest.raises(ConfigError, match=r"bookie: 10.0.0.1:3181 .* knows no users: .* verify_clients"):
        toml.from_table({**GOOD, "bookie": OPEN["bookie"], "tls": FILES}, NodeConfig)
    verified = {**FILES, "verify_clients": True}
    config = toml.from_table({**GOOD, "bookie": OPEN["bookie"], "tls": verified}, NodeConfig)
    assert (config.beyond, config.wants_access_control) == (["bookie"], False)
    toml.from_table({**GOOD, **OPEN, "tls": FILES, "insecure": True}, NodeConfig)
    server = {**GOOD, **OPEN, "tls": FILES, "roles": ["server"]}
    assert toml.from_table(server, NodeConfig).beyond == ["http", "resp", "grpc"]


def test_bookie_id_is_host_and_port_or_empty() -> None:
    assert toml.from_table({**GOOD, "bookie_id": "n1.example:3181"}, NodeConfig).bookie_id == "n1.example:3181"
    with pytest.raises(ConfigError, match="bookie_id: expected host:port, got 'n1'"):
        toml.from_table({**GOOD, "bookie_id": "n1"}, NodeConfig)


def test_advertised_host_must_be_reachable() -> None:
    table = {**GOOD, "resp": "0.0.0.0:6401", "grpc": "[::]:7401", "http": "0.0.0.0:8401", "insecure": True}
    with pytest.raises(
        ConfigError, match=r"resp: other machines cannot connect to 0.0.0.0:6401; set advertise .*; grpc: "
    ) as it:
        toml.from_table(table, NodeConfig)
    assert "http" not in str(it.value)
    config = toml.from_table({**table, "advertise": "n1.example"}, NodeConfig)
    assert (config.advertised(config.resp), config.advertised(config.grpc)) == ("n1.example:6401", "n1.example:7401")
    config = toml.from_table(GOOD, NodeConfig)
    assert config.advertised(config.resp) == config.resp
    with pytest.raises(ConfigError, match="advertise: expected a host without port, got 'n1:80'"):
        toml.from_table({**GOOD, "advertise": "n1:80"}, NodeConfig)


@pytest.mark.parametrize("address", ["", "/kv", "zk", "zk:0", "zk:99999", "a b:1", "zk:1,/kv", "zk:1,x:y/kv", "zk :1"])
def test_invalid_zookeeper_address_is_refused(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"zookeeper: .*host:port|metadata.uri: expected either metadata.uri or zookeeper"
    ):
        toml.from_table({**GOOD, "zookeeper": address}, NodeConfig)


@pytest.mark.parametrize("address", ["zk:1", "[::1]:2181/kv", "a.b-c.example:2181,10.0.0.1:2182/k/v"])
def test_zookeeper_address_has_ports_and_optional_chroot(address: str) -> None:
    assert toml.from_table({**GOOD, "zookeeper": address}, NodeConfig).zookeeper == address


def test_metadata_store_is_named_once() -> None:
    del (bare := dict(GOOD))["zookeeper"]
    with pytest.raises(ConfigError, match=r"metadata.uri: expected either metadata.uri or zookeeper, got neither"):
        toml.from_table(bare, NodeConfig)
    with pytest.raises(ConfigError, match=r"metadata.uri: expected either metadata.uri or zookeeper, got both"):
        toml.from_table({**GOOD, "metadata": {"uri": "etcd://e:2379"}}, NodeConfig)
    with pytest.raises(ConfigError, match=r"metadata.uri: .*etcd://.* got 'mysql://e:1'"):
        toml.from_table({**bare, "metadata": {"uri": "mysql://e:1"}}, NodeConfig)
    with pytest.raises(ConfigError, match=r"zookeeper: expected a ZooKeeper, got etcd://e:1"):
        toml.from_table({**bare, "zookeeper": "etcd://e:1"}, NodeConfig)
    with pytest.raises(ConfigError, match=r"metadata.tls: expected ca"):
        toml.from_table({**bare, "metadata": {"uri": "etcd://e:1", "tls": {"cert": "c", "key": "k"}}}, NodeConfig)
    for uri in ("etcd://a:1,[::1]:2/kv", "zookeeper://a:1,b:2/kv", "a:1/kv"):
        config = toml.from_table({**bare, "metadata": {"uri": uri, "tls": {"ca": "c"}}}, NodeConfig)
        assert (config.metadata_address, config.metadata_tls) == (uri, Tls(ca=Path("c")))
    old = toml.from_table({**GOOD, "zookeeper_tls": {"ca": "c"}}, NodeConfig)
    assert (old.metadata_address, old.metadata_tls) == (GOOD["zookeeper"], Tls(ca=Path("c")))


def test_listener_of_another_role_is_ignored() -> None:
    config = toml.from_table({**GOOD, "roles": ["bookie"], "resp": "0.0.0.0:1"}, NodeConfig)
    assert config.listeners() == {"bookie": config.bookie, "http": config.http}


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.9", True), ("::1", True), ("localhost", True), ("::", False)])
def test_loopback_addresses_are_recognized(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_configuration_survives_its_file(tmp_path: Path) -> None:
    config = NodeConfig(
        id="n1",
        zookeeper="a:1,b:2/x",
        secret_file=tmp_path / "cluster.secret",
        data_dir=tmp_path / 'with "quotes" and \\',
        zone="a\tzone\nof\x7f 😀",
        roles=(Role.SERVER,),
        log_dir=tmp_path,
        limits=Limits(waiting_max=7),
        partition=PartitionConfig(lease_ms=0, flush_s=1.5),
    )
    path = tmp_path / "node.toml"
    path.write_text(toml.to_toml(config))
    assert toml.read(path, NodeConfig) == config


def test_default_values_are_not_written() -> None:
    config = toml.from_table(GOOD, NodeConfig)
    assert set(toml.to_toml(config).split()) == {
        *("id", "=", '"n1"', "zookeeper", '"127.0.0.1:2181/kvstore"', "data_dir", '"data/n1"', "secret_file", '"s"')
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("id = ", "not TOML"),
        ("\xff", "not TOML"),
        ("processes = 1" + "0" * 5_000, "not TOML"),
        ("x = " + "[" * 5_000 + "]" * 5_000, "not TOML"),
        (None, "cannot be read: No such file"),
    ],
    ids=["value", "encoding", "digits", "depth", "missing"],
)
def test_unreadable_file_is_named(tmp_path: Path, text: str | None, fault: str) -> None:
    path = tmp_path / "node.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"node.toml: {fault}"):
        toml.read(path, NodeConfig)


def test_byte_order_mark_of_file_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('id = "n1"\nzookeeper = "z:1"\ndata_dir = "d"\nsecret_file = "s"\n', encoding="utf-8-sig")
    assert toml.read(path, NodeConfig).id == "n1"


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('id = "n1"\nzookeeper = "z:1"\ndata_dir = "d"\nsecret_file = "s"\nresp = "10.0.0.1:1"\n')
    assert toml.read(path, NodeConfig, [toml.Setting("insecure", True)]).insecure


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    names: tuple[str, ...] = ()
    colour: Colour | None = None


def test_nested_tables_lists_and_optional_values() -> None:
    table = {"inner": {"ratio": 1}, "names": ["a", "b"], "colour": "red"}
    assert toml.from_table(table, Outer) == Outer(Inner(1.0), ("a", "b"), Colour.RED)
    with pytest.raises(ConfigError, match=r"inner: expected a table, got 5; names: expected a list, got 'a'"):
        toml.from_table({"inner": 5, "names": "a"}, Outer)


def test_connection_limits_leave_files_for_journals() -> None:
    assert Limits().within(1 << 20) == Limits()
    few = Limits(connections_max=300).within(1024)
    assert (few.connections_max, few.grpc_connections_max, few.bookie_connections_max) == (300, 42, 128)
    assert Limits().within(1024).connections_max == 512


def test_node_does_not_start_with_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, FILES_MIN - 1))
    with pytest.raises(ConfigError, match=f"at least {FILES_MIN} open files, got {FILES_MIN - 1}"):
        raise_file_limit()


def test_storage_settings_reach_the_bookie(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        'id = "n1"\nzookeeper = "a:1"\ndata_dir = "/d"\nsecret_file = "s"\n[storage]\njournal_dir = "/fast/journal"\n'
        "segment_bytes = 1048576\nscrub_first_s = 5\n",
    )
    found = toml.read(path, NodeConfig)
    assert (found.storage.journal_dir, found.storage.segment_bytes, found.storage.scrub_first_s) == (
        "/fast/journal", 1 << 20, 5.0,
    )  # fmt: skip
    assert found.outside == [Path("/fast/journal")]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("segment_bytes = 4096", "storage.segment_bytes: expected 1 MiB to 2 GiB, got 4096"),
        ("reserve_bytes = -1", "storage.reserve_bytes: expected 0 to 1099511627776, got -1"),
        ('journal_dir = "../x"', "storage.journal_dir: expected a path without . and .., got '../x'"),
        ('index_dir = "bookie/journal"', "expected another directory than journal_dir"),
        ("scrub_first_s = 0.5", "storage.scrub_first_s: expected 1 to 1000000000, got 0.5"),
        (
            "scrub_byte_per_s = 1",
            "storage.scrub_byte_per_s: unknown; did you mean scrub_bytes_per_s? known are journal_dir",
        ),
    ],
)
def test_invalid_storage_setting_is_named(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f'id = "n1"\nzookeeper = "a:1"\ndata_dir = "/d"\nsecret_file = "s"\n[storage]\n{line}\n')
    with pytest.raises(ConfigError, match=re.escape(fault)):
        toml.read(path, NodeConfig)


def test_node_with_external_bookies_is_server_only() -> None:
    external = {**GOOD, "log": {"bookies": "external"}}
    config = toml.from_table(external, NodeConfig)
    assert config.plays == (Role.SERVER,)
    assert "bookie" not in config.listeners()
    assert toml.from_table({**external, "roles": ["server"]}, NodeConfig).plays == config.plays
    for roles in (["bookie"], ["bookie", "server"]):
        with pytest.raises(ConfigError, match=r'roles: expected server alone.*log.bookies is "external".*got bookie'):
            toml.from_table({**external, "roles": roles}, NodeConfig)
    with pytest.raises(ConfigError, match=r"log.bookies: expected one of nodes, external, got 'apache'"):
        toml.from_table({**GOOD, "log": {"bookies": "apache"}}, NodeConfig)


def test_listener_preferring_tls_is_unsafe_beyond_loopback() -> None:
    """docs/protocol.md S1"""
    made = toml.from_table(GOOD | {"tls": {"cert": "c", "key": "k", "mode": "prefer"}}, NodeConfig)
    assert made.tls.mode is Mode.PREFER
    assert replace(made, resp="10.0.0.1:1", insecure=True).tls.admits_plain
    with pytest.raises(ValueError, match="accepts connections without TLS"):
        replace(made, resp="10.0.0.1:1")
    required = replace(made, tls=replace(made.tls, mode=Mode.REQUIRE))
    assert toml.from_table(GOOD | {"tls": {"cert": "c", "key": "k"}}, NodeConfig) == required, "the default"
    assert replace(required, resp="10.0.0.1:1").wants_access_control
    with pytest.raises(ValueError, match="expected no mode"):
        replace(required, zookeeper_tls=replace(made.tls, ca=Path("c")))
    with pytest.raises(ConfigError, match="mode"):
        toml.from_table(GOOD | {"tls": {"cert": "c", "key": "k", "mode": "perhaps"}}, NodeConfig)
