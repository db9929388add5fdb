"""Keeps entries of one ledger that the node's own bookie has just put on its disk, until they are confirmed and read.

So a tail at the end of the log need not have read back what its own node has just written. Bounded: what there is no
room for is read like any other entry. Decides only.
"""

from __future__ import annotations

from kvstore.proto.digest import PAYLOAD_AT
from kvstore.types import DigestType, EntryId

ENTRIES_MAX, BYTES_MAX = 64, 2 << 20
REST_BYTES_MAX = 32 << 10
"""So many bytes are not kept for company: what an entry costs beside its effects is then little, and their effects
together would hold up the event loop."""


class FreshEntries:
    """Fresh entries of one ledger, from `wanted` on. Only packets that prove themselves are kept, which the bookie has
    made sure of (docs/protocol.md, B21)."""

    def __init__(self, digest: DigestType, wanted: EntryId) -> None:
        self._wanted: int = wanted
        self._entries_max = ENTRIES_MAX if digest is DigestType.CRC32C else 0
        self._packets: dict[int, bytes] = {}
        self._bytes = 0
        self.are_many = False
        """REST_BYTES_MAX wait to be taken."""

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
            if size > REST_BYTES_MAX:
                self.are_many = True

    def __contains__(self, entry: int) -> bool:
        return entry in self._packets

    def take_run(self, first: EntryId, last: int) -> list[tuple[EntryId, bytes]]:
        """Ids and payloads of the entries from `first` to `last`, as far as one after another is here; they and all
        before them are not wanted any more."""
        packets, found, size, entry = self._packets, [], 0, first
        while entry <= last and entry in packets:
            packet = packets[entry]
            del packets[entry]
            size += len(packet)
            found.append((entry, packet[PAYLOAD_AT:]))
            entry += 1  # type: ignore[assignment]  # an id, without a call for each
        if found:
            self._bytes -= size
            self._wanted, self.are_many = entry, False
        return found

    def take(self, entry: EntryId) -> bytes | None:
        """The payload of the entry, if it is here; it and all before it are not wanted any more."""
        packet = self._packets.pop(entry, None)
        if packet is None:
            return None
        self._bytes -= len(packet)
        self._wanted = entry + 1
        self.are_many = False
        return packet[PAYLOAD_AT:]

    def forget_before(self, wanted: EntryId) -> None:
        """Entries before this one have been read."""
        self._wanted, self.are_many = wanted, False
        for entry in [entry for entry in self._packets if entry < wanted]:
            self._bytes -= len(self._packets.pop(entry))
