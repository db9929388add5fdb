"""The etcd driver over TLS with certificates on both sides. A real server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from kvstore.devcluster.etcd import start_standalone
from kvstore.env.dns.names import NAMES
from kvstore.env.tls import Tls
from kvstore.errors import MetadataUnavailable
from kvstore.meta.connect import connect
from kvstore.meta.etcd import EtcdStore
from kvstore.meta.store import SessionState
from tests.meta.drivers import States
from tests.meta.zookeeper.test_store_tls import write

pytestmark = pytest.mark.needs_etcd


class Secured:
    """A server that accepts only clients with a certificate of its authority."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.authority = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.cert_pem.bytes())
        pem = str(write(folder, self.authority, "server", host))
        files = ("--cert-file", pem, "--key-file", pem, "--trusted-ca-file", str(self.ca))
        self.process = start_standalone(folder / "etcd", settings=(*files, "--client-cert-auth"))
        self.address = f"{self.process.address}/kv"

    def client(self, authority: trustme.CA | None = None) -> Tls:
        pem = write(self.folder, authority or self.authority, "client", "client")
        return Tls(ca=self.ca, cert=pem, key=pem)


@pytest.fixture
def secured(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Secured]:
    secured = Secured(tmp_path, getattr(request, "param", "127.0.0.1"))
    yield secured
    secured.process.kill()


async def test_client_with_a_certificate_works_after_a_broken_connection(secured: Secured) -> None:
    store = await connect(f"etcd://{secured.address}", tls=secured.client())
    try:
        await store.create("/a", bytes(100_000))
        states = States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)
        assert len((await store.get("/a"))[0]) == 100_000
    finally:
        await store.close()


@pytest.mark.parametrize("secured", ["etcd.test"], indirect=True)
async def test_etcd_is_reached_by_a_name_in_its_certificate(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NAMES, "_lookup", lambda host, family: ["127.0.0.1"] if family == socket.AF_INET else [])
    NAMES.after_fork_in_child()
    named = secured.address.replace("127.0.0.1", "etcd.test")
    store = await connect(f"etcd://{named}", tls=secured.client())
    await store.create("/a", b"1")
    await store.close()
    with pytest.raises(MetadataUnavailable):
        await connect(f"etcd://{named.replace('etcd.test', 'other.test')}", tls=secured.client(), timeout_s=2)
    NAMES.after_fork_in_child()


async def test_client_of_another_authority_or_without_tls_is_refused(secured: Secured) -> None:
    for tls in (secured.client(trustme.CA()), None):
        with pytest.raises(MetadataUnavailable):
            await EtcdStore.connect(secured.address, tls=tls, connect_timeout_s=2)


@pytest.mark.parametrize("secured", ["another.example"], indirect=True)
async def test_server_with_another_hosts_certificate_is_refused(secured: Secured) -> None:
    with pytest.raises(MetadataUnavailable):
        await EtcdStore.connect(secured.address, tls=secured.client(), connect_timeout_s=2)


async def test_unusable_certificate_files_are_named(secured: Secured, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await EtcdStore.connect(secured.address, tls=Tls(ca=tmp_path / "none"))
