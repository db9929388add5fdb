"""How whoever moves ranges sees the ring of the cluster: its newest version known here, and a way to change it."""

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
        """Store `step(ring)` by compare-and-set, computed anew whenever another writer came first, and return it.
        `soon`: try first with the ring as it is known here, without reading it. `plans`: it can be made in parts or not
        at all, and is refused (Overloaded) where the ring would leave no room for carrying out what is planned.

        `step` is one of `kvstore.ring.steps` or `.plan`, or raises to give up; what it raises passes through. Raises
        MetadataUnavailable if nothing was written, MetadataUnknown if that could not be learnt, VersionConflict if
        others were always first.
        """
        ...

    def hint(self, routed: int) -> None:
        """Another server says that keys are routed by a ring of this version: it is read, if it is later than the one
        known here. Nothing else is believed of what others say about the ring (docs/protocol.md H9)."""
        ...

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each new version; returns what ends that."""
        ...
