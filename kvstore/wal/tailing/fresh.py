"""Keeps entries of one ledger that the node's own bookie has just stored, until they are confirmed and read. A tail at
the end of the log then does not have to read back entries that its own node has just written. The number of kept
entries is bounded, and other entries are read as usual. Decides only."""

from __future__ import annotations

from kvstore.proto.digest import PAYLOAD_AT
from kvstore.types import DigestType, EntryId

ENTRIES_MAX, BYTES_MAX = 64, 2 << 20
REST_BYTES_MAX = 32 << 10
"""Number of bytes above which entries are not held back for batching. The fixed cost of an entry is then small compared
with its effects, and applying many of them at once would block the event loop."""


class FreshEntries:
    """The kept entries of one ledger, starting at `wanted`. Only packets with a CRC32C are kept, because the bookie has
    verified them (docs/protocol.md, B21)."""

    def __init__(self, digest: DigestType, wanted: EntryId) -> None:
        self._wanted: int = wanted
        self._entries_max = ENTRIES_MAX if digest is DigestType.CRC32C else 0
        self._packets: dict[int, bytes] = {}
        self._bytes = 0
        self.are_many = False
        """True if at least REST_BYTES_MAX bytes are kept."""

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
        """Return the ids and payloads of consecutive kept entries from `first` up to `last`. These entries and all
        earlier ones are then forgotten."""
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
        """Return the payload of the entry, or None if it is not kept. The entry and all earlier ones are then
        forgotten."""
        packet = self._packets.pop(entry, None)
        if packet is None:
            return None
        self._bytes -= len(packet)
        self._wanted = entry + 1
        self.are_many = False
        return packet[PAYLOAD_AT:]

    def forget_before(self, wanted: EntryId) -> None:
        """Forget all entries before `wanted`, because they have been read."""
        self._wanted, self.are_many = wanted, False
        for entry in [entry for entry in self._packets if entry < wanted]:
            self._bytes -= len(self._packets.pop(entry))
