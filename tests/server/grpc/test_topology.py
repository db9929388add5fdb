"""The topology that clients receive, and its changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvstore.ring import Ring, plan, steps
from kvstore.server.grpc.topology import Topologies
from kvstore.types import PartitionId, ServerId
from tests.client.model import View
from tests.client.serving import ModelClock
from tests.ring.rings import grown, ring_of
from tests.waiting import PATIENCE_S


class Backend:
    def __init__(self, ring: Ring) -> None:
        self.topology = View(ring, {PartitionId("p1"): (ServerId("n1"), 1)}, {})
        self.changed: Callable[[], None] = lambda: None

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.changed = changed
        return lambda: None

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        return 0, 0

    def have(self, **changes: Any) -> None:
        self.topology = replace(self.topology, **changes)
        self.changed()


async def test_waiting_client_gets_routing_changes_only() -> None:
    ring = grown(3, 1)
    backend = Backend(ring)
    topologies = Topologies(backend, ModelClock(), "n1", "c1")  # type: ignore[arg-type]
    known = (await topologies.wait(0, 0)).known
    waiting = asyncio.ensure_future(topologies.wait(known, 10_000))
    await asyncio.sleep(0)
    id = min(ring.moves)
    for quiet in (steps.begin(ring, id, 1), steps.set_pace(ring, replace(ring.pace, paused=True))):
        backend.have(ring=quiet)
        assert topologies.message().known == known
    flipped = steps.flip(steps.begin(ring, id, 1), id)
    backend.have(ring=flipped)
    told = await asyncio.wait_for(waiting, PATIENCE_S)
    assert (told.known > known, told.ring_version) == (True, flipped.version)


async def test_client_gets_changes_of_leaders_and_replicas() -> None:
    backend = Backend(ring_of(3))
    topologies = Topologies(backend, ModelClock(), "n1", "c1")  # type: ignore[arg-type]
    known = topologies.message().known
    backend.have(leaders={PartitionId("p1"): (ServerId("n2"), 2)})
    assert topologies.message().known == known + 1
    backend.have(ring=plan.leave(ring_of(3), [PartitionId("p1")]))
    assert topologies.message().known == known + 2
