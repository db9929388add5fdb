"""Certificates that are replaced while everything runs: at listeners, towards others, and at a gRPC server."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvstore.env import certificates as module
from kvstore.env.certificates import CallingContext, Certificates, expiry_of
from kvstore.env.real import transport_of
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport
from kvstore.errors import ConfigError
from kvstore.rpc.server import GrpcServer
from tests.waiting import PATIENCE_S

BEGUN = datetime.now(UTC).replace(microsecond=0)


@dataclass
class Files:
    directory: Path
    authority: trustme.CA
    issued: int = 0

    @property
    def tls(self) -> Tls:
        return Tls(cert=self.directory / "cert.pem", key=self.directory / "key.pem", ca=self.directory / "ca.pem")

    def put(self, name: str, data: bytes) -> None:
        """Replace a file atomically, by a rename."""
        path = self.directory / name
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.replace(path)

    def issue(self, authority: trustme.CA | None = None) -> int:
        """Replace key and certificate, and return the serial number."""
        self.issued += 1
        made = (authority or self.authority).issue_cert(
            "127.0.0.1", "localhost", not_after=BEGUN + timedelta(days=self.issued)
        )
        self.put("ca.pem", self.authority.cert_pem.bytes())
        self.put("key.pem", made.private_key_pem.bytes())
        self.put("cert.pem", made.cert_chain_pems[0].bytes())
        return self.issued


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path, trustme.CA())
    found.issue()
    return found


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@asynccontextmanager
async def served(certificates: Certificates) -> AsyncIterator[tuple[str, int]]:
    transport = transport_of(certificates)
    listener = await transport.listen("127.0.0.1:0", Echo)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        host, _, port = listener.address.rpartition(":")
        yield host, int(port)
    listener.close()


async def days_of(address: tuple[str, int], context: ssl.SSLContext) -> int:
    """Return the validity in days of the certificate that a new connection gets, after checking that bytes are
    echoed."""
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    shown = writer.get_extra_info("peercert")["notAfter"]
    writer.transport.abort()
    until = datetime.strptime(shown, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
    return (until - BEGUN).days


async def test_new_connections_get_the_new_certificate_and_open_ones_continue(files: Files) -> None:
    certificates = Certificates(files.tls)
    context = files.tls.client_context()
    async with served(certificates) as address:
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        shown: list[int] = []
        is_over = False

        async def load() -> None:
            while not is_over:
                shown.append(await days_of(address, context))

        clients = [asyncio.create_task(load()) for _ in range(4)]
        for number in range(2, 6):
            assert files.issue() == number
            assert certificates.poll()
            assert set(await asyncio.gather(*(days_of(address, context) for _ in range(8)))) == {number}
        is_over = True
        await asyncio.gather(*clients)  # raises the failure
        assert set(shown) <= set(range(1, 6))
        writer.write(b"still")
        assert await reader.readexactly(5) == b"still"
        writer.transport.abort()
    assert certificates.reads == 5


def _cut(files: Files) -> None:
    files.put("cert.pem", (files.directory / "cert.pem").read_bytes()[:200])


def _gone(files: Files) -> None:
    (files.directory / "key.pem").unlink()


def _key_of_another(files: Files) -> None:
    files.put("key.pem", files.authority.issue_cert("127.0.0.1").private_key_pem.bytes())


def _empty_ca(files: Files) -> None:
    files.put("ca.pem", b"")


@pytest.mark.parametrize("spoil", [_cut, _gone, _key_of_another, _empty_ca])
async def test_unusable_files_change_nothing_and_are_logged_once(
    files: Files, spoil: Callable[[Files], None], caplog: pytest.LogCaptureFixture
) -> None:
    certificates, context = Certificates(files.tls), files.tls.client_context()
    async with served(certificates) as address:
        spoil(files)
        for _ in range(3):
            assert not certificates.poll()
        assert await days_of(address, context) == 1
        assert certificates.statistics()["tls_failing"] == 1
        assert caplog.text.count("keeping the old ones") == 1
        assert str(files.directory) in caplog.text
        files.issue()
        assert certificates.poll()
        assert await days_of(address, context) == 2
        assert certificates.statistics()["tls_failing"] == 0


def test_restored_old_files_are_not_a_failure(files: Files) -> None:
    files.issue()
    certificates = Certificates(files.tls)
    old, kept = files.directory / "cert.pem", files.directory / "cert.kept"
    old.rename(kept)
    files.put("cert.pem", b"no certificate")
    assert not certificates.poll()
    assert certificates.is_failing
    kept.rename(old)  # the same file again, with its former time, inode and size
    certificates.poll()
    assert not certificates.is_failing
    assert not certificates.poll(), "and they are read once"


async def test_removed_ca_is_no_longer_trusted(files: Files) -> None:
    other = trustme.CA()
    caller = Files(files.directory / "caller", other)
    caller.directory.mkdir()
    caller.issue()
    theirs = replace(caller.tls, ca=files.tls.ca).client_context()
    files.put("ca.pem", files.authority.cert_pem.bytes() + other.cert_pem.bytes())
    certificates = Certificates(replace(files.tls, verify_clients=True))
    async with served(certificates) as address:
        assert await days_of(address, theirs) == 1
        files.put("ca.pem", files.authority.cert_pem.bytes())
        assert certificates.poll()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await days_of(address, theirs)
        assert await days_of(address, files.tls.client_context()) == 1


async def test_connections_to_others_use_the_newest_files(files: Files) -> None:
    certificates = Certificates(files.tls)
    transport = transport_of(certificates)
    other = trustme.CA()
    far = Files(files.directory / "far", other)
    far.directory.mkdir()
    far.issue()
    async with served(Certificates(far.tls)) as (host, port):
        with pytest.raises(OSError, match="certificate"):
            await transport.connect(f"{host}:{port}", Echo())  # type: ignore[arg-type]
        files.put("ca.pem", other.cert_pem.bytes())
        assert certificates.poll()
        stream = await transport.connect(f"{host}:{port}", Echo())  # type: ignore[arg-type]
        stream.abort()


async def test_grpc_server_uses_the_newest_files_without_a_failed_call(files: Files) -> None:
    certificates = Certificates(files.tls)
    server = GrpcServer((), ())
    port = await server.start("127.0.0.1:0", certificates)
    await server.set_serving(True)
    roots = grpc.ssl_channel_credentials(files.authority.cert_pem.bytes())
    context = files.tls.client_context()
    context.set_alpn_protocols(["h2"])

    async def shown() -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        until = writer.get_extra_info("peercert")["notAfter"]
        writer.transport.abort()
        return (datetime.strptime(until, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC) - BEGUN).days

    async def call() -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", roots, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await asyncio.wait_for(stub.Check(health_pb2.HealthCheckRequest()), PATIENCE_S)

    assert await shown() == 1
    for number in (2, 3):
        files.issue()
        await call()
        assert certificates.poll()
        await asyncio.gather(*(call() for _ in range(8)))
        assert await shown() == number
    files.put("cert.pem", b"Dear Sir")
    assert not certificates.poll()
    await call()
    assert await shown() == 3
    await server.stop(0)


async def test_files_that_change_while_read_are_loaded_by_the_next_check(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(files.tls)
    files.issue()
    real = module.Certificates._read

    def read_and_change(self: Certificates) -> None:
        real(self)
        files.issue()

    monkeypatch.setattr(Certificates, "_read", read_and_change)
    assert not certificates.poll()
    monkeypatch.setattr(Certificates, "_read", real)
    assert certificates.poll()
    assert certificates.expires_s == (BEGUN + timedelta(days=3)).timestamp()


def test_expiry_is_that_of_the_certificate(files: Files) -> None:
    pem = (files.directory / "cert.pem").read_bytes()
    assert expiry_of(pem) == (BEGUN + timedelta(days=1)).timestamp()
    far = files.authority.issue_cert("a.example", not_after=datetime(2060, 1, 2, tzinfo=UTC))
    assert expiry_of(far.cert_chain_pems[0].bytes()) == datetime(2060, 1, 2, tzinfo=UTC).timestamp()
    half = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
    for wrong in (b"", b"Dear Sir", pem[:200], half, os.urandom(99)):
        with pytest.raises(ValueError, match="expected a certificate"):
            expiry_of(wrong)


DAY_S = 86_400


@pytest.mark.parametrize(("left_days", "words"), [(40, ""), (29, "expires in 28 days"), (0, "replace it, no restart")])
def test_expiring_certificate_is_logged_once_a_day(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left_days: int, words: str
) -> None:
    certificates = Certificates(files.tls)
    now = certificates.expires_s - left_days * DAY_S + 60
    monkeypatch.setattr("kvstore.env.certificates.time.time", lambda: now)
    for _ in range(3):
        certificates.warn()
    assert [words in line for line in caplog.text.splitlines()] == ([True] if words else [])
    now += DAY_S
    certificates.warn()
    assert len(caplog.text.splitlines()) == (2 if words else 0)


def test_expired_certificate_is_a_fault_until_it_is_replaced(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(files.tls)
    monkeypatch.setattr("kvstore.env.certificates.time.time", lambda: certificates.expires_s - 1)
    assert (certificates.fault(), certificates.left_s) == ("", 1)
    expired_s = certificates.expires_s + 1
    monkeypatch.setattr("kvstore.env.certificates.time.time", lambda: expired_s)
    assert f"{files.tls.cert} expired at " in certificates.fault()
    files.issue()
    certificates.poll()
    assert certificates.fault() == ""


async def test_each_call_of_a_client_uses_its_present_files(files: Files) -> None:
    other = trustme.CA()
    far = Files(files.directory / "far", other)
    far.directory.mkdir()
    far.issue()
    transport = TcpTransport(newest=CallingContext(Tls(ca=files.tls.ca)).newest)
    async with served(Certificates(far.tls)) as (host, port):

        async def call() -> None:
            stream = await transport.connect(f"{host}:{port}", Echo())  # type: ignore[arg-type]
            stream.abort()

        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await call()
        files.put("ca.pem", other.cert_pem.bytes())
        await call()
        files.put("ca.pem", b"Dear Sir")
        await call()
        files.put("ca.pem", files.authority.cert_pem.bytes())
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await call()


def test_client_does_not_start_with_unusable_files(files: Files) -> None:
    files.put("ca.pem", b"Dear Sir")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        CallingContext(Tls(ca=files.tls.ca))
