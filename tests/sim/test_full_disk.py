"""A server with a full disk loses its leaderships but not its process, and leads again when space is free."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

from kvstore.partition.state.commands import Put
from kvstore.types import PartitionId
from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.stories.stories_of_reach import candidate_without_inodes, leader_without_inodes
from tests.sim.test_handover import led_by_preferred
from tests.sim.world.disk import Refusal
from tests.sim.world.engines import SimEngine

pytestmark = pytest.mark.sim


class FullEngine(SimEngine):
    """Behaves like an engine on a disk that may be full."""

    is_full = False

    def is_behind(self) -> bool:
        return self.is_full

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        if self.is_full:
            done(OSError(errno.ENOSPC, "no room"))
        else:
            super().flush(done)


def engine_of(node: Node) -> FullEngine:
    engine = node.engines._engines[P]
    engine.__class__ = FullEngine
    assert isinstance(engine, FullEngine)
    return engine


def test_leader_with_full_disk_hands_over_and_leads_again_after_cleanup() -> None:
    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.cluster.leader(P) is not None)
        first, asked = stage.leader, stage.others(stage.leader)[0]
        preferred = stage.cluster.ring.partitions[P].replicas[0]
        pid = first.sim.process
        engine = engine_of(first)
        engine.is_full = True
        writing = [
            stage.spawn(stage.ask(Put(b"%d" % each, b"queued %d" % each), asked, timeout_s=9.0)) for each in range(20)
        ]
        await stage.until(lambda: P in {each for node in stage.others(first) for each in node.leads}, within_s=8.0)
        assert {(await each).status for each in writing} == {Status.OK}, "waiting operations go to the next leader"
        await asyncio.sleep(5)
        assert stage.leader is not first, "leadership is not handed back to a node that cannot write"
        assert (await stage.put(asked)).status is Status.OK
        engine.is_full = False
        if preferred == first.id:
            await stage.until(lambda: P in first.leads)
        await stage.put_until_done(asked)
        assert first.sim.process is pid, "the process has not ended"

    for seed in range(1, 4):
        play(story, knobs(lead_back_s=1.0), seed)


# docs/protocol.md P41
def test_leader_without_inodes_is_replaced_and_not_handed_leadership_back() -> None:
    for seed in range(1, 4):
        play(leader_without_inodes, knobs(lead_back_s=1.0), seed)


# docs/protocol.md P41
def test_candidate_without_inodes_does_not_run_while_another_can() -> None:
    for seed in range(1, 4):
        play(candidate_without_inodes, knobs(lead_back_s=1.0), seed)


# docs/protocol.md P41
def test_node_with_failing_probe_leads_when_every_probe_fails() -> None:
    """The node's memory has space for a while, and a bad leader is better than none."""

    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        for node in stage.cluster.nodes:
            node.disk.refusals.append(Refusal(errno.ENOSPC, frozenset({"create"}), "write-probe"))
        first.crash()
        await stage.until_led_by_another(first)
        assert (await stage.put_until_done(stage.leader)).status is Status.OK

    for seed in range(1, 4):
        play(story, knobs(lead_back_s=1.0), seed)


def test_node_started_on_full_disk_begins_its_replicas_when_space_is_free() -> None:
    async def story(stage: Stage) -> None:
        await stage.until(lambda: stage.cluster.leader(P) is not None)
        first, asked = stage.leader, stage.others(stage.leader)[0]
        open_engine, is_full = first.engines.open, True

        def open_if_there_is_room(partition: PartitionId) -> SimEngine:
            if is_full:
                raise OSError(errno.ENOSPC, "no room")
            return open_engine(partition)

        first.engines.open = open_if_there_is_room  # type: ignore[method-assign]
        first.crash()
        first.start()
        pid = first.sim.process
        await stage.until(lambda: first.served is not None and first.served.is_open, within_s=20.0)
        assert first.served is not None
        assert first.served.bookie is not None, "its bookie serves"
        await stage.until(lambda: P in {each for node in stage.others(first) for each in node.leads}, within_s=8.0)
        await stage.put_until_done(asked)
        assert not first.served.replicas()
        is_full = False
        await stage.until(lambda: bool(first.served and first.served.replicas()), within_s=20.0)
        assert first.sim.process is pid, "the process has not ended"

    for seed in range(1, 3):
        play(story, knobs(lead_back_s=1.0), seed)
