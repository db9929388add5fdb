"""A cluster with TLS on every listener and between nodes. Real processes, a CA made for the test."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import redis
import trustme

from kvstore.client import AsyncClient, Client
from kvstore.env.secret import ClusterSecret, read_secret
from kvstore.errors import StoreError
from kvstore.meta.layout import LayoutStore
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.server.peer.frames import FrameError
from kvstore.server.peer.proof import NONCE_BYTES, PURPOSE, CallingSide, Credentials
from kvstore.types import ServerId
from kvstore.versions import LINK_LATEST
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import kvstore
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cluster]


class Secured:
    """The files that clients of a cluster with TLS need, and the cluster once it runs."""

    cluster: Cluster

    def __init__(self, directory: Path) -> None:
        self.authority = authority = trustme.CA()
        self.ca, self.cert, self.key = directory / "ca.pem", directory / "cert.pem", directory / "key.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.issue()
        self.of_client = directory / "client.pem"
        authority.issue_cert("application.example").private_key_and_cert_chain_pem.write_to_path(str(self.of_client))
        self.other_ca = directory / "other.pem"
        trustme.CA().cert_pem.write_to_path(str(self.other_ca))

    def issue(self) -> None:
        """Create the nodes' certificate and key, or replace them: first the key, then the certificate."""
        key, cert = self.key.with_suffix(".new"), self.cert.with_suffix(".newer")
        self.write_another(key, cert)
        key.replace(self.key)
        cert.replace(self.cert)

    def write_another(self, key: Path, cert: Path) -> None:
        """Write a key and a certificate for the nodes."""
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(str(key))
        issued.cert_chain_pems[0].write_to_path(str(cert))

    def table(self, *, verifies: bool = False) -> str:
        """Return the TLS section of a node's file."""
        verify = "verify_clients = true\n" if verifies else ""
        return f'\n[tls]\ncert = "{self.cert}"\nkey = "{self.key}"\nca = "{self.ca}"\n{verify}'

    def wait_ready(self) -> None:
        """Wait until each node is ready and the cluster version has risen."""
        cluster, command = self.cluster, ("cluster", "version", "--json", "--metadata", self.cluster.file.zookeeper)
        for node in cluster.ids:
            cluster.wait_until(lambda node=node: self.https(node, "/readyz") == b"ok\n", f"{node} is ready")
        cluster.wait_until(lambda: '"waits_for": null' in kvstore(*command).stdout, "the cluster's version rises")

    def https(self, node: str, path: str) -> bytes:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.cert, self.key)
        host, port = self.cluster.address(node, "http")
        with suppress(OSError), urlopen(f"https://{host}:{port}{path}", timeout=3, context=context) as answer:
            found: bytes = answer.read()
            return found
        return b""

    def url(self, *nodes: str, ca: Path | None = None) -> str:
        hosts = ",".join("{}:{}".format(*self.cluster.address(node, "grpc")) for node in nodes)
        return f"kvs://{hosts}?ca={ca or self.ca}"


@contextmanager
def secured_cluster(
    directory: Path, *verifying: str, addressed: Callable[[str], str] = str, **options: Any
) -> Iterator[Secured]:
    """Run a cluster with TLS from its first start. Nodes in `verifying` require client certificates.
    `addressed`: makes other addresses of those in a file."""
    found = Secured(directory)

    def written(node: str, text: str) -> str:
        return addressed(text) + found.table(verifies=node in verifying)

    with running_cluster(directory, written=written, **options) as found.cluster:
        found.wait_ready()
        yield found


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_cluster(tmp_path_factory.mktemp("tls"), "n3") as found:
        yield found


def test_every_node_serves_every_key_over_tls(secured: Secured) -> None:
    with Client(secured.url("n1", "n2", "n3") + f"&cert={secured.cert}&key={secured.key}") as store:
        for number in range(60):
            store.put(b"tls-%d" % number, b"value")
    for node in ("n1", "n2"):
        client = secured.cluster.redis(node, ssl=True, ssl_ca_certs=str(secured.ca))
        assert client.mget([f"tls-{number}" for number in range(60)]) == [b"value"] * 60


def links_of(url: str) -> tuple[float, float]:
    """Return how many of a client's links are streams on Redis ports, and how many links there are, once it has
    written to every partition."""

    async def ask() -> tuple[float, float]:
        async with AsyncClient(url) as client:
            await client.put_many({b"stream-%d" % number: b"value" for number in range(60)})
            told = client.statistics()
            return told["streams_up"], told["links_up"]

    return asyncio.run(ask())


def test_sessions_on_the_redis_port_are_encrypted_and_verified(secured: Secured) -> None:
    own = f"&cert={secured.cert}&key={secured.key}"

    def are_streams() -> bool:
        streams, links = links_of(secured.url("n1", "n2", "n3") + own)
        return streams == links > 0

    secured.cluster.wait_until(are_streams, "each link is a stream")
    with pytest.raises(StoreError):
        links_of(secured.url("n1", ca=secured.other_ca) + own)
    streams, _ = links_of(secured.url("n1"))
    assert streams <= 2, "n3 verifies clients; the others forward to it"


def test_plaintext_connections_get_nothing(secured: Secured) -> None:
    for endpoint in ("resp", "grpc", "http", "bookie"):
        with socket.create_connection(secured.cluster.address("n1", endpoint), timeout=5) as connection:
            connection.settimeout(2)
            answer = b""
            with suppress(OSError):
                connection.sendall(b"PING\r\n")
                answer = connection.recv(100)
            assert b"PONG" not in answer, endpoint


def test_server_with_an_untrusted_certificate_is_refused(secured: Secured) -> None:
    with pytest.raises(StoreError), Client(secured.url("n1", ca=secured.other_ca)) as client:
        client.get(b"tls-1")


def test_verifying_node_refuses_clients_without_a_certificate(secured: Secured) -> None:
    with pytest.raises((OSError, redis.ConnectionError)):
        secured.cluster.redis("n3", ssl=True, ssl_ca_certs=str(secured.ca)).ping()
    own = {"ssl_certfile": str(secured.cert), "ssl_keyfile": str(secured.key)}
    assert secured.cluster.redis("n3", ssl=True, ssl_ca_certs=str(secured.ca), **own).ping() is True
    with pytest.raises(StoreError), Client(secured.url("n3")) as client:
        client.get(b"tls-1")


def greeted_as_n1(secured: Secured, secret: ClusterSecret, cert: Path, key: Path | None = None) -> str:
    """Return n3's last message to a peer that claims to be n1. n3 verifies clients."""

    async def instance() -> str:
        store = await ZooKeeperStore.connect(secured.cluster.file.zookeeper)
        try:
            return await LayoutStore(store).instance_id()
        finally:
            await store.close()

    nonce = partial(os.urandom, NONCE_BYTES)
    credentials = Credentials(ServerId("n1"), asyncio.run(instance()), secret.derive_all(PURPOSE), nonce)
    caller = CallingSide(credentials, ServerId("n3"), LINK_LATEST)
    context = ssl.create_default_context(cafile=str(secured.ca))
    context.load_cert_chain(cert, key)
    host, port = secured.cluster.address("n3", "resp")
    with (
        socket.create_connection((host, port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(caller.hello())
        try:
            while not caller.is_proven:
                said = connection.recv(1000)
                assert said, "it has closed the connection and not said why"
                proof, _ = caller.take(said)
                connection.sendall(proof)
        except FrameError as error:
            return str(error)
    return "let in"


def test_peer_needs_both_a_certificate_and_the_cluster_secret(secured: Secured) -> None:
    """docs/protocol.md H8"""
    secret = read_secret(Path(secured.cluster.file.secret_file))
    another = ClusterSecret((bytes(32),))
    for of_whom in (secret, another):
        assert "not that of a server" in greeted_as_n1(secured, of_whom, secured.of_client)
    assert "secret is another one" in greeted_as_n1(secured, another, secured.cert, secured.key)
    assert greeted_as_n1(secured, secret, secured.cert, secured.key) == "let in"


def test_commands_use_the_tls_files_of_the_environment(secured: Secured) -> None:
    files = {
        "KVSTORE_TLS_CA": str(secured.ca),
        "KVSTORE_TLS_CERT": str(secured.cert),
        "KVSTORE_TLS_KEY": str(secured.key),
    }
    where = ["--data-dir", str(secured.cluster.local.data_dir)]
    for arguments in (["put", "from", "a shell"], ["get", "from"], ["fsck"]):
        answer = kvstore(*arguments, *where, environ=files)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "Healthy" in answer.stdout or "No data is lost" in answer.stdout
