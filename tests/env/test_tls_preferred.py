"""TLS that is preferred and TLS that is required, over real sockets (docs/protocol.md S1)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.env import accepting
from kvstore.env.certificates import Certificates
from kvstore.env.real import transport_of
from kvstore.env.tls import Mode, Tls
from kvstore.env.transport import TcpTransport, split_address
from kvstore.proto import bookkeeper as wire
from kvstore.proto.start_tls import BookiesPrelude, ClientsPrelude
from tests.certificates import Files
from tests.waiting import PATIENCE_S, wait_until

Prelude = Callable[[], BookiesPrelude] | None
LIST = wire.encode_bookie_info(1, requested=0)
"""First bytes of a bookie client without TLS."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.issue(tmp_path_factory.mktemp("tls"))


def prefer(tls: Tls) -> Tls:
    return replace(tls, mode=Mode.PREFER)


def bookies_prelude() -> BookiesPrelude:
    return BookiesPrelude(lambda: None)


class Echo(asyncio.Protocol):
    """Echoes what it receives, after a byte that says whether TLS is used."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        kind = b"tls " if self._transport.get_extra_info("ssl_object") else b"plain "
        self._transport.write(kind + data)


class Heard(asyncio.Protocol):
    """A caller that sends x."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(b"x")

    def data_received(self, data: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_result(b"")


@asynccontextmanager
async def served(tls: Tls | None, prelude: Prelude = None) -> AsyncIterator[tuple[TcpTransport, str]]:
    transport = transport_of(None if tls is None else Certificates(tls))
    listener = await transport.listen("127.0.0.1:0", Echo, prelude=prelude)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        yield transport, listener.address
    listener.close()


async def answered(address: str, *data: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """Return a listener's answer to these bytes, each sent by itself; empty if it hangs up."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        with suppress(ConnectionError):
            for each in data:
                writer.write(each)
                await writer.drain()
                await asyncio.sleep(0)
            return await reader.read(1000)
        return b""
    finally:
        writer.transport.abort()


async def called(tls: Tls | None, address: str, prelude: Any = None) -> bytes:
    """Return what a caller with these files receives, first whether TLS is used. Raises OSError."""
    transport = transport_of(None if tls is None else Certificates(tls))
    handler = Heard()
    stream = await transport.connect(address, handler, prelude=prelude)  # type: ignore[arg-type]
    try:
        return await handler.answer
    finally:
        stream.abort()


@pytest.mark.parametrize("prelude", [None, bookies_prelude], ids=["any port", "a bookie's"])
async def test_port_that_prefers_tls_accepts_both_and_counts_plain_connections(files: Files, prelude: Prelude) -> None:
    async with served(prefer(files.bookie), prelude) as (transport, address):
        assert await answered(address, LIST) == b"plain " + LIST
        assert await answered(address, b"x", context=files.client.client_context()) == b"tls x"
        assert await answered(address, b"\x01" * 400) == b"plain " + b"\x01" * 400
        assert transport.statistics()["connections_plain_total"] == 2
        await wait_until(lambda: none_opening(transport), what="nobody is between accept and handler")


async def none_opening(transport: TcpTransport) -> bool:
    return transport.statistics()["connections_opening"] == 0


@pytest.mark.parametrize("prelude", [None, bookies_prelude], ids=["any port", "a bookie's"])
async def test_port_that_requires_tls_accepts_no_plain_connection(files: Files, prelude: Prelude) -> None:
    async with served(files.bookie, prelude) as (transport, address):
        for said in (LIST, b"*1\r\n$4\r\nPING\r\n", b"\x01" * 1000):
            assert b"plain" not in await answered(address, said, b"x" * 300)
        assert transport.statistics()["connections_plain_total"] == 0


async def test_bookie_port_accepts_start_tls_in_pieces(files: Files) -> None:
    asks = wire.encode_start_tls(7)
    async with served(prefer(files.bookie), bookies_prelude) as (transport, address):
        host, port = split_address(address)
        for pieces in ([asks], [asks[:2], asks[2:7], asks[7:]]):
            reader, writer = await asyncio.open_connection(host, port)
            for each in pieces:
                writer.write(each)
                await writer.drain()
            size = int.from_bytes(await reader.readexactly(4), "big")
            assert wire.decode_response(await reader.readexactly(size)).txn == 7
            await writer.start_tls(files.client.client_context(), server_hostname=host)
            writer.write(b"x")
            assert await reader.readexactly(5) == b"tls x"
            writer.transport.abort()
        assert transport.statistics()["connections_plain_total"] == 0
        reader, writer = await asyncio.open_connection(host, port)
        for each in (LIST[:3], LIST[3:9], LIST[9:]):
            writer.write(each)
            await writer.drain()
        assert await reader.readexactly(6 + len(LIST)) == b"plain " + LIST
        writer.transport.abort()


async def test_client_that_leaves_early_is_ignored(files: Files) -> None:
    async with served(prefer(files.bookie), bookies_prelude) as (transport, address):
        host, port = split_address(address)
        for said in (b"", b"\0", LIST[:6]):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(said)
            await writer.drain()
            writer.write_eof()
            await wait_until(lambda: none_opening(transport), what="it is given up")
            writer.transport.abort()
        assert transport.statistics()["connections_plain_total"] == 0


async def test_silent_client_holds_a_slot_no_longer_than_a_handshake(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "OPENING_S", 0.01)
    async with served(prefer(files.bookie)) as (transport, address):
        host, port = split_address(address)
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b""
        writer.transport.abort()
        assert transport.statistics()["connections_timed_out_total"] == 1


@pytest.mark.parametrize("prelude", [None, bookies_prelude], ids=["any port", "a bookie's"])
async def test_call_uses_tls_when_the_server_has_it(files: Files, prelude: Prelude) -> None:
    says = None if prelude is None else lambda: ClientsPrelude(7)
    for there in (files.bookie, prefer(files.bookie)):
        for here in (files.client, prefer(files.client)):
            async with served(there, prelude) as (_, address):
                assert await called(here, address, says) == b"tls x"


class Deaf(asyncio.Protocol):
    """Has no TLS, and takes a handshake for an error."""

    def __init__(self, says: bytes) -> None:
        self._says, self._heard = says, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        if self._heard == b"x":
            self._transport.write(b"plain x")
            return
        self._transport.write(self._says)
        self._transport.close()


@asynccontextmanager
async def deaf(says: bytes) -> AsyncIterator[str]:
    listener = await TcpTransport().listen("127.0.0.1:0", lambda: Deaf(says))  # type: ignore[arg-type,return-value]
    async with asyncio.timeout(PATIENCE_S):
        yield listener.address
    listener.close()


REFUSES = wire.encode_status(7, wire.BookieOperation.START_TLS, wire.Status.BAD_REQUEST)


@pytest.mark.parametrize("says", [b"", b"-ERR Protocol error\r\n", REFUSES], ids=["hangs up", "an error", "refuses"])
@pytest.mark.parametrize("says_first", [None, lambda: ClientsPrelude(7)], ids=["any port", "a bookie's"])
async def test_only_a_caller_that_prefers_tls_calls_without_it(files: Files, says: bytes, says_first: Any) -> None:
    async with deaf(says) as address:
        assert await called(prefer(files.bookie), address, says_first) == b"plain x"
        with pytest.raises(OSError):  # noqa: PT011 - of many kinds
            await called(files.bookie, address, says_first)


async def test_untrusted_certificate_is_no_reason_to_call_without_tls(files: Files) -> None:
    for there in (files.stranger, files.expired):
        async with served(prefer(there)) as (transport, address):
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                await called(prefer(files.client), address)
            assert transport.statistics()["connections_plain_total"] == 0


async def test_refused_connection_is_no_reason_to_call_without_tls(files: Files) -> None:
    async with served(None) as (_, address):
        pass
    with pytest.raises(ConnectionRefusedError):
        await called(prefer(files.client), address)


async def test_calls_without_tls_are_counted(files: Files) -> None:
    async with deaf(b"") as address:
        transport, handler = transport_of(prefer(files.bookie)), Heard()
        stream = await transport.connect(address, handler)  # type: ignore[arg-type]
        assert await handler.answer == b"plain x"
        stream.abort()
        assert transport.statistics()["connections_plain_calls_total"] == 1


def test_prefer_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected cert and key with"):
        Tls(mode=Mode.PREFER)
