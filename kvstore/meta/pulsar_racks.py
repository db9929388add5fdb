"""Writes the racks of bookies for Apache Pulsar, which reads them from the node /bookies of its own metadata store:

    {"GROUP": {"BOOKIE ID": {"rack": "/RACK", "hostname": "HOST:PORT"}}}

Pulsar finds a bookie's entry by its id and applies the rack to every bookie of the host. A bookie without an entry is
in Pulsar's default rack.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import msgspec

from kvstore.errors import NodeExists, NoSuchNode, VersionConflict
from kvstore.meta.codec import decode_plain
from kvstore.meta.registration import RegisteredBookies
from kvstore.meta.store import MetadataStore
from kvstore.meta.update import update
from kvstore.types import BookieId

PATH = "/bookies"
GROUP = "default"
"""The group of new entries. Pulsar's isolation policies choose bookies by group."""
_ABSENT = -1

Document = dict[str, dict[str, dict[str, object]]]
"""Entries by group. An entry may have fields that this build does not know."""


def with_zones(found: Document, bookies: RegisteredBookies) -> Document:
    """Return the document with each registered bookie's zone as its rack, for the bookies that have a zone. Pure.

    Drops the entries of ids that are no longer registered at the address of such a bookie, because a bookie whose disk
    was replaced has a new id. All other entries stay as they are.
    """
    zones = {bookie: zone for bookie, zone in bookies.zones.items() if zone and bookie in bookies.all}
    taken = {bookies.all[bookie] for bookie in zones}
    wanted: Document = {group: dict(entries) for group, entries in found.items()}
    for entries in wanted.values():
        for bookie, entry in list(entries.items()):
            if BookieId(bookie) not in bookies.all and entry.get("hostname") in taken:
                del entries[bookie]
    for bookie, zone in sorted(zones.items()):
        group = next((group for group, entries in wanted.items() if bookie in entries), GROUP)
        place: dict[str, object] = {"rack": f"/{zone.strip('/')}", "hostname": bookies.all[bookie]}
        entries = wanted.setdefault(group, {})
        entries[bookie] = entries.get(bookie, {}) | place
    return {group: entries for group, entries in wanted.items() if entries}


def shared_hosts(bookies: RegisteredBookies) -> dict[str, list[BookieId]]:
    """Return each host whose bookies are in different zones, with these bookies. Pulsar can apply only one rack to a
    host."""
    by_host: dict[str, list[BookieId]] = {}
    for bookie, address in sorted(bookies.all.items()):
        by_host.setdefault(address.rpartition(":")[0], []).append(bookie)
    return {
        host: there for host, there in by_host.items() if len({bookies.zones.get(bookie, "") for bookie in there}) > 1
    }


class PulsarRacks:
    """Reads and writes the node of racks. `store` is Pulsar's metadata store, with Pulsar's chroot. Calls raise
    MetadataUnavailable or MetadataUnknown in addition to the errors that they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def read(self) -> Document:
        """Return the document; empty if Pulsar has none. Raises UndecodableNode."""
        return (await self._read())[0]

    async def write_zones(self, bookies: RegisteredBookies) -> Document:
        """Store the bookies' zones as racks, and return the new document. Raises UndecodableNode, VersionConflict."""
        document, _ = await update(self._read, self._write, lambda found: with_zones(found, bookies))
        return document

    async def _read(self) -> tuple[Document, int]:
        await self._store.sync(PATH)
        try:
            data, stat = await self._store.get(PATH)
        except NoSuchNode:
            return {}, _ABSENT
        return (decode_plain(Document, data, what=f"{PATH} of Pulsar") if data else {}), stat.version

    async def _write(self, document: Document, version: int) -> int:
        data = msgspec.json.encode(document)
        if version != _ABSENT:
            return await self._store.set(PATH, data, version)
        with suppress(NodeExists):
            await self._store.create(PATH, data)
            return 0
        raise VersionConflict(f"{PATH} was created meanwhile")


def racks_of(document: Document) -> Mapping[str, str]:
    """Return the rack of each bookie id in the document."""
    return {bookie: str(entry.get("rack", "")) for entries in document.values() for bookie, entry in entries.items()}
