"""A bookie with TLS connections, over real sockets. Apache's clients begin with START_TLS, our earlier bookies begin
with TLS, and our own client knows both (docs/protocol.md, B26)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.bookie.connections.service import BookieService
from kvstore.env import accepting
from kvstore.env.ports import Env, Stream
from kvstore.env.real import real_env
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport, split_address
from kvstore.errors import StoreError
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import BookieOperation, BookieResponse, Status
from kvstore.proto.start_tls import BookiesPrelude
from kvstore.types import EntryId, LedgerId
from kvstore.wal.bookies import BookieClients
from tests.bookie.support import KEY, ME, Shelf, packet, tiny
from tests.certificates import Files
from tests.env.runners import on_both
from tests.waiting import wait_until

ITS_TXN = 2
"""Request number of our client's START_TLS, which follows the add for which it connects."""
L, FIRST = LedgerId(7), EntryId(0)
START_TLS = wire.encode_start_tls(1)
ADD = wire.encode_add(5, L, 0, KEY, packet(L, 0))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.issue(tmp_path_factory.mktemp("tls"))


class Served:
    """A bookie on this machine's disk and network."""

    def __init__(self, env: Env, shelf: Shelf, service: BookieService, address: str) -> None:
        self.env, self.shelf, self.service, self.address = env, shelf, service, address

    @property
    def statistics(self) -> Any:
        return self.shelf.storage.statistics

    @property
    def is_empty(self) -> bool:
        """Assert that nothing is stored, and that the bookie does not count the connection yet."""
        return not self.shelf.storage.inventory.ledgers and (self.statistics.connections, self.statistics.adds) == (
            0,
            0,
        )

    async def is_opening(self) -> bool:
        """Return True if a connection has not completed its handshake."""
        return self.env.transport.statistics()["connections_opening"] == 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address(self.address)
        return await asyncio.open_connection(host, port)

    async def hangs_up(self, *data: bytes) -> bytes:
        """Send `data`, and return everything that the bookie sends until it closes the connection."""
        reader, writer = await self.connect()
        writer.write(b"".join(data))
        said = bytearray()
        with suppress(ConnectionError):
            while more := await reader.read(1 << 16):
                said += more
        writer.close()
        return bytes(said)


@asynccontextmanager
async def served(
    directory: Path, tls: Tls | None, *, is_old: bool = False, is_user: Callable[[Stream], bool] = lambda _: False
) -> AsyncIterator[Served]:
    """`is_old`: as our bookies were before START_TLS."""
    env = real_env(directory, tls=tls)
    shelf = await Shelf(env, tiny(segment_bytes=1 << 20)).start()
    service = BookieService(shelf.storage, tiny(), is_user=is_user)
    prelude = None if is_old else lambda: BookiesPrelude(service.refused_plain)
    listener = await env.transport.listen("127.0.0.1:0", service.handler, prelude=prelude)
    try:
        yield Served(env, shelf, service, listener.address)
    finally:
        listener.close()
        service.close()
        shelf.storage.stop()
        await env.nursery.close()


async def answer_to(reader: asyncio.StreamReader) -> BookieResponse:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return wire.decode_response(await reader.readexactly(size))


async def upgraded(one: Served, tls: Tls) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as Apache's client does."""
    reader, writer = await one.connect()
    writer.write(START_TLS)
    answer = await answer_to(reader)
    assert (answer.operation, answer.txn, answer.status) == (BookieOperation.START_TLS, 1, Status.OK)
    await writer.start_tls(tls.client_context(), server_hostname="127.0.0.1")
    return reader, writer


async def asked(one: Served, tls: Tls) -> BookieResponse:
    """In TLS 1.3 a client learns only after its handshake that its certificate is refused."""
    reader, writer = await upgraded(one, tls)
    try:
        writer.write(wire.encode_read(6, L, 0))
        return await answer_to(reader)
    finally:
        writer.close()


@on_both
async def test_client_that_begins_with_start_tls_is_served_inside_tls(files: Files, tmp_path: Path) -> None:
    async with served(tmp_path, files.bookie) as one:
        reader, writer = await upgraded(one, files.client)
        writer.write(ADD)
        assert (await answer_to(reader)).status == Status.OK
        writer.write(wire.encode_read(6, L, 0))
        assert (await answer_to(reader)).body == packet(L, 0)
        writer.write(wire.encode_start_tls(7))
        assert (await answer_to(reader)).status == Status.BAD_REQUEST, "it is TLS already"
        writer.close()


@on_both
async def test_client_that_begins_with_tls_is_served(files: Files, tmp_path: Path) -> None:
    """A node of the previous version, during a rolling upgrade."""
    async with served(tmp_path, files.bookie) as one:
        host, port = split_address(one.address)
        reader, writer = await asyncio.open_connection(host, port, ssl=files.client.client_context())
        writer.write(ADD)
        assert (await answer_to(reader)).status == Status.OK
        writer.close()


@on_both
async def test_plaintext_request_is_refused_and_nothing_is_stored(files: Files, tmp_path: Path) -> None:
    async with served(tmp_path, files.bookie) as one:
        reader, writer = await one.connect()
        for request in (ADD, wire.encode_read(5, L, 0, fence_key=KEY), wire.encode_bookie_info(5)):
            writer.write(request)
            assert (await answer_to(reader)).status == Status.UNAUTHORIZED
        assert (one.is_empty, one.statistics.refused_plain) == (True, 3)
        writer.close()


@on_both
async def test_bytes_injected_after_start_tls_are_never_a_request(files: Files, tmp_path: Path) -> None:
    """If the bookie kept the bytes that it has read too far, it would take them for the first ones inside TLS."""
    async with served(tmp_path, files.bookie) as one:
        said = await one.hangs_up(START_TLS, ADD)
        assert said.startswith(wire.encode_start_tls_response(1))
        assert one.is_empty
        reader, writer = await one.connect()
        writer.write(START_TLS + ADD)
        assert (await answer_to(reader)).status == Status.OK
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await writer.start_tls(files.client.client_context(), server_hostname="127.0.0.1")
        assert one.is_empty
        reader, writer = await upgraded(one, files.client)
        writer.write(wire.encode_read(6, L, 0))
        assert (await answer_to(reader)).status == Status.NO_LEDGER
        writer.close()


@on_both
async def test_silent_or_malformed_client_is_disconnected(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "OPENING_S", 0.5)
    async with served(tmp_path, files.bookie) as one:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", ADD[:30], (1 << 20).to_bytes(4, "big"), START_TLS):
            said = await one.hangs_up(data)
            assert said in (b"", wire.encode_start_tls_response(1))
        assert one.is_empty
        assert one.env.transport.statistics()["connections_opening"] == 0


@on_both
@pytest.mark.parametrize("is_old", [False, True], ids=["after START_TLS", "from the first byte"])
async def test_client_admitted_after_the_bookie_closed_gets_no_answer(
    is_old: bool, files: Files, tmp_path: Path
) -> None:
    """The process may have started the bookie again by then: the closed storage denies what the new one has stored
    since."""
    async with served(tmp_path, files.bookie) as one:
        reader, writer = await one.connect()
        if not is_old:
            writer.write(START_TLS)
            await answer_to(reader)
        await wait_until(one.is_opening)
        one.service.close()
        with suppress(ConnectionError):
            await writer.start_tls(files.client.client_context(), server_hostname="127.0.0.1")
            writer.write(wire.encode_read(6, L, 0))
            assert await reader.read(1) == b""
        assert one.statistics.reads == one.statistics.connections == 0
        writer.close()


@on_both
async def test_verified_bookie_admits_only_clients_with_a_certificate(files: Files, tmp_path: Path) -> None:
    async with served(tmp_path, replace(files.bookie, verify_clients=True)) as one:
        reader, writer = await upgraded(one, files.client)
        writer.write(ADD)
        assert (await answer_to(reader)).status == Status.OK
        writer.close()
        for wrong in (Tls(ca=files.client.ca), files.stranger):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await asked(one, wrong)
        assert one.statistics.adds == 1


# Our own client


class Caller:
    """Our client of bookies, with TLS."""

    def __init__(self, one: Env, address: str, tls: Tls | None) -> None:
        calling = None if tls is None else tls.client_context()
        env = replace(one, transport=TcpTransport(calling=calling))
        self._bookies = BookieClients(env, lambda _: address)

    async def add(self) -> StoreError | None:
        answered: asyncio.Future[StoreError | None] = asyncio.get_running_loop().create_future()
        self._bookies.add(ME, L, FIRST, packet(L, 0), KEY, False, answered.set_result)
        return await answered

    async def read(self) -> bytes | None:
        return (await self._bookies.read(ME, L, FIRST)).packet

    def close(self) -> None:
        self._bookies.close()


@on_both
@pytest.mark.parametrize("is_old", [False, True], ids=["a bookie of today", "a bookie of before"])
async def test_our_client_reaches_a_bookie_with_tls(is_old: bool, files: Files, tmp_path: Path) -> None:
    async with served(tmp_path, files.bookie, is_old=is_old) as one:
        caller = Caller(one.env, one.address, files.client)
        assert await caller.add() is None
        assert await caller.read() == packet(L, 0)
        assert one.statistics.connections == 1
        caller.close()


@on_both
async def test_our_client_without_tls_is_refused(files: Files, tmp_path: Path) -> None:
    async with served(tmp_path, files.bookie) as one:
        caller = Caller(one.env, one.address, None)
        assert await caller.add() is not None
        assert one.is_empty
        caller.close()


@on_both
@pytest.mark.parametrize("which", ["stranger", "client", "expired"])
async def test_our_client_sends_nothing_to_a_bookie_with_a_wrong_certificate(
    which: str, files: Files, tmp_path: Path
) -> None:
    """Issued by another authority, for another host, or expired. A man in the middle can disconnect on START_TLS or
    answer it; the certificate is required either way."""
    for is_old in (False, True):
        async with served(tmp_path / str(is_old), getattr(files, which), is_old=is_old) as one:
            caller = Caller(one.env, one.address, files.client)
            assert "certificate" in str(await caller.add())
            assert one.is_empty
            caller.close()


class Pretender:
    """Listens in a bookie's place and answers in plaintext; records what it receives."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self.heard: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        for answer in self._answers:
            self.heard.append(await reader.read(1 << 16))
            writer.write(answer)
        with suppress(ConnectionError):
            while more := await reader.read(1 << 16):
                self.heard.append(more)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.hear, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for each in self._writers:
                each.close()


def stored(txn: int) -> bytes:
    return wire.encode_add_response(txn, Status.OK, L, 0)


@on_both
@pytest.mark.parametrize(
    "answer",
    [
        partial(wire.encode_status, operation=BookieOperation.START_TLS, status=Status.BAD_REQUEST),
        partial(wire.encode_status, operation=BookieOperation.START_TLS, status=Status.UNAUTHORIZED),
        lambda txn: wire.encode_start_tls_response(txn) + b"".join(map(stored, range(1, 20))),
        stored,
    ],
    ids=["has no TLS", "refuses", "goes on in the clear", "says that all is stored"],
)
async def test_our_client_with_tls_never_talks_or_listens_in_plaintext(
    answer: Callable[[int], bytes], files: Files, tmp_path: Path
) -> None:
    """Neither a bookie without TLS nor a man in the middle can make it continue in plaintext."""
    env = real_env(tmp_path)
    pretender = Pretender(answer(ITS_TXN))
    async with pretender.listening() as address:
        caller = Caller(env, address, files.client)
        assert await caller.add() is not None
        assert packet(L, 0) not in b"".join(pretender.heard)
        assert pretender.heard[0] == wire.encode_start_tls(ITS_TXN)
        assert all(each.startswith(b"\x16") or not each for each in pretender.heard[1:]), "a TLS handshake at most"
        caller.close()
    await env.nursery.close()
