"""Entry packets, last-add-confirmed packets and master keys, byte for byte as Apache BookKeeper's clients make them.

    entry packet := ledger i64 | entry i64 | lac i64 | length i64 | digest | payload       big-endian
    LAC packet   := ledger i64 | lac i64 | digest

`lac` is the writer's last add confirmed when it built the packet; `length` counts the payload bytes of all entries up
to and including this one. The digest covers everything but itself: CRC32C (4 bytes), CRC32 (8, the upper half zero),
HMAC-SHA1 (20), none. Bookies store no packet whose digest is wrong (docs/protocol.md, B21 and L16). A reader checks
digest, ledger and entry.
"""

from __future__ import annotations

import hmac
import zlib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from hashlib import sha1
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from kvstore.errors import Corrupted
from kvstore.types import DigestType, EntryId, LedgerId

HEADER = Struct(">qqqq")
"""ledger, entry, lac, length."""
LAC_HEADER = Struct(">qq")
"""ledger, lac."""

PAYLOAD_AT = HEADER.size + 4
"""Offset of the payload in a packet with a CRC32C."""

_U32 = Struct(">I")
_U64 = Struct(">Q")


class Packet(NamedTuple):
    """An entry packet with a valid digest."""

    entry: EntryId
    lac: EntryId
    length: int
    """Payload bytes of all entries up to and including this one."""
    payload: bytes


def master_key(password: bytes) -> bytes:
    """Derive the key, 20 bytes, that a writer shows to bookies so that no other client adds to its ledger or fences
    it."""
    return sha1(b"ledger" + password).digest()


# docs/protocol.md L14
class EntryDigest:
    """Makes and checks the packets of ledgers with one digest type and password."""

    __slots__ = ("_digest", "size")

    def __init__(self, kind: DigestType, password: bytes = b"") -> None:
        self._digest, self.size = _digest_of(kind, password)

    def packet(self, ledger: LedgerId, entry: EntryId, lac: EntryId, length: int, payload: bytes) -> bytes:
        """Make the entry packet that bookies store. `length` includes this payload."""
        header = HEADER.pack(ledger, entry, lac, length)
        return b"".join((header, self._digest(header, payload), payload))

    def open(self, ledger: LedgerId, entry: EntryId | None, packet: bytes) -> Packet:
        """Check a packet that was read for `entry` (None: any entry, as in a read of the last one). Raises
        Corrupted."""
        start = HEADER.size + self.size
        if len(packet) < start:
            raise Corrupted(
                f"ledger={ledger} entry={entry}: expected {start} bytes or more in a packet, got {len(packet)} bytes"
            )
        payload = packet[start:]
        if self._digest(packet[: HEADER.size], payload) != packet[HEADER.size : start]:
            raise Corrupted(f"ledger={ledger} entry={entry}: the packet has a wrong digest")
        of_ledger, of_entry, lac, length = HEADER.unpack_from(packet)
        if of_ledger != ledger or (of_entry != entry if entry is not None else of_entry < 0):
            raise Corrupted(f"ledger={ledger} entry={entry}: got the packet of ledger={of_ledger} entry={of_entry}")
        return Packet(EntryId(of_entry), EntryId(lac), length, payload)

    def open_those(
        self, ledger: LedgerId, packets: Iterable[bytes], wanted: Collection[EntryId]
    ) -> dict[EntryId, tuple[Packet, bytes]]:
        """Check packets that name their entries themselves, and return each with its stored form. Damaged packets, and
        packets of entries that are not `wanted`, are left out."""
        found: dict[EntryId, tuple[Packet, bytes]] = {}
        for each in packets:
            with suppress(Corrupted):
                packet = self.open(ledger, None, each)
                if packet.entry in wanted:
                    found[packet.entry] = packet, each
        return found

    def lac_packet(self, ledger: LedgerId, lac: EntryId) -> bytes:
        """Make the body of an explicit last-add-confirmed."""
        header = LAC_HEADER.pack(ledger, lac)
        return header + self._digest(header, b"")

    def open_lac(self, ledger: LedgerId, packet: bytes) -> EntryId:
        """Check the body of an explicit last-add-confirmed. Raises Corrupted."""
        if len(packet) != LAC_HEADER.size + self.size:
            raise Corrupted(
                f"ledger={ledger}: expected a LAC packet of {LAC_HEADER.size + self.size} bytes, got {len(packet)}"
            )
        header = packet[: LAC_HEADER.size]
        if self._digest(header, b"") != packet[LAC_HEADER.size :]:
            raise Corrupted(f"ledger={ledger}: the LAC packet has a wrong digest")
        of_ledger, lac = LAC_HEADER.unpack(header)
        if of_ledger != ledger:
            raise Corrupted(f"ledger={ledger}: got the LAC packet of ledger={of_ledger}")
        return EntryId(lac)


def _digest_of(kind: DigestType, password: bytes) -> tuple[Callable[[bytes, bytes], bytes], int]:
    if kind is DigestType.CRC32C:
        return lambda header, payload: _U32.pack(crc32c(payload, crc32c(header))), 4
    if kind is DigestType.CRC32:
        return lambda header, payload: _U64.pack(zlib.crc32(payload, zlib.crc32(header))), 8
    if kind is DigestType.HMAC:
        key = sha1(b"mac" + password).digest()
        return lambda header, payload: hmac.digest(key, header + payload, "sha1"), 20
    return lambda _header, _payload: b"", 0
