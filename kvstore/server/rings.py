"""The ring's znode as this server sees it and changes it: the Rings of whoever moves ranges and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import MetadataUnknown, Overloaded
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.update import update
from kvstore.ring import Ring, codec
from kvstore.server.membership import Membership

RING_BYTES_MAX = 512 << 10
"""Of the znode. A plan that would make it larger is refused; it can be made in parts."""


class RingStore:
    """A kvstore.ring.Rings over the metadata store. What this server writes it knows at once."""

    def __init__(self, store: MetadataStore, membership: Membership) -> None:
        self._store, self._membership = store, membership
        self._turn = asyncio.Lock()
        """One change at a time: those of this server would only make each other begin anew."""

    @property
    def ring(self) -> Ring:
        return self._membership.topology.ring

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        known = self.ring.version

        def look() -> None:
            nonlocal known
            if self.ring.version != known:
                known = self.ring.version
                changed()

        return self._membership.on_topology(look)

    async def change(self, step: Callable[[Ring], Ring]) -> Ring:
        async with self._turn:
            ring = await change_ring(self._store, step)
        self._membership.learn_ring(ring)
        return ring


async def change_ring(store: MetadataStore, step: Callable[[Ring], Ring]) -> Ring:
    """Store `step(ring)` by compare-and-set and return it; see kvstore.ring.Rings. Raises Overloaded if that would be
    too large for its znode."""
    sent: list[bytes] = []
    """What was written with unknown outcome: if that is what is found, it has succeeded."""
    found = b""

    async def read() -> tuple[Ring, int]:
        nonlocal found
        found, stat = await store.get(paths.RING)
        return codec.decode(found), stat.version

    async def write(ring: Ring, version: int) -> int:
        data = codec.encode(ring)
        if len(data) > RING_BYTES_MAX:
            raise Overloaded(f"the ring would take {len(data)} bytes, at most {RING_BYTES_MAX}: plan less at once")
        try:
            return await store.set(paths.RING, data, version)
        except MetadataUnknown:
            sent.append(data)
            raise

    def decide(ring: Ring) -> Ring:
        if found in sent:
            return ring
        try:
            return step(ring)
        except ValueError as error:
            if sent:
                raise MetadataUnknown(
                    f"the ring may have been changed; a second attempt was refused: {error}"
                ) from None
            raise

    return (await update(read, write, decide))[0]
