"""Whether the digest of what a writer sends is right, as far as a bookie can tell (docs/protocol.md, B21).

CRC32C needs neither a key nor to be told of: such a packet proves itself. Whatever does not is of a ledger with another
digest, or damaged; the ledger's metadata says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from struct import Struct
from typing import Any

from crc32c import crc32c

from kvstore.bookie.admission import Admission
from kvstore.bookie.sparing import SparingLog
from kvstore.bookie.statistics import Statistics
from kvstore.errors import Corrupted
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import HEADER, LAC_HEADER, EntryDigest, master_key
from kvstore.types import DigestType, LedgerMetadata

log = logging.getLogger(__name__)

KNOWN_MAX = 4096
"""Ledgers with another digest of which it is remembered; of others it is asked again."""
_CRC = Struct(">I")
_HEAD, _BODY = HEADER.size, HEADER.size + _CRC.size
HEADER_AND_CRC = Struct(f"{HEADER.format}I")
"""Ledger, entry, lac, length, and what is the digest if that is a CRC32C."""
_LAC = LAC_HEADER.size
Check = Callable[[EntryDigest], object]
"""Raises Corrupted."""


def proves_itself(packet: bytes) -> bool:
    """Whether an entry packet has CRC32C as its digest, and that is right."""
    return len(packet) >= _BODY and is_crc(packet, _CRC.unpack_from(packet, _HEAD)[0])


def is_crc(packet: bytes, crc: int) -> bool:
    """Whether this is the CRC32C of an entry packet that has one."""
    found: int = crc32c(packet[_BODY:], crc32c(packet[:_HEAD]))
    return found == crc


def lac_proves_itself(packet: bytes) -> bool:
    """The same of an explicit last-add-confirmed."""
    return len(packet) == _LAC + _CRC.size and crc32c(packet[:_LAC]) == _CRC.unpack_from(packet, _LAC)[0]


def digest_of(metadata: LedgerMetadata, key: bytes) -> EntryDigest | None:
    """The digest that checks the ledger's packets here. None: they are not checked, because there is no digest, or it
    needs a password that the metadata do not have."""
    if metadata.digest is DigestType.DUMMY:
        return None
    if metadata.digest is DigestType.HMAC and master_key(metadata.password) != key:
        return None
    return EntryDigest(metadata.digest, metadata.password)


class Digests:
    """Checks packets without a valid CRC32C against the digest type in their ledger's metadata."""

    def __init__(self, admission: Admission, statistics: Statistics) -> None:
        self._admission = admission
        self._statistics = statistics
        self._log = SparingLog(log)
        self._known: dict[tuple[int, bytes], EntryDigest | None] = {}

    def knows(self, ledger: int, key: bytes) -> bool:
        """Whether the metadata need not be asked again."""
        return (ledger, key) in self._known

    def judge(self, ledger: int, key: bytes, size: int, check: Check, done: Callable[[Status], Any]) -> None:
        """Call `done` with OK if the digest is right or cannot be checked here; otherwise with why it is refused:
        BAD_REQUEST if it is wrong, UNKNOWN_LEDGER_STATE if nobody says what it should be."""
        if (ledger, key) in self._known:
            done(self._verdict(self._known[ledger, key], check))
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
                digest = self._known[ledger, key] = digest_of(answer, key)
                done(self._verdict(digest, check))

        if not self._admission.ask_metadata(ledger, size, answered):
            self._statistics.refused_overload += 1
            done(Status.TOO_MANY_REQUESTS)

    def _verdict(self, digest: EntryDigest | None, check: Check) -> Status:
        try:
            if digest is not None:
                check(digest)
        except Corrupted as error:
            self._statistics.refused_digest += 1
            self._log.say(logging.WARNING, "refused, it was damaged on its way here: %s", error)
            return Status.BAD_REQUEST
        return Status.OK
