"""A rebuilt replica does not report keys as absent that the other replicas have had for a long time."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.partition.state.commands import Level
from kvstore.partition.state.engine import EngineBatch
from kvstore.types import PartitionId
from tests.sim.judges.operations import Status
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.world.engines import SimEngine

pytestmark = pytest.mark.sim

APPLIED_FIRST = 3


class SlowEngine(SimEngine):
    """An engine that takes a few entries, then nothing until it is released."""

    is_let = False
    writes = 0

    def is_behind(self) -> bool:
        return not self.is_let and self.writes >= APPLIED_FIRST

    def write(self, batch: EngineBatch) -> None:
        self.writes += 1
        super().write(batch)


# docs/protocol.md P27
def test_rebuilt_replica_answers_stale_reads_once_it_has_caught_up() -> None:
    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.cluster.leader(P) is not None)
        leader = stage.leader
        for key in (b"a", b"b", b"c", b"d") * 8:
            assert (await stage.put(leader, key)).status is Status.OK
        written = await stage.put(leader)
        anew = stage.others(leader)[0]
        await asyncio.sleep(3)  # until all have published their positions
        anew.crash()
        anew.engines.wipe()
        engine = SlowEngine(0.05)
        engines = {P: engine}
        anew.engines.open = lambda partition: engines[PartitionId(partition)]  # type: ignore[method-assign]
        anew.start()
        await stage.until(lambda: engine.writes >= APPLIED_FIRST)
        for level in (Level.STALE, Level.SESSION):
            assert (await stage.get(anew, level=level)).status is not Status.OK, "it does not know the value"
        engine.is_let = True
        await asyncio.sleep(3)
        for level in (Level.STALE, Level.SESSION):
            read = await stage.get(anew, level=level)
            assert read.status is Status.OK
            assert read.result.value == written.op.value

    for seed in range(1, 3):
        play(story, knobs(lead_back_s=100.0), seed)
