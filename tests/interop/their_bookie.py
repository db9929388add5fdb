"""Starts a bookie of Apache's on our metadata and records its answers to our requests.

python -m tests.interop.their_bookie [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen

from kvstore.devcluster.zookeeper import free_port, start_standalone
from kvstore.meta.layout import LayoutStore
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.proto.frames import FrameReader
from kvstore.types import NO_ENTRY, BookieId, DigestType, EntryId, LedgerId
from tests.interop import java
from tests.waiting import PATIENCE_S, wait_until

GOLDEN = Path(__file__).parent.parent / "proto" / "golden" / "bookie.hex"
L = LedgerId(7)
KEY = master_key(b"")
DIGEST = EntryDigest(DigestType.CRC32C)
FIRST, SECOND = (
    DIGEST.packet(L, EntryId(0), NO_ENTRY, 5, b"hello"),
    DIGEST.packet(L, EntryId(1), EntryId(0), 10, b"world"),
)
LAC_1 = DIGEST.lac_packet(L, EntryId(1))


def script() -> list[tuple[str, bytes]]:
    """Return requests in order, by name. Each is answered before the next is sent."""
    auth = pb.Request(
        header=pb.PacketHeader(version=pb.VERSION_THREE, operation=pb.AUTH, txn_id=17),
        auth=pb.AuthMessage(plugin="none", payload=b""),
    ).SerializeToString()
    tls = pb.Request(
        header=pb.PacketHeader(version=pb.VERSION_THREE, operation=pb.START_TLS, txn_id=18),
        start_tls=pb.StartTlsRequest(),
    ).SerializeToString()
    return [
        ("auth", len(auth).to_bytes(4, "big") + auth),
        ("read an unknown ledger", wire.encode_read(1, L, 0)),
        ("read the LAC of an unknown ledger", wire.encode_read_lac(2, L)),
        ("list an unknown ledger", wire.encode_list_entries(3, L)),
        ("add 0", wire.encode_add(4, L, 0, KEY, FIRST, context=wire.bookie_context("b1-3f2a9c"))),
        ("add 1", wire.encode_add(5, L, 1, KEY, SECOND)),
        (
            "add with another key",
            wire.encode_add(6, L, 2, b"x" * 20, DIGEST.packet(L, EntryId(2), EntryId(1), 11, b"!")),
        ),
        ("read 0", wire.encode_read(7, L, 0)),
        ("read 1 past the end", wire.encode_read(8, L, 2)),
        ("read the last", wire.encode_read(9, L, wire.LAST_ENTRY)),
        ("read the LAC", wire.encode_read_lac(10, L)),
        ("write a LAC", wire.encode_write_lac(11, L, 1, KEY, LAC_1)),
        ("read the LAC again", wire.encode_read_lac(12, L)),
        ("long poll that is over", wire.encode_long_poll(13, L, 0, 500)),
        ("long poll in vain", wire.encode_long_poll(14, L, 1, 200)),
        ("force", wire.encode_force(15, L)),
        ("list", wire.encode_list_entries(16, L)),
        ("start TLS", len(tls).to_bytes(4, "big") + tls),
        ("fence and read the last", wire.encode_read(19, L, wire.LAST_ENTRY, fence_key=KEY)),
        ("fence and read past the end", wire.encode_read(20, L, 2, fence_key=KEY, priority=100)),
        ("fence with another key", wire.encode_read(21, L, 0, fence_key=b"x" * 20)),
        ("add when fenced", wire.encode_add(22, L, 2, KEY, DIGEST.packet(L, EntryId(2), EntryId(1), 11, b"!"))),
        ("recovery add", wire.encode_add(23, L, 2, KEY, DIGEST.packet(L, EntryId(2), EntryId(1), 11, b"!"), True)),
        ("fence an unknown ledger", wire.encode_read(24, LedgerId(8), wire.LAST_ENTRY, fence_key=KEY)),
    ]


async def ask(address: str, requests: list[tuple[str, bytes]]) -> list[tuple[str, bytes, bytes]]:
    """Return the name, the request and the answer, as payloads. Raises TimeoutError, ConnectionError."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    frames, told = FrameReader(wire.PAYLOAD_MAX), []
    try:
        async with asyncio.timeout(PATIENCE_S):
            for name, request in requests:
                writer.write(request)
                answers: list[bytes] = []
                while not answers:
                    data = await reader.read(1 << 16)
                    if not data:
                        raise ConnectionError(f"closed after {name}")
                    answers = frames.feed(data)
                told.append((name, request[4:], answers[0]))
    finally:
        writer.close()
    return told


def launch(directory: Path, zookeeper: str, *, quick: bool = True, **more: str) -> Popen[bytes]:
    """Start a bookie of Apache's with its files in `directory`. With `quick` it starts sooner, and is slower later.
    `more`: additional settings."""
    settings = {
        "bookiePort": str(free_port()),
        "advertisedAddress": "127.0.0.1",
        "allowLoopback": "true",
        "journalDirectories": str(directory / "journal"),
        "ledgerDirectories": str(directory / "ledgers"),
        "httpServerEnabled": "false",
        **more,
    }
    return java.Programs(directory / "java", zookeeper, **settings).server(directory / "bookie.log", quick=quick)


@asynccontextmanager
async def their_bookie(directory: Path) -> AsyncIterator[tuple[BookieId, str]]:
    """A running bookie of Apache's: id and `host:port`."""
    zookeeper = start_standalone(directory / "zookeeper")
    store = await ZooKeeperStore.connect(zookeeper.address)
    await LayoutStore(store).ensure(str(uuid.uuid4()))
    process = launch(directory, zookeeper.address)
    try:
        client = RegistrationClient(store)

        async def is_registered() -> bool:
            return bool((await client.bookies()).writable)

        await wait_until(is_registered, timeout_s=60, what="Apache's bookie registers")
        yield next(iter((await client.bookies()).writable.items()))
    finally:
        process.kill()
        process.wait()
        await store.close()
        zookeeper.kill()


async def run(directory: Path, *, record: bool) -> None:
    async with their_bookie(directory) as (bookie, address):
        told = await ask(address, script())
    for name, _, answer in told:
        sys.stdout.write(f"{bookie} {name}: {wire.decode_response(answer)}\n")
    if record:
        lines = [f"{name}: {request.hex()} {answer.hex()}\n" for name, request, answer in told]
        header = f"# Our requests, and what a bookie of Apache BookKeeper {java.VERSION} answered.\n"
        GOLDEN.write_text(header + "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if not java.is_installed():
        java.install()
    with tempfile.TemporaryDirectory(prefix="interop-") as directory:
        asyncio.run(run(Path(directory), record=arguments.record))


if __name__ == "__main__":
    main()
