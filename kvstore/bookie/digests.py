"""Verifies the digests of packets from writers, as far as a bookie can (docs/protocol.md, B21).

Verifying a CRC32C needs neither a key nor the metadata: such a packet proves itself. A packet without a valid CRC32C
either belongs to a ledger with another digest type or is damaged. The ledger's metadata decides which.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from struct import Struct
from typing import Any

from crc32c import crc32c

from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.statistics import Statistics
from kvstore.errors import Corrupted
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import HEADER, LAC_HEADER, EntryDigest, master_key
from kvstore.types import DigestType, LedgerMetadata

log = logging.getLogger(__name__)

KNOWN_MAX = 4096
"""Maximum number of ledgers with another digest type to remember. The metadata of further ledgers is read again."""
DIGEST_MAX = 20
"""Bytes of the largest digest, an HMAC."""
_CRC = Struct(">I")
_CRC32 = Struct(">Q")
_CRC32_AT = HEADER.size + _CRC32.size
_LAC_BYTES = slice(16, 24)
"""Position of the last-add-confirmed in a packet's header."""
_HEAD, _BODY = HEADER.size, HEADER.size + _CRC.size
HEADER_AND_CRC = Struct(f"{HEADER.format}I")
"""Ledger, entry, LAC, length, and the digest if that is a CRC32C."""
_LAC = LAC_HEADER.size
Check = Callable[[EntryDigest], object]
"""Raises Corrupted."""


def proves_itself(packet: bytes) -> bool:
    """Return True if an entry packet has a valid CRC32C."""
    return len(packet) >= _BODY and is_crc(packet, _CRC.unpack_from(packet, _HEAD)[0])


def is_crc(packet: bytes, crc: int) -> bool:
    """Return True if `crc` is the CRC32C of the entry packet."""
    found: int = crc32c(packet[_BODY:], crc32c(packet[:_HEAD]))
    return found == crc


def lac_proves_itself(packet: bytes) -> bool:
    """Return True if an explicit LAC packet has a valid CRC32C."""
    return len(packet) == _LAC + _CRC.size and crc32c(packet[:_LAC]) == _CRC.unpack_from(packet, _LAC)[0]


def digest_of(metadata: LedgerMetadata, key: bytes) -> EntryDigest | None:
    """Return the digest that verifies the ledger's packets. Return None if they cannot be verified here, because the
    ledger has no digest or its digest needs a password that is not in the metadata."""
    if metadata.digest is DigestType.DUMMY:
        return None
    if metadata.digest is DigestType.HMAC and master_key(metadata.password) != key:
        return None
    return EntryDigest(metadata.digest, metadata.password)


# docs/protocol.md L15
def is_same_entry(held: bytes, packet: bytes, digest_bytes: int = DIGEST_MAX) -> bool:
    """Return True if two packets have the same ledger, entry, length and payload.

    The last-add-confirmed may differ, and with it the digest, because a recovery writes entries back with its own
    last-add-confirmed (R4). `digest_bytes` is the size of a digest that cannot be verified here; by default, that of
    the largest digest.
    """
    if held == packet:
        return True
    if len(held) != len(packet) or held[:16] != packet[:16] or held[24 : HEADER.size] != packet[24 : HEADER.size]:
        return False
    start = _payload_at(held)
    if start != _payload_at(packet):
        return False
    if not start:
        if held[_LAC_BYTES] == packet[_LAC_BYTES]:
            return False  # one header and one payload have one digest
        start = HEADER.size + digest_bytes
    return held[start:] == packet[start:]


def _payload_at(packet: bytes) -> int:
    """Return the offset of the payload if the packet's own checksum proves it, otherwise 0."""
    if proves_itself(packet):
        return _BODY
    if len(packet) < _CRC32_AT:
        return 0
    found = zlib.crc32(packet[_CRC32_AT:], zlib.crc32(packet[: HEADER.size]))
    return _CRC32_AT if _CRC32.unpack_from(packet, HEADER.size)[0] == found else 0


class Digests:
    """Verifies packets without a valid CRC32C, with the digest type that their ledger's metadata names."""

    def __init__(self, admission: LedgerAdmission, statistics: Statistics) -> None:
        self._admission = admission
        self._statistics = statistics
        self._log = RateLimitedLog(log)
        self._known: dict[tuple[int, bytes], tuple[EntryDigest | None, int]] = {}
        """For each ledger and key, the digest that verifies its packets (None if they cannot be verified), and the size
        of the digest in bytes."""

    def knows(self, ledger: int, key: bytes) -> bool:
        """Return True if a packet of this ledger and key can be judged without reading the metadata."""
        return (ledger, key) in self._known

    def size_of(self, ledger: int, key: bytes) -> int:
        """Return the size in bytes of the digest in the ledger's packets, or the largest possible size if it is
        unknown."""
        return self._known.get((ledger, key), (None, DIGEST_MAX))[1]

    def judge(self, ledger: int, key: bytes, size: int, check: Check, done: Callable[[Status], Any]) -> None:
        """Verify a packet's digest with `check`. `done` gets OK if the digest is valid or cannot be verified here, and
        BAD_REQUEST if it is wrong. It gets FENCED if the ledger does not exist, UNKNOWN_LEDGER_STATE if the metadata
        cannot be read, and TOO_MANY_REQUESTS if too many requests wait for metadata. `size` is the number of bytes kept
        in memory until then."""
        if (ledger, key) in self._known:
            done(self._verdict(self._known[ledger, key][0], check))
            return

        def answered(answer: LedgerMetadata | Exception | None) -> None:
            if answer is None:
                done(Status.FENCED)  # deleted: it has no writer
            elif isinstance(answer, Exception):
                self._statistics.refused_unknown += 1
                done(Status.UNKNOWN_LEDGER_STATE)
            else:
                if len(self._known) >= KNOWN_MAX:
                    del self._known[next(iter(self._known))]
                found = self._known[ledger, key] = digest_of(answer, key), EntryDigest(answer.digest).size
                done(self._verdict(found[0], check))

        if not self._admission.ask_metadata(ledger, size, answered):
            self._statistics.refused_overload += 1
            done(Status.TOO_MANY_REQUESTS)

    def _verdict(self, digest: EntryDigest | None, check: Check) -> Status:
        try:
            if digest is not None:
                check(digest)
        except Corrupted as error:
            self._statistics.refused_digest += 1
            self._log.emit(logging.WARNING, "packet refused, it was damaged in transit error=%s", error)
            return Status.BAD_REQUEST
        return Status.OK
