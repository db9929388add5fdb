"""Check the disks of all bookies: every entry must have all its copies, and the copies must be equal
(docs/protocol.md L3, L11, L15)."""

from __future__ import annotations

from typing import Any

from kvstore.errors import Corrupted
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest
from kvstore.types import BookieId, EntryId, LedgerMetadata, LedgerState, machine_of
from kvstore.wal.placement import machine_of_bookie
from tests.sim.cluster import Cluster


def scrub(cluster: Cluster) -> None:
    """Report a broken rule for each entry of a listed ledger that lacks copies or has two payloads. All bookies must
    be up. An entry may lack the copy on the machine with wiped or damaged disks until the copy is made again."""
    bookies = [node.served.bookie for node in cluster.nodes if node.served]
    storages = {bookie.id: bookie.storage for bookie in bookies if bookie is not None}
    for partition, lines in sorted(cluster.rules.lists.items()):
        for line in lines:
            metadata = cluster.rules.ledgers[line.id]
            closed = metadata.state is LedgerState.CLOSED
            last = metadata.last_entry if closed else cluster.logbook.last_confirmed(line.id)
            for entry in map(EntryId, range(last + 1)):
                _check_entry(cluster, metadata, entry, storages, f"entry {entry} of ledger {line.id} of {partition}")


def _check_entry(
    cluster: Cluster, metadata: LedgerMetadata, entry: EntryId, storages: dict[BookieId, Any], what: str
) -> None:
    copies = _copies(metadata, entry, storages)
    lossy = None if cluster.lossy is None else machine_of(cluster.lossy.name)
    lost = sum(machine_of_bookie(bookie) == lossy for bookie in metadata.write_set(entry))
    held = {bookie: packet for bookie, packet in copies.items() if bookie in metadata.write_set(entry)}
    if len(held) < metadata.quorum.ack - lost:
        cluster.broken(f"L11 {what} is only on {sorted(copies)} of {metadata}")
    if len(set(copies.values())) > 1:
        cluster.broken(f"L15 {what} has several payloads on {sorted(copies)}")
    sent = cluster.logbook.appended.get(metadata.ledger, {}).get(entry)
    if sent is not None and sent not in (*copies.values(), sent if not copies else b""):
        cluster.broken(f"L15 {what} is not what its writer appended")


def _copies(metadata: LedgerMetadata, entry: EntryId, storages: dict[BookieId, Any]) -> dict[BookieId, bytes]:
    """Return the payloads of the entry by bookie, for every bookie that has a good copy."""
    digest = EntryDigest(metadata.digest, metadata.password)
    found: dict[BookieId, bytes] = {}
    for bookie, storage in sorted(storages.items()):

        def done(status: Status, _entry: int, packet: bytes | None, _lac: int, bookie: BookieId = bookie) -> None:
            if status == Status.OK and packet is not None:
                try:
                    found[bookie] = digest.open(metadata.ledger, entry, packet).payload
                except Corrupted:
                    return

        storage.read(metadata.ledger, entry, done=done)
    return found
