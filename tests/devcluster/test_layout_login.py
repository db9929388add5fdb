"""The user with which `up` creates the first nodes in the metadata store: never one that its nodes cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import config as toml
from kvstore.config import Setting
from kvstore.devcluster import layout
from kvstore.devcluster.layout import ClusterFile, UpOptions, plan
from kvstore.devcluster.local import _metadata_login, _write
from kvstore.devcluster.secure_folder import SecureFolder
from kvstore.devcluster.settings import with_settings


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a shell that is logged in to another cluster."""
    monkeypatch.setenv("KVSTORE_METADATA_USER", "other")
    monkeypatch.setenv("KVSTORE_METADATA_PASSWORD", "secret")


def user_of(cluster: ClusterFile, said: list[str] | None = None) -> str | None:
    messages: list[str] = [] if said is None else said
    found = _metadata_login(cluster, messages.append)
    return None if found is None else found.user


def test_plain_cluster_with_its_own_store_has_no_owner(other: None, tmp_path: Path) -> None:
    """Its nodes log in without a user: entries of another user would be inaccessible to them permanently."""
    said: list[str] = []
    assert user_of(plan(UpOptions(data_dir=tmp_path), None), said) is None
    assert "user other of the environment" in said[0]


def test_nodes_with_a_user_have_the_environment_user_create_the_cluster(other: None, tmp_path: Path) -> None:
    cluster = plan(UpOptions(data_dir=tmp_path), None)
    password = tmp_path / "password"
    settings = [Setting("metadata.user", "other"), Setting("metadata.password_file", str(password))]
    text = toml.to_toml(layout.node_config(cluster, cluster.nodes[0], tmp_path))
    _write({Path(cluster.nodes[0].config): with_settings(text, settings, what="node.toml")})
    assert user_of(cluster) == "other"


def test_store_that_others_run_has_the_user_of_the_environment(other: None, tmp_path: Path) -> None:
    assert user_of(plan(UpOptions(data_dir=tmp_path, zookeeper="zk:2181/kv"), None)) == "other"


def test_secure_cluster_has_a_user_of_its_own(other: None, tmp_path: Path) -> None:
    SecureFolder(tmp_path, has_own_zookeeper=True).make(["n1"], is_new=True)
    assert user_of(plan(UpOptions(data_dir=tmp_path, secure=True), None)) == "kvstore"


def test_without_a_user_in_the_environment_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVSTORE_METADATA_USER", raising=False)
    assert user_of(plan(UpOptions(data_dir=tmp_path), None)) is None
