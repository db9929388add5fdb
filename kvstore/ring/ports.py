"""The cluster's ring as code that moves ranges uses it: the newest version known here, and a way to change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.ring.ring import Ring


class Rings(Protocol):
    """The ring's znode, as one server knows it."""

    @property
    def ring(self) -> Ring:
        """The newest version that this server has read or written."""
        ...

    async def change(self, step: Callable[[Ring], Ring], *, soon: bool = False, plans: bool = False) -> Ring:
        """Store `step(ring)` by compare-and-set, recomputed if another writer came first, and return it. With `soon`,
        the first attempt uses the ring known here, without reading it. With `plans`, the change can be made in parts or
        not at all, and is refused (Overloaded) if the ring would be too large to carry out what is planned.

        `step` is one of `kvstore.ring.steps` or `.plan`, or raises to give up; its errors pass through. Raises
        MetadataUnavailable if nothing was written, MetadataUnknown if the outcome is unknown, VersionConflict if other
        writers always came first.
        """
        ...

    def hint(self, routed: int) -> None:
        """Handle another server's report that keys are routed by a ring of this version: read the ring if that version
        is later than the one known here. Nothing else that other servers say about the ring is trusted
        (docs/protocol.md H9)."""
        ...

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each new version. Return a function that ends that."""
        ...
