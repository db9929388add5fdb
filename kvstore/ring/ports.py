"""The interface through which code that moves ranges reads and changes the cluster's ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.ring.ring import Ring


class Rings(Protocol):
    """One server's view of the ring's znode."""

    @property
    def ring(self) -> Ring:
        """The newest version that this server has read or written."""
        ...

    async def change(self, step: Callable[[Ring], Ring], *, soon: bool = False, plans: bool = False) -> Ring:
        """Store `step(ring)` by compare-and-set and return it. If another writer was first, `step` is called again with
        the newer ring. With `soon`, the first attempt uses the ring that this server knows, without reading the znode.
        With `plans`, the change is one that may also be made in parts or not at all; it is refused (Overloaded) if the
        ring would become too large to carry out the planned moves.

        `step` is a function of `kvstore.ring.steps` or `.plan`, or raises an error to abandon the change; its errors
        pass through. Raises MetadataUnavailable if nothing was written, MetadataUnknown if the outcome is unknown, and
        VersionConflict if other writers were first on every attempt.
        """
        ...

    def hint(self, routed: int) -> None:
        """Handle another server's report that it routes keys by a ring of version `routed`. If that version is later
        than the one known here, this server reads the ring. Other servers are trusted with nothing else about the ring
        (docs/protocol.md H9)."""
        ...

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each new version of the ring. Returns a function that ends the
        subscription."""
        ...
