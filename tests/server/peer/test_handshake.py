"""Connections to the Redis port that claim to be a server and are none (docs/protocol.md H8)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.env.secret import ClusterSecret
from kvstore.errors import Unavailable
from kvstore.server.peer import frames, handshake, server
from kvstore.server.peer.frames import Call, FrameError
from kvstore.server.peer.handshake import ADDRESSES_MAX, LOG_EVERY_S, RefusedPeers
from kvstore.server.peer.proof import PURPOSE, CallingSide
from kvstore.types import PartitionId, ServerId
from kvstore.versions import LINK_FIRST, LINK_LATEST
from tests.server.peer.test_link_calls import connect, echo, hello
from tests.server.redis.test_parser import packed
from tests.server.servers import Servers, servers
from tests.waiting import PATIENCE_S, wait_until

P1, N1, N2 = PartitionId("p1"), ServerId("n1"), ServerId("n2")
ANOTHER = ClusterSecret((bytes(range(7, 39)),)).derive_all(PURPOSE)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    async with servers(tmp_path, ["n1", "n2"]) as started:
        started["n2"].peers.serve(P1, echo)
        yield started


def counted(cluster: Servers, name: str = "n2") -> int:
    return cluster[name].peers.statistics()["peer_refused_total"]


async def test_client_that_only_claims_to_be_a_server_is_refused(cluster: Servers) -> None:
    """Return the previous release's greeting, followed by a frame."""
    call = frames.encode(Call(1, "p1", "m", b""))
    raw = await connect(cluster)
    raw.writer.write(packed(b"KVSTORE.PEER", b"1", b"anybody", b"n2"))
    assert await raw.read_line() == b"-ERR peer version: expected %d to %d, got '1'\r\n" % (LINK_FIRST, LINK_LATEST)
    raw.close()
    raw = await connect(cluster)
    raw.writer.write(hello())
    assert (await raw.read_line()).startswith(b"+")
    raw.writer.write(call + bytes(32))
    assert (await raw.read_to_end()).startswith(b"-ERR peer: ")
    assert (counted(cluster), len(cluster["n2"].peers._connections)) == (2, 0)


@pytest.mark.parametrize("own", [{"keys": ANOTHER}, {"cluster": "another"}], ids=["secret", "cluster"])
async def test_server_of_another_cluster_is_refused_in_both_directions(
    cluster: Servers, own: dict[str, object]
) -> None:
    """This happens with a reused address and default names."""
    cluster["n1"].links.credentials = replace(cluster["n1"].credentials, **own)  # type: ignore[arg-type]
    cluster["n1"].peers.credentials = cluster["n1"].links.credentials
    cluster["n1"].peers.serve(P1, echo)
    for caller, called in (("n1", N2), ("n2", N1)):
        with pytest.raises(Unavailable, match="another"):
            await cluster[caller].links.call(called, P1, "m", b"", PATIENCE_S)
        assert counted(cluster, called) == 1
        assert cluster[caller].links.statistics()["peer_links_refused_total"] == 1
        assert list(cluster[caller].links.refusals()) == [called]


async def test_impostor_without_secret_receives_nothing(cluster: Servers) -> None:
    heard = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        await reader.readuntil(b"the cluster\r\n$32\r\n")
        await reader.readexactly(34)
        writer.write(b"+" + b"00" * 32 + b"\r\n")
        await reader.readexactly(32)
        writer.write(b"+" + b"00" * 32 + b"\r\n")
        heard = await reader.read()
        writer.close()

    stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
    cluster["n1"].links._addresses[ServerId("n8")] = f"127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
    with pytest.raises(Unavailable, match="n8 does not know the cluster's secret"):
        await cluster["n1"].links.call(ServerId("n8"), P1, "m", b"", PATIENCE_S)
    stranger.close()
    assert heard == b""


async def test_proof_is_limited_in_time_and_counts_as_client_before(
    cluster: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PROOF_S", 1.0)
    raw = await connect(cluster)
    before = cluster["n2"].resp.statistics()["resp_connections"]
    raw.writer.write(hello())
    await raw.read_line()
    assert cluster["n2"].resp.statistics()["resp_connections"] == before
    assert await raw.read_to_end() == b"-ERR peer: no proof within 1 s\r\n"
    assert counted(cluster) == 1

    async def is_gone() -> bool:
        return cluster["n2"].resp.statistics()["resp_connections"] == 0

    await wait_until(is_gone, what="the connection is forgotten")


async def test_connection_that_ends_before_its_proof_is_dropped(cluster: Servers) -> None:
    raw = await connect(cluster)
    raw.writer.write(hello() + bytes(5))
    await raw.read_line()
    raw.close()

    async def is_gone() -> bool:
        return cluster["n2"].resp.statistics()["resp_connections"] == 0

    await wait_until(is_gone, what="the connection is forgotten")
    assert counted(cluster) == 0


async def test_server_with_client_certificate_is_refused(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = {"subjectAltName": (("DNS", "application"),)}
    monkeypatch.setattr(handshake, "shown_on", lambda stream: certificate)
    with pytest.raises(Unavailable, match="the certificate is not that of a server"):
        await cluster["n1"].links.call(N2, P1, "m", b"", PATIENCE_S)
    certificate["subjectAltName"] = (("IP Address", "127.0.0.1"),)  # where n1 is registered
    await asyncio.sleep(0)
    raw = await connect(cluster)
    await cluster["n1"].introduce(raw, "n2")
    raw.close()
    raw = await connect(cluster)
    stranger = CallingSide(replace(cluster["n1"].credentials, server=ServerId("n9")), N2)
    raw.writer.write(stranger.hello())
    with pytest.raises(FrameError, match="the certificate is not that of a server"):
        stranger.take(await raw.read_line())
    raw.close()


class StandingClock:
    """A clock that shows the time that a test sets."""

    time = 5.0

    def now(self) -> float:
        return self.time

    def wall_ms(self) -> int:
        return 0


def test_refused_peers_are_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = StandingClock()
    strangers = RefusedPeers(clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            strangers.note("10.0.0.1", "why")
            strangers.note("10.0.0.2", "I am n1\nand this is a line of the log")
        assert [record.getMessage() for record in caplog.records] == [
            "refused a server link address=10.0.0.1 reason='why'",
            r"refused a server link address=10.0.0.2 reason='I am n1\nand this is a line of the log'",
        ]
        clock.time += LOG_EVERY_S
        strangers.note("10.0.0.1", "why")
    assert len(caplog.records) == 3
    for number in range(2 * ADDRESSES_MAX):
        strangers.note(str(number), "why")
    assert len(strangers._logged_at) == ADDRESSES_MAX
    assert strangers.count == 201 + 2 * ADDRESSES_MAX


async def test_server_has_one_link_and_old_links_end(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The called server is not notified that the other side, or the network, is gone. Otherwise LINKS_MAX
    such connections would keep everybody out."""
    monkeypatch.setattr(server, "LINKS_MAX", 1)
    former = await connect(cluster)
    await cluster["n1"].introduce(former, "n2")
    for _ in range(3):
        raw = await connect(cluster)
        await cluster["n1"].introduce(raw, "n2")
        with contextlib.suppress(ConnectionResetError):
            assert await former.read_to_end() == b""
        assert [each.server for each in cluster["n2"].peers._connections.values()] == ["n1"]
        former.close()
        former = raw
    former.close()
