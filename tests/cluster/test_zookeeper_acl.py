"""A cluster founded in a ZooKeeper with a login serves, and other users cannot access any of its znodes. Real
processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError

from kvstore.client import Client
from kvstore.devcluster.zookeeper import free_ports
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking
from tests.zookeeper_fixture import zookeeper, zookeeper_chroot

__all__ = ["zookeeper", "zookeeper_chroot"]

pytestmark = [pytest.mark.cluster]
KVSTORE = [sys.executable, "-m", "kvstore"]
USER, PASSWORD = "kvstore", "s3cret"
REFUSED = (NoAuthError, NoNodeError)
"""Errors that other users get. A running node may have removed the znode meanwhile."""


def ready(port: int) -> bool:
    """Return True if every partition has a leader."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/clusterz", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def all_paths(client: KazooClient, path: str) -> Iterator[str]:
    """Yield a path and all paths below it, while a running node creates and removes some."""
    try:
        names = client.get_children(path)
    except NoNodeError:
        return
    yield path
    for name in names:
        yield from all_paths(client, f"{path}/{name}")


class Place:
    """A chroot, its user, and one node's files."""

    def __init__(self, zookeeper: str, address: str, folder: Path) -> None:
        self.zookeeper, self.address, self.folder = zookeeper, address, folder
        self.chroot = address.removeprefix(zookeeper)
        self.file, self.secret, self.config = (folder / name for name in ("password", "cluster.secret", "node.toml"))
        self.file.write_text(f"{PASSWORD}\n")
        self.ports = dict(zip(("bookie", "resp", "grpc", "http"), free_ports(4), strict=True))

    def command(self, *arguments: str, is_known: bool = True) -> Done:
        login = {"KVSTORE_METADATA_USER": USER, "KVSTORE_METADATA_PASSWORD_FILE": str(self.file)} if is_known else {}
        return kvstore(*arguments, "--zookeeper", self.address, environ=login)

    def found(self, login: str) -> None:
        """Found the cluster, and write its node's file with these lines about its login."""
        init = ("cluster", "init", "--unsafe", "--node", "n1", "--replicas", "1", "--secret-file", str(self.secret))
        assert self.command(*init).returncode == 0
        self.config.write_text(
            f'id = "n1"\nzookeeper = "{self.address}"\ndata_dir = "{self.folder / "n1"}"\n'
            f'secret_file = "{self.secret}"\nunsafe = true\n'
            + "".join(f'{name} = "127.0.0.1:{port}"\n' for name, port in self.ports.items())
            + login
            + "[log]\nunsafe = true\nquorum = { ensemble = 1, write = 1, ack = 1 }\n"
        )

    @property
    def login(self) -> str:
        return f'[metadata]\nuser = "{USER}"\npassword_file = "{self.file}"\n'


@pytest.fixture
def place(zookeeper: str, zookeeper_chroot: str, tmp_path: Path) -> Place:
    return Place(zookeeper, zookeeper_chroot, tmp_path)


@pytest.fixture
def running(place: Place) -> Iterator[Path]:
    """Run the node until it serves, and yield its log."""
    place.found(place.login)
    log = place.folder / "n1.log"
    with log.open("wb") as output:
        line = [*KVSTORE, "node", "run", "--config", str(place.config)]
        process = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        wait_until_blocking(lambda: ready(place.ports["http"]), timeout_s=90, what="the node leads")
        yield log
    finally:
        process.terminate()
        assert process.wait(timeout=90) == 0
    assert PASSWORD not in log.read_text()


@contextmanager
def session(place: Place, password: str) -> Iterator[KazooClient]:
    client = KazooClient(place.zookeeper, auth_data=[("digest", f"{USER}:{password}")])
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def test_zookeeper_login_keeps_other_users_from_every_znode(place: Place, running: Path) -> None:
    with Client(f"kv://127.0.0.1:{place.ports['grpc']}") as store:
        store.put(b"k", b"v")
        assert store.get(b"k").value == b"v"
    with session(place, PASSWORD) as owner, session(place, "wrong") as stranger:
        found = list(all_paths(owner, place.chroot))
        below = {path.removeprefix(place.chroot) for path in found}
        assert {"/ring", "/ledgers/INSTANCEID", "/ledgers/available", "/ledgers/cookies"} <= below
        assert any(path.startswith("/ledgers/00/") for path in below), "a ledger's metadata"
        for path in found:
            for attempt in (
                lambda path=path: stranger.get(path),
                lambda path=path: stranger.get_children(path),
                lambda path=path: stranger.set(path, b"x"),
                lambda path=path: stranger.create(f"{path}/x"),
            ):
                with pytest.raises(REFUSED):
                    attempt()
            if path != place.chroot:  # that one is a child of a folder of others, who may remove it once it is empty
                with pytest.raises(REFUSED):
                    stranger.delete(path)
    refused = place.command("bookie", "list", is_known=False)
    assert refused.returncode == 1
    assert "ZooKeeper denies access" in refused.stderr
    assert json.loads(place.command("bookie", "list", "--json").stdout)


def test_acls_are_opened_and_restricted_again_while_a_node_runs(place: Place, running: Path) -> None:
    opened = json.loads(place.command("cluster", "metadata", "open", "--json").stdout)
    assert opened["denied"] == []
    assert opened["changed"] > 20
    assert place.command("bookie", "list", is_known=False).returncode == 0
    unnamed = place.command("cluster", "metadata", "secure", is_known=False)
    assert unnamed.returncode == 1
    assert "expected KVSTORE_METADATA_USER" in unnamed.stderr
    closed = json.loads(place.command("cluster", "metadata", "secure", "--json").stdout)
    assert closed["denied"] == []
    assert closed["changed"] > 20
    with session(place, PASSWORD) as owner, session(place, "wrong") as stranger:
        for path in all_paths(owner, place.chroot):
            with pytest.raises(REFUSED):
                stranger.get(path)
    assert place.command("bookie", "list", is_known=False).returncode == 1
    with Client(f"kv://127.0.0.1:{place.ports['grpc']}") as store:
        store.put(b"k", b"v")


def test_node_without_the_login_ends_with_the_reason(place: Place) -> None:
    place.found("")
    line = [*KVSTORE, "node", "run", "--config", str(place.config)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "ZooKeeper denies access" in ended.stderr
    assert "Traceback" not in ended.stderr
