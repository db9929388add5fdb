"""Stories of nodes that hang in part: the others write again in time, although the node's process lives."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage

GAP_S_MAX = 10.0
"""With two healthy nodes, acknowledged writes continue so soon after a fault (docs/protocol.md, P45)."""


async def leader_whose_loop_is_blocked(stage: Stage) -> None:
    """The event loop of the leader stands still, and its session would live as long as the process."""
    old = stage.leader
    await stage.put(old)
    old.block()
    await _another_writes_in_time(stage, old)
    old.resume()
    await stage.put_until_done(old)


async def leader_whose_disk_hangs(stage: Stage) -> None:
    """The disk of the leader completes no writes. Those of the other two are an ack quorum, so the leader itself could
    go on: what depends on its disk alone, as its registration as a bookie, may not."""
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
    """One directory of the leader's bookie hangs. The bookie goes on with the other, and keeps its session."""
    node = stage.leader
    session = _session_of(node)
    node.sim.hang(node.journal_dirs[1])
    bookie = node.served.bookie if node.served is not None else None
    assert bookie is not None
    await stage.until(lambda: bookie.statistics()["directories_failed"] == 1, GAP_S_MAX)
    await _another_writes_in_time(stage, node)
    assert _session_of(node) == session
    node.disk.thaw()


def _session_of(node: Node) -> int:
    return node.store.session if node.store is not None else 0


async def _another_writes_in_time(stage: Stage, node: Node) -> None:
    other = stage.others(node)[0]
    with suppress(TimeoutError):
        async with asyncio.timeout(GAP_S_MAX):
            await stage.put_until_done(other)
            return
    raise AssertionError(f"{other.name} takes no write within {GAP_S_MAX} s")
