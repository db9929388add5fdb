"""Keeps entries of one ledger that the node's own bookie has just put on its disk, until they are confirmed and read.

So a tail at the end of the log need not have read back what its own node has just written. Bounded: what there is no
room for is read like any other entry. Decides only.
"""

from __future__ import annotations

from kvstore.proto.digest import PAYLOAD_AT
from kvstore.types import DigestType, EntryId

ENTRIES_MAX, BYTES_MAX = 64, 2 << 20


class FreshEntries:
    """From `wanted` on. Only packets that prove themselves are kept, which the bookie has made sure of
    (docs/protocol.md, B21)."""

    def __init__(self, digest: DigestType, wanted: EntryId) -> None:
        self._wanted = wanted
        self._entries_max = ENTRIES_MAX if digest is DigestType.CRC32C else 0
        self._packets: dict[int, bytes] = {}
        self._bytes = 0

    def keep(self, entry: int, packet: bytes) -> None:
        packets = self._packets
        if (
            entry >= self._wanted
            and len(packets) < self._entries_max
            and entry not in packets
            and (size := self._bytes + len(packet)) <= BYTES_MAX
        ):
            packets[entry] = packet
            self._bytes = size

    def __contains__(self, entry: int) -> bool:
        return entry in self._packets

    def take(self, entry: EntryId) -> bytes | None:
        """The payload of the entry, if it is here; it and all before it are not wanted any more."""
        packet = self._packets.pop(entry, None)
        if packet is None:
            return None
        self._bytes -= len(packet)
        self._wanted = EntryId(entry + 1)
        return packet[PAYLOAD_AT:]

    def forget_before(self, wanted: EntryId) -> None:
        """Entries before this one have been read."""
        self._wanted = wanted
        for entry in [entry for entry in self._packets if entry < wanted]:
            self._bytes -= len(self._packets.pop(entry))
