"""Stories of nodes that hang in part: other clients write again in time, although the node's process lives."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.sim.nodes import Node
from tests.sim.stories.scenarios import P, Stage
from tests.sim.stories.stories_of_reach import longest_gap
from tests.sim.test_handover import epoch, led_by_preferred, note_leaders

GAP_S_MAX = 10.0
"""Maximum gap in seconds between acknowledged writes after a fault, with two healthy nodes (docs/protocol.md, P45)."""


async def leader_whose_loop_is_blocked(stage: Stage) -> None:
    """The leader's event loop is blocked. The session would live as long as the process."""
    old = stage.leader
    await stage.put(old)
    old.block()
    await _another_writes_in_time(stage, old)
    old.resume()
    await stage.put_until_done(old)


async def leader_whose_disk_hangs(stage: Stage) -> None:
    """The leader's disk completes no writes. The other two disks are an ack quorum, so the leader itself could
    continue. Services that depend on its disk alone, such as its bookie registration, must not."""
    old = stage.leader
    await stage.put(old)
    old.sim.hang("")
    assert stage.cluster.metadata.tree.is_open(_session_of(old))
    await stage.until(lambda: not _session_of(old), GAP_S_MAX)
    await _another_writes_in_time(stage, old)
    old.disk.thaw()
    await stage.until(lambda: bool(_session_of(old)), 60.0)
    await stage.put_until_done(old)


async def directory_of_two_that_hangs(stage: Stage) -> None:
    """One directory of the leader's bookie hangs. The bookie continues with the other directory and keeps its
    session."""
    node = stage.leader
    session = _session_of(node)
    node.sim.hang(node.journal_dirs[1])
    bookie = node.served.bookie if node.served is not None else None
    assert bookie is not None
    await stage.until(lambda: bookie.statistics()["directories_failed"] == 1, GAP_S_MAX)
    await _another_writes_in_time(stage, node)
    assert _session_of(node) == session
    node.disk.thaw()


async def leader_whose_engine_is_wedged(stage: Stage) -> None:
    """The leader's session, links and disk are healthy, but it acknowledges no write. Another replica leads in time.
    Leadership comes back only after the engine works again."""
    first = await led_by_preferred(stage)
    before, asked = epoch(stage), stage.others(first)[0]
    first.engines.are_wedged = True
    assert await longest_gap(stage, asked, 40.0) < GAP_S_MAX
    assert stage.leader is not first
    assert epoch(stage) == before + 1, "it neither gets leadership back nor takes it"
    first.engines.are_wedged = False
    await led_by_preferred(stage)


async def candidate_whose_engine_is_wedged(stage: Stage) -> None:
    """The leader dies, and the engine of the next candidate takes no rows: the replica does not run for election."""
    first = await led_by_preferred(stage)
    await stage.put_until_done(first)
    await asyncio.sleep(2.0)  # all have published the same position
    replicas = stage.cluster.ring.partitions[stage.cluster.partitions[0]].replicas
    second, third = (next(node for node in stage.cluster.nodes if node.id == each) for each in replicas[1:])
    second.engines.are_wedged = True
    seen = note_leaders(stage)
    first.crash()
    assert await longest_gap(stage, third, 8.0) < GAP_S_MAX
    assert second.id not in seen
    second.engines.are_wedged = False


async def leader_that_reaches_no_other_bookie(stage: Stage) -> None:
    """The leader's entries find no ack quorum, although two other bookies are one. All nodes reach the leader. It
    abandons its log and does not at once claim the leadership that it could not keep."""
    first = await led_by_preferred(stage)
    asked, elections = stage.others(first)[0], elections_of(first)
    for each in stage.others(first):
        hide_bookie(stage, each, first)
    assert await longest_gap(stage, asked, 40.0) < GAP_S_MAX
    assert stage.leader is not first
    assert elections_of(first) == elections


def elections_of(node: Node) -> int:
    """Return the number of elections that the node's replica has won."""
    replica = node.replica(P)
    assert replica is not None
    found: int = replica.statistics()["elections"]
    return found


def hide_bookie(stage: Stage, node: Node, caller: Node) -> None:
    """Stop the caller from connecting to the node's bookie."""
    stage.cluster.network.hide(node.config.bookie, [caller.name], refuses=False)


def _session_of(node: Node) -> int:
    return node.store.session if node.store is not None else 0


async def _another_writes_in_time(stage: Stage, node: Node) -> None:
    other = stage.others(node)[0]
    with suppress(TimeoutError):
        async with asyncio.timeout(GAP_S_MAX):
            await stage.put_until_done(other)
            return
    raise AssertionError(f"{other.name} accepts no write within {GAP_S_MAX} s")
