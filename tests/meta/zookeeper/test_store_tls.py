"""The ZooKeeper driver over TLS with certificates on both sides. A real server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from kvstore.devcluster.zookeeper import free_port, start_standalone
from kvstore.env.tls import Tls
from kvstore.errors import MetadataUnavailable
from kvstore.meta.store import SessionState
from kvstore.meta.zookeeper.store import ZooKeeperStore
from tests.meta.drivers import States
from tests.waiting import wait_until_blocking

pytestmark = [
    pytest.mark.needs_zookeeper,
    pytest.mark.filterwarnings("ignore:unclosed <:ResourceWarning"),  # kazoo's: see conftest.py
]


def write(folder: Path, ca: trustme.CA, name: str, *hosts: str) -> Path:
    """Write a certificate with its key into one file, the key in PKCS #8, which ZooKeeper reads."""
    issued = ca.issue_cert(*hosts)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{name}.pem"
    path.write_bytes(key + b"".join(each.bytes() for each in issued.cert_chain_pems))
    return path


class Secured:
    """A server that accepts only clients with a certificate of its authority."""

    def __init__(self, folder: Path, hosts: tuple[str, ...]) -> None:
        self.folder, self.authority = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.cert_pem.bytes())
        port = free_port()
        self.address = f"127.0.0.1:{port}/kv"
        server = write(folder, self.authority, "server", *hosts)
        self.process = start_standalone(
            folder / "zookeeper",
            settings=(
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
                f"secureClientPortAddress=127.0.0.1\nsecureClientPort={port}\nssl.clientAuth=need\n"
                f"ssl.keyStore.location={server}\nssl.keyStore.type=PEM\n"
                f"ssl.trustStore.location={self.ca}\nssl.trustStore.type=PEM\n"
            ),
        )
        wait_until_blocking(lambda: _listens(port), what="ZooKeeper's secure port, which it opens after the plain one")

    def client(self, authority: trustme.CA | None = None) -> Tls:
        pem = write(self.folder, authority or self.authority, "client", "client")
        return Tls(ca=self.ca, cert=pem, key=pem)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Secured]:
    """One server for all tests that want the same hosts in its certificate."""
    secured = Secured(tmp_path_factory.mktemp("secured"), getattr(request, "param", ("127.0.0.1", "localhost")))
    yield secured
    secured.process.kill()


async def test_zookeeper_client_with_a_certificate_reconnects(secured: Secured) -> None:
    store = await ZooKeeperStore.connect(secured.address, tls=secured.client())
    try:
        await store.create("/a", bytes(100_000))
        states = States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)
        assert len((await store.get("/a"))[0]) == 100_000
    finally:
        await store.close()


async def test_each_connection_uses_the_present_certificate_file(secured: Secured) -> None:
    """So that a certificate can be replaced without a restart. An unusable one costs the connection, and not the
    session."""
    store = await ZooKeeperStore.connect(secured.address, tls=secured.client(), session_timeout_s=30)
    try:
        for spoil in (lambda: secured.client(trustme.CA()), lambda: (secured.folder / "client.pem").write_text("half")):
            states = States(store)
            spoil()
            store.break_connection()
            await states.wait_for(SessionState.SUSPENDED)
            secured.client()
            await states.wait_for(SessionState.CONNECTED)
    finally:
        await store.close()


async def test_client_of_another_authority_is_refused(secured: Secured) -> None:
    with pytest.raises(MetadataUnavailable):
        await ZooKeeperStore.connect(secured.address, tls=secured.client(trustme.CA()), connect_timeout_s=2)


async def test_client_without_tls_is_refused(secured: Secured) -> None:
    with pytest.raises(MetadataUnavailable):
        await ZooKeeperStore.connect(secured.address, connect_timeout_s=2)


@pytest.mark.parametrize("secured", [("another.example",)], indirect=True)
async def test_zookeeper_server_with_another_hosts_certificate_is_refused(secured: Secured) -> None:
    with pytest.raises(MetadataUnavailable):
        await ZooKeeperStore.connect(secured.address, tls=secured.client(), connect_timeout_s=2)
