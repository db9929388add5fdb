"""Garbage in one node of the metadata store harms only the subject of that node (docs/protocol.md, P34)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.meta import paths
from kvstore.meta.memory_tree import TreeNode
from kvstore.meta.store import Create, Delete
from kvstore.types import LedgerId, ServerId
from kvstore.wal import list_codec
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.log import PartitionLogs
from tests.sim.judges.operations import Status
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

GARBAGE = b"\xff\x00 not what anybody wrote {"
DEEP = b"BookieMetadataFormatVersion\t2\n" + b"segment {" * 5_000
LONG = b"BookieMetadataFormatVersion\t" + b"3" * 5_000 + b"\n"
REREAD_S = 13.0
"""Seconds: longer than any polling interval of the metadata store in this configuration."""
FOREIGN = LedgerId(77)
"""A ledger without an owner in this cluster, which every survey meets."""
ORPHAN = LedgerId(78)
"""A ledger of this partition that its list does not name."""


def chosen() -> Knobs:
    made = knobs(lead_back_s=100.0, roll_entries=40)
    return replace(made, log=replace(made.log, orphan_age_s=4.0))


def rot(stage: Stage, path: str) -> bytes:
    """Flip bits in a node without notice to any client. Returns the former content."""
    node: TreeNode = stage.cluster.metadata.tree._nodes[path]
    before, node.data = node.data, GARBAGE
    return before


def heal(stage: Stage, path: str, before: bytes) -> None:
    """Restore the content, unless a process has written the node since."""
    node = stage.cluster.metadata.tree._nodes.get(path)
    if node is not None and node.data == GARBAGE:
        node.data = before


async def write(stage: Stage, count: int) -> None:
    for _ in range(count):
        await stage.put_until_done(stage.cluster.nodes[0])


async def serves(stage: Stage, path: str) -> None:
    for node in stage.cluster.nodes:
        assert node.is_running, f"garbage in {path} ended {node.name}"
        done = await stage.put(node, attempts=5)
        assert done.status is Status.OK, f"garbage in {path}: {node.name} accepts no write: {done}"


def victims(stage: Stage) -> list[str]:
    """Return every node with content."""
    tree = stage.cluster.metadata.tree
    return [path for path in tree.paths() if tree._nodes[path].data]


def test_cluster_serves_with_garbage_in_any_one_metadata_node() -> None:
    """This includes the ring's node: all servers continue with the last good ring."""

    async def story(stage: Stage) -> None:
        await write(stage, 150)  # some ledgers
        for path in victims(stage):
            if path not in stage.cluster.metadata.tree._nodes:
                continue
            before = rot(stage, path)
            await write(stage, 45)  # enough for rolls
            await asyncio.sleep(REREAD_S)
            await serves(stage, path)
            heal(stage, path, before)

    play(story, chosen(), 1)


def test_documents_with_fields_of_wrong_types_stop_no_process() -> None:
    """The documents describe a server and a replica that do not exist, with a session that stays alive. Their
    content is JSON: decoded without type checks, it would end every process that ranks, trims or plans by it."""

    async def story(stage: Stage) -> None:
        await write(stage, 5)
        tree = stage.cluster.metadata.tree
        session = tree.open_session()
        tree.observers.remove(stage.cluster.rules)
        stranger = ServerId("n0")  # the first name, so the steward's work would be its own
        member = b'{"format":1,"id":"n0","resp":"h:1","can":"9"}'
        tree.apply(session, [Create(paths.server(stranger), member, True)])
        for number, said in enumerate((b"[]", b"7", b'{"seq":"3","durable_seq":2,"epoch":1,"nonce":"x"}')):
            tree.apply(session, [Create(paths.partition_replica(P, ServerId(f"n{number + 7}")), said, True)])
        tree.observers.append(stage.cluster.rules)
        await asyncio.sleep(REREAD_S)
        leader = stage.leader
        leader.crash()
        await stage.until_led_by_another(leader)
        leader.start()
        await asyncio.sleep(REREAD_S)
        await serves(stage, "documents of other types")

    play(story, chosen(), 1)


def test_garbage_in_all_foreign_nodes_stops_no_survey_and_no_takeover() -> None:
    """All nodes except those that a takeover of this partition needs: its list, its last two ledgers, and the ring."""

    async def story(stage: Stage) -> None:
        tree = stage.cluster.metadata.tree
        await write(stage, 150)
        session = tree.open_session()
        tree.observers.remove(stage.cluster.rules)
        for parent in ("/ledgers/00", "/ledgers/00/0000"):
            if parent not in tree.paths():
                tree.apply(session, [Create(parent, b"")])
        tree.apply(session, [Create(paths.ledger(FOREIGN), GARBAGE), Create(paths.server(ServerId("n9")), GARBAGE)])
        for number, data in enumerate((DEEP, LONG), 10):
            tree.apply(session, [Create(paths.ledger(LedgerId(FOREIGN + number)), data)])
        leader = stage.leader
        of_ours = next(path for path in tree.paths() if paths.ledger_of(path) is not None)
        tree.apply(session, [Create(paths.ledger(ORPHAN), tree.get(of_ours)[0])])
        tree.observers.append(stage.cluster.rules)
        await asyncio.sleep(20.0)
        assert paths.ledger(ORPHAN) not in tree.paths(), "the sweep stopped at an unreadable ledger"
        assert paths.ledger(FOREIGN) in tree.paths(), "an unreadable ledger was deleted"
        leader.crash()
        await stage.until_led_by_another(leader)
        leader.start()
        await asyncio.sleep(5.0)
        await serves(stage, "what is not its own")

    play(story, chosen(), 1)


def test_foreign_znode_in_leader_path_is_removed() -> None:
    async def story(stage: Stage) -> None:
        tree, leader = stage.cluster.metadata.tree, stage.leader
        leader.crash()
        session, place = tree.open_session(), paths.partition_leader(P)
        tree.apply(session, [Delete(place, -1), Create(place, GARBAGE)])
        await stage.until_led_by_another(leader)
        leader.start()

    play(story, chosen(), 1)


# docs/protocol.md P34, G25
def test_partition_is_led_again_after_failed_takeovers_over_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two ledgers are empty, and no process can decode the ledger before them, in which the log ends."""
    fruitless = 0
    open_as_leader = PartitionLogs.open_as_leader

    async def open_in_vain(self: PartitionLogs, *what: Any) -> LeaderLog:
        nonlocal fruitless
        opened = await open_as_leader(self, *what)
        if fruitless:
            fruitless -= 1
            opened.close_for_good()
            raise Unavailable("the leader ends before its first append")
        return opened

    async def story(stage: Stage) -> None:
        nonlocal fruitless
        await write(stage, 50)
        tree, leader, fruitless = stage.cluster.metadata.tree, stage.leader, 2
        leader.crash()
        await stage.until(lambda: fruitless == 0)
        lines = list_codec.decode(tree.get(paths.partition_log(P))[0], what="the list").ledgers
        path = paths.ledger(lines[-3].id)
        before = rot(stage, path)
        await stage.until_led_by_another(leader)
        leader.start()
        await asyncio.sleep(5.0)
        await serves(stage, path)
        heal(stage, path, before)

    monkeypatch.setattr(PartitionLogs, "open_as_leader", open_in_vain)
    play(story, chosen(), 1)
