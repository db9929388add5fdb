"""The login of a process at the metadata store, from settings and environment, and that nothing shows the password."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvstore import config
from kvstore.errors import ConfigError
from kvstore.meta.address import parse
from kvstore.meta.login import Acl, Mechanism, MetadataLogin, metadata_login, metadata_login_of_environment
from kvstore.server.config import NodeConfig

ENVIRON = {"KVSTORE_METADATA_USER": "kvstore", "KVSTORE_METADATA_PASSWORD": "s3cret"}


def node(tmp_path: Path, **metadata: str) -> NodeConfig:
    table = {"id": "n1", "data_dir": str(tmp_path), "secret_file": "s", "zookeeper": "zk:2181/kv", "metadata": metadata}
    return config.from_table(table, NodeConfig)


def test_node_file_names_user_and_password_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\nanother line\n")
    found = node(tmp_path, user="kvstore", password_file=str(file), auth="sasl", acl="open")
    assert found.metadata_login() == MetadataLogin("kvstore", b"s3cret", Mechanism.SASL, Acl.OPEN)
    assert config.from_table(tomllib.loads(config.to_toml(found)), NodeConfig) == found


def test_half_a_login_in_a_file_is_refused(tmp_path: Path) -> None:
    for half in ({"user": "kvstore"}, {"password_file": "f"}):
        with pytest.raises(ConfigError, match="expected user and password_file together, or neither"):
            node(tmp_path, **half)


def test_environment_applies_when_the_file_names_no_user(tmp_path: Path) -> None:
    assert metadata_login_of_environment(ENVIRON) == MetadataLogin("kvstore", b"s3cret")
    environ = ENVIRON | {"KVSTORE_METADATA_AUTH": "sasl", "KVSTORE_METADATA_ACL": "open"}
    assert metadata_login("", None, Mechanism.DIGEST, Acl.CREATOR, environ) == MetadataLogin(
        "kvstore", b"s3cret", Mechanism.SASL, Acl.OPEN
    )
    assert metadata_login_of_environment({}) is None
    with pytest.raises(ConfigError, match="KVSTORE_METADATA_PASSWORD_FILE or KVSTORE_METADATA_PASSWORD"):
        metadata_login_of_environment({"KVSTORE_METADATA_USER": "kvstore"})
    with pytest.raises(ConfigError, match="digest, sasl"):
        metadata_login_of_environment(ENVIRON | {"KVSTORE_METADATA_AUTH": "plain"})


@pytest.mark.parametrize(
    ("user", "password"), [("", b"x"), ("a:b", b"x"), ("a\n", b"x"), ("a", b""), ("a", b"hid\xff"), ("a", b"hid\0den")]
)
def test_impossible_login_is_refused_without_showing_the_password(user: str, password: bytes) -> None:
    with pytest.raises(ValueError, match="expected") as refusal:
        MetadataLogin(user, password)
    assert "hid" not in str(refusal.value)


def test_repr_does_not_show_the_password() -> None:
    assert "s3cret" not in repr(MetadataLogin("kvstore", b"s3cret"))


@pytest.mark.parametrize(
    "address", ["kvstore:s3cret@zk:2181/kv", "zookeeper://kvstore:s3cret@zk:2181", "etcd://u:s3cret@e:2379/kv"]
)
def test_address_with_a_password_is_refused_and_not_repeated(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata\.password_file") as refusal:
        parse(address)
    assert "s3cret" not in str(refusal.value)
    table = {"id": "n1", "data_dir": str(tmp_path), "secret_file": "s", "zookeeper": address}
    with pytest.raises(ConfigError) as fault:
        config.from_table(table, NodeConfig)
    assert "s3cret" not in str(fault.value)
