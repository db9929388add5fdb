"""A bookie as clients of version 2 of the protocol see it."""

from __future__ import annotations

from typing import Any, cast

from kvstore.bookie.reader import TURN_S
from kvstore.proto import bookkeeper as wire
from kvstore.proto.version_two import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, BatchRead, encode_batch_read
from kvstore.types import BookieId
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.support import KEY, OTHERS, Metadata, metadata, packet
from tests.proto.golden import recorded
from tests.sim.world.env import SimWorld

L = 7
FENCE, RECOVERY = 1, 2
ADD, READ, AUTH, BATCH = 1, 2, 3, 7


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "big", signed=True)


def frame(operation: int, flags: int, rest: bytes) -> bytes:
    return number(4 + len(rest), 4) + bytes([2, operation, 0, flags]) + rest


def add(entry: int, payload: bytes = b"hello", *, flags: int = 0, key: bytes = KEY) -> bytes:
    return frame(ADD, flags, key + packet(L, entry, payload))


def read(entry: int, *, flags: int = 0, key: bytes = b"", ledger: int = L) -> bytes:
    return frame(READ, flags, number(ledger) + number(entry) + key)


def batch(entry: int, entries: int, size: int, *, ledger: int = L) -> bytes:
    return frame(BATCH, 0, number(ledger) + number(entry) + number(99) + number(entries, 4) + number(size))


class SlowDisk:
    """An event loop's clock on which each read takes a fixed time."""

    def __init__(self, seek_s: float) -> None:
        self.seek_s = seek_s
        self.now = 0.0

    def time(self) -> float:
        return self.now


async def ask(peer: Peer, request: bytes) -> tuple[int, bytes]:
    """Return the code and the rest of the answer, which must name the requested entry."""
    peer.send(request)
    (answer,) = await peer.answers(1)
    assert answer[:4] == request[4:6] + b"\0\0"
    at = 28 if request[5] == ADD else 8  # after the key
    assert answer[8:24] == request[at : at + 16]
    return int.from_bytes(answer[4:8], "big"), answer[24:]


def packets(rest: bytes) -> list[bytes]:
    """Return the entries of a batched answer, whose request number must be the one that was sent."""
    assert rest[:8] == number(99)
    found, at = [], 8
    while at < len(rest):
        size = int.from_bytes(rest[at : at + 4], "big")
        found.append(rest[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(rest)
    return found


def test_entries_of_version_two_are_readable_in_version_three(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for entry in range(3):
            assert await ask(peer, add(entry)) == (0, b"")
            assert await ask(peer, read(entry)) == (0, packet(L, entry))
        assert await ask(peer, read(wire.LAST_ENTRY)) == (0, packet(L, 2))
        assert await ask(peer, read(3)) == (2, b"")
        assert await ask(peer, read(0, ledger=8)) == (1, b"")
        other = await served.connect()
        assert (await other.ask(wire.encode_read(1, L, 1))).body == packet(L, 1)

    serve(world, scenario)


def test_fence_stops_the_writer_and_passes_recovery_in_version_two(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        assert await ask(peer, add(0)) == (0, b"")
        assert (await ask(peer, read(0, flags=FENCE, key=b"x" * 20)))[0] == 102
        assert (await ask(peer, read(0, flags=FENCE)))[0] == 102
        assert await ask(peer, add(1)) == (0, b""), "neither of these has fenced"
        assert await ask(peer, read(1, flags=FENCE, key=KEY)) == (0, packet(L, 1))
        assert await ask(peer, add(2)) == (104, b"")
        assert await ask(peer, add(2, flags=RECOVERY)) == (0, b"")
        assert await ask(peer, add(3, flags=RECOVERY, key=b"x" * 20)) == (102, b"")

    serve(world, scenario)


def test_limbo_is_an_error_and_no_negative_in_version_two(world: SimWorld) -> None:
    meta = Metadata()
    meta.known[L] = metadata(L, *OTHERS, BookieId("b4-dddd"))

    async def scenario(_: Served, peer: Peer) -> None:
        assert await ask(peer, read(0)) == (101, b"")
        assert await ask(peer, batch(0, 10, 1000)) == (101, number(99))
        assert await ask(peer, add(0)) == (101, b"")

    serve(world, scenario, meta)


def test_batch_returns_following_entries_that_fit(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        for entry in (0, 1, 2, 3, 5):
            assert await ask(peer, add(entry, bytes(100))) == (0, b"")
        size = 4 + len(packet(L, 0, bytes(100)))
        for request, wanted in [
            (batch(0, 10, 1 << 20), [0, 1, 2, 3]),  # entry 4 is not here
            (batch(1, 2, 1 << 20), [1, 2]),
            (batch(0, 0, 1 << 40), [0, 1, 2, 3]),
            (batch(0, -1, 3 * size), [0, 1, 2]),
            (batch(0, 10, 3 * size - 1), [0, 1]),
            (batch(5, 10, 0), [5]),  # the first one always
        ]:
            code, rest = await ask(peer, request)
            assert (code, packets(rest)) == (0, [packet(L, entry, bytes(100)) for entry in wanted])
        assert await ask(peer, batch(4, 10, 1000)) == (2, number(99))

    serve(world, scenario)


def test_our_batch_skips_missing_entries(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        for entry in (0, 1, 4, 5, 6, 9):
            assert await ask(peer, add(entry, bytes(100))) == (0, b"")
        size = 4 + len(packet(L, 0, bytes(100)))
        asked = BatchRead(L, 0, 99, 10, 1 << 20, None, is_priority=False, passes_over=True)
        for request, wanted in [
            (asked, [0, 1, 4, 5, 6, 9]),
            (asked._replace(entries_max=5), [0, 1, 4]),
            (asked._replace(bytes_max=3 * size), [0, 1, 4]),
            (asked._replace(entry=6, entries_max=1000), [6, 9]),
            (asked._replace(passes_over=False), [0, 1]),
        ]:
            code, rest = await ask(peer, encode_batch_read(request))
            assert (code, packets(rest)) == (0, [packet(L, entry, bytes(100)) for entry in wanted])
        assert await ask(peer, encode_batch_read(asked._replace(entry=2))) == (2, number(99))

    serve(world, scenario)


def test_batch_never_exceeds_a_frame_or_its_time(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for entry in range(4):
            assert await ask(peer, add(entry, bytes(2 << 20))) == (0, b"")
        _, rest = await ask(peer, batch(0, 10, 1 << 40))
        assert len(packets(rest)) == 2
        assert len(rest) <= BATCH_BYTES_MAX + 8
        for entry in range(4, 1 + BATCH_ENTRIES_MAX + 10):
            peer.send(add(entry))
        await peer.answers(BATCH_ENTRIES_MAX + 10 - 3)
        _, rest = await ask(peer, batch(4, 1 << 30, 1 << 40))
        assert len(packets(rest)) == BATCH_ENTRIES_MAX

    serve(world, scenario)


def test_batch_from_a_slow_disk_is_short(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for entry in range(100):
            peer.send(add(entry))
        await peer.answers(100)
        reader, slow = served.shelf.storage.reader, SlowDisk(seek_s=0.004)
        body = reader.body

        def read_slowly(*place: int) -> bytes | None:
            slow.now += slow.seek_s
            return body(*place)

        reader._loop = cast(Any, slow)
        reader.body = read_slowly  # type: ignore[method-assign]
        _, rest = await ask(peer, batch(0, 100, 1 << 20))
        assert packets(rest) == [packet(L, entry) for entry in range(len(packets(rest)))]
        assert 2 <= len(packets(rest)) <= 5
        assert slow.now <= 0.004 + TURN_S + 0.004
        slow.seek_s = 1.0
        assert packets((await ask(peer, batch(7, 100, 1 << 20)))[1])[0] == packet(L, 7)

    serve(world, scenario)


def test_damaged_entry_ends_a_batch_and_is_an_error_as_its_first(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for entry in range(3):
            assert await ask(peer, add(entry)) == (0, b"")
        index = served.shelf.storage.inventory.ledgers[L].index
        index.places[1] += 1  # where no record begins
        _, rest = await ask(peer, batch(0, 10, 1000))
        assert packets(rest) == [packet(L, 0)]
        assert (await ask(peer, batch(1, 10, 1000)))[0] == 101

    serve(world, scenario)


def test_auth_request_is_answered_as_no_authentication(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        golden = recorded("version_two.hex")
        peer.send(number(len(golden["auth"][0]), 4) + golden["auth"][0])
        assert await peer.answers(1) == golden["no authentication"]

    serve(world, scenario)


def test_malformed_version_two_request_ends_the_connection(world: SimWorld) -> None:
    async def scenario(served: Served, _: Peer) -> None:
        for payload in (b"\x02", b"\x02\x05\0\0" + bytes(40), b"\x02\x01\0\0" + bytes(30), b"\x01\x02\0\0" + bytes(16)):
            peer = await served.connect()
            peer.send(number(len(payload), 4) + payload)
            await peer.closed
        assert served.shelf.storage.statistics.bad_requests == 4

    serve(world, scenario)
