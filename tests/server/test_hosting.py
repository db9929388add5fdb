"""What becomes of replicas that the ring assigns here. Most of it is shown in the simulation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.server.hosting import Hosting
from kvstore.types import PartitionId

P1, P2 = PartitionId("p1"), PartitionId("p2")


# docs/protocol.md P35
async def test_a_copy_that_is_found_damaged_while_another_is_set_aside_is_set_aside_too() -> None:
    """It asks no more, so it would have been barred until the process ended."""
    hosting: Any = object.__new__(Hosting)
    aside: list[PartitionId] = []
    hosting._hosted = {each: SimpleNamespace(let_go=lambda: None) for each in (P1, P2)}
    hosting._spoilt, hosting._spoil_engine = {P2}, aside.append

    async def stop(partition: PartitionId, *, keep_pins: bool) -> bool:
        if partition == P2:
            hosting._spoilt.add(P1)
        return True

    hosting._stop = stop
    await hosting._set_spoilt_aside()
    assert (aside, hosting._spoilt) == ([P2, P1], set())
