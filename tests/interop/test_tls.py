"""START_TLS: Apache's client on our bookies, and our client on a bookie of Apache's. Skipped without jars."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.env.tls import Tls
from kvstore.errors import BookieError, StoreError
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import BookieId, DigestType, EntryId, LedgerId
from kvstore.wal.bookies import BookieClients
from tests.certificates import ROLE, Files
from tests.interop import java
from tests.interop.processes import Processes
from tests.waiting import wait_until

pytestmark = pytest.mark.interop
L = LedgerId(7)
KEY = master_key(b"")
FACTORY = "org.apache.bookkeeper.tls.TLSContextFactory"
ROLES = "org.apache.bookkeeper.tls.BookieAuthZFactory"
WAYS = ("JDK,3", "OpenSSL,3", "JDK,2", "OpenSSL,2")


def settings(tls: Tls) -> list[str]:
    """Return the settings of one of our bookies."""
    return [f"cert={tls.cert}", f"key={tls.key}", f"ca={tls.ca}"]


async def said(cluster: Processes, tls: Tls, *cases: str) -> java.Output:
    """Return what Apache's client prints about its attempts."""
    files = map(str, (tls.ca, tls.cert, tls.key))
    where = f"{cluster.zookeeper.address}/ledgers"
    output = await cluster.programs.run("Secured", where, *files, *cases)
    assert output.code == 0, output.text[-3000:]
    assert "OpenSSL Unavailable" not in output.text
    return output


def outcomes(output: java.Output) -> list[str]:
    words = [line.split() for line in output.text.splitlines() if line.startswith(("stored ", "refused "))]
    return [f"{outcome} {case}" for outcome, case, *_ in words]


async def test_java_client_reaches_our_bookies_by_start_tls(tmp_path: Path) -> None:
    java.compile_sessions()
    files = Files.issue(tmp_path)
    async with Processes(tmp_path, 3, *settings(files.bookie)) as cluster:
        ways = [f"{way},bare" for way in WAYS]
        output = await said(cluster, files.client, *ways, "none,3,bare")
        assert outcomes(output) == [*(f"stored {way}" for way in ways), "refused none,3,bare"], output.text[-3000:]


async def test_verifying_bookies_accept_java_with_a_certificate(tmp_path: Path) -> None:
    java.compile_sessions()
    files = Files.issue(tmp_path)
    async with Processes(tmp_path, 3, *settings(files.bookie), "verify_clients=1") as cluster:
        ways = [f"{way},cert" for way in WAYS]
        output = await said(cluster, files.client, *ways, "JDK,3,bare")
        assert outcomes(output) == [*(f"stored {way}" for way in ways), "refused JDK,3,bare"], output.text[-3000:]
        other = await said(cluster, replace(files.stranger, ca=files.client.ca), "JDK,3,cert")
        assert outcomes(other) == ["refused JDK,3,cert"], "its certificate is of another authority"


@asynccontextmanager
async def client(address: str, directory: Path, tls: Tls | None) -> AsyncIterator[BookieClients]:
    """Run our client for bookies that are all at `address`."""
    env = real_env(directory, tls=tls)
    bookies = BookieClients(env, lambda _: address)
    try:
        yield bookies
    finally:
        bookies.close()
        await env.nursery.close()


def packet(entry: int) -> bytes:
    return EntryDigest(DigestType.CRC32C).packet(L, EntryId(entry), EntryId(entry - 1), 100 * (entry + 1), bytes(100))


async def stored(bookies: BookieClients, bookie: BookieId, entry: int) -> StoreError | None:
    answered: asyncio.Future[StoreError | None] = asyncio.get_running_loop().create_future()
    bookies.add(bookie, L, EntryId(entry), packet(entry), KEY, False, answered.set_result)
    return await answered


@pytest.mark.parametrize("provider", ["JDK", "OpenSSL"])
async def test_our_ledger_client_writes_to_apache_bookies_with_tls(provider: str, tmp_path: Path) -> None:
    """Apache's bookie accepts only certificates that name a role."""
    files = Files.issue(tmp_path)
    of_bookie = {
        "tlsProvider": provider,
        "tlsProviderFactoryClass": FACTORY,
        "tlsClientAuthentication": "true",
        "tlsKeyStoreType": "PEM",
        "tlsKeyStore": str(files.bookie.key),
        "tlsCertificatePath": str(files.bookie.cert),
        "tlsTrustStoreType": "PEM",
        "tlsTrustStore": str(files.bookie.ca),
        "bookieAuthProviderFactoryClass": ROLES,
        "authorizedRoles": ROLE,
    }
    async with Processes(tmp_path, 0) as cluster:
        bookie = await cluster.add_their_bookie(**of_bookie)
        address = (await cluster.addresses())[bookie]
        async with client(address, tmp_path / "certified", files.client) as bookies:

            async def is_warm() -> bool:
                return await stored(bookies, bookie, 0) is None

            await wait_until(is_warm, what="a Java bookie does its first handshake, which takes long")
            for entry in range(100):
                assert await stored(bookies, bookie, entry) is None
            assert (await bookies.read(bookie, L, EntryId(99), fence_key=KEY)).packet == packet(99)
        bare, stranger = Tls(ca=files.client.ca), replace(files.stranger, ca=files.client.ca)
        for number, tls in enumerate((bare, stranger, None)):
            async with client(address, tmp_path / str(number), tls) as bookies:
                error = await stored(bookies, bookie, 100)
                assert isinstance(error, BookieError), f"{tls} is let in"
