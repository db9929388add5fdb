"""Ledgers for tests, in one line each."""

from __future__ import annotations

from kvstore.proto.digest import EntryDigest, Packet
from kvstore.types import BookieId, DigestType, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.writer import Command, Event, LedgerWriter

LEDGER = LedgerId(7)
B1, B2, B3, B4, B5, B6 = (BookieId(f"b{i}-x") for i in range(1, 7))
DIGEST = EntryDigest(DigestType.CRC32C)


def e(number: int) -> EntryId:
    return EntryId(number)


def ledger(*ensemble: BookieId, write: int = 0, ack: int = 2) -> LedgerMetadata:
    """Return an open ledger of one fragment, by default on B1, B2 and B3."""
    bookies = ensemble or (B1, B2, B3)
    quorum = Quorum(len(bookies), write or len(bookies), ack)
    return LedgerMetadata(LEDGER, quorum, (Fragment(e(0), bookies),))


def pack(entry: EntryId, lac: EntryId, length: int, payload: bytes) -> bytes:
    return DIGEST.packet(LEDGER, entry, lac, length, payload)


def opened(packet: bytes) -> Packet:
    return DIGEST.open(LEDGER, None, packet)


class CheckedWriter(LedgerWriter):
    """A writer that checks its invariants after each event."""

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        self.check()
        return commands
