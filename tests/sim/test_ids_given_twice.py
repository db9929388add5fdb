"""A metadata store restored from an older copy assigns ledger ids again: whole clusters (docs/protocol.md, B36,
G27)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from kvstore.bookie.storage import BookieStorage
from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.meta.history.high_water import HighWater
from kvstore.meta.history.seen import SeenVersions
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.memory_tree import TreeNode
from kvstore.partition.election.peer_replicas import PeerReplicas
from kvstore.proto.digest import PAYLOAD_AT
from kvstore.types import LedgerId
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.new_ids import NewLedgerIds
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.world.metadata import SimMetadata

pytestmark = pytest.mark.sim

KNOBS = knobs(roll_entries=4)
LISTED = paths.partition_log(P)

Nodes = dict[str, TreeNode]


def is_of_logs(path: str) -> bool:
    """Return True if an older copy differs in this node: ledgers, their counter, and the partition's list."""
    return path in (LISTED, paths.IDGEN) or paths.ledger_of(path) is not None


def copied(metadata: SimMetadata) -> Nodes:
    return {path: node for path, node in metadata.tree._nodes.items() if is_of_logs(path)}


def restore(metadata: SimMetadata, copy: Nodes) -> None:
    """Give the ensemble these nodes, as if it had never had others, without notifying any client."""
    nodes = metadata.tree._nodes
    touched: dict[str, TreeNode | None] = {path: copy.get(path) for path in copied(metadata).keys() | copy.keys()}
    for path, node in touched.items():
        above = nodes[paths.parent(path)] = nodes[paths.parent(path)].copy()
        name = path.rpartition("/")[2]
        if node is None:
            nodes.pop(path, None)
            above.children.discard(name)
        else:
            nodes[path] = node
            above.children.add(name)
    parents = {paths.parent(path) for path in touched}
    metadata.tree.on_commit({path: nodes.get(path) for path in parents.union(touched)})


@pytest.fixture(autouse=True)
def nothing_else_recognises_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the other checks. High-water marks and versions (B29) would keep every node away from the copy before
    it takes an id there."""

    async def why_older(self: HighWater) -> str:
        return ""

    monkeypatch.setattr(HighWater, "why_older", why_older)
    monkeypatch.setattr(SeenVersions, "note", lambda *_: True)


@contextmanager
def unwatched(stage: Stage) -> Iterator[None]:
    """Record nothing that writers do and that happens to the metadata in the block: the rules are about a store that
    never goes back."""
    tree, logbook = stage.cluster.metadata.tree, stage.cluster.logbook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "observers", [])
        for each in ("append", "stored", "confirm", "apply"):
            patch.setattr(logbook, each, lambda *_, **__: None)
        yield


@dataclass(frozen=True)
class Seen:
    """Observations while the older copy was there."""

    made: set[LedgerId]
    """The ledgers created meanwhile."""
    before: dict[tuple[int, int], bytes]
    """The former payloads, by ledger and entry, of a bookie that ran all the time."""
    after: dict[tuple[int, int], bytes]


async def older_copy(stage: Stage, ledgers: int, wait_s: float) -> Seen:
    """The metadata store goes back to a copy from before writes that one replica has not seen. Then that replica
    starts, and the leader dies. Finally the later copy returns.

    `ledgers`: number of ledgers created after the copy. `wait_s`: seconds that the older copy is there.
    """
    metadata, leader = stage.cluster.metadata, stage.leader

    def made_since(copy: Nodes) -> set[LedgerId]:
        found = map(paths.ledger_of, copied(metadata).keys() - copy.keys())
        return {each for each in found if each is not None}

    for _ in range(10):
        await stage.put_until_done(leader)
    behind, witness = stage.others(leader)
    behind.crash()
    copy = copied(metadata)
    while len(made_since(copy)) < ledgers:
        await stage.put_until_done(stage.leader)
        await asyncio.sleep(0.05)
    later, before = copied(metadata), payloads(witness)
    with unwatched(stage):
        restore(metadata, copy)
        leader.crash()
        behind.start()
        await asyncio.sleep(wait_s)
        seen = Seen(made_since(copy), before, payloads(witness))
        for each in stage.cluster.nodes:
            each.crash()
        restore(metadata, later)
    store = await metadata.connect()
    with suppress(NoSuchNode):
        await store.delete(paths.OLDER_COPY, -1)
    await store.close()
    return seen


def payloads(node: Node) -> dict[tuple[int, int], bytes]:
    assert node.served is not None
    assert node.served.bookie is not None
    storage = node.served.bookie.storage
    assert isinstance(storage, BookieStorage)
    found = {}
    for ledger in storage.inventory.ledgers.values():
        for first, count in ledger.index.runs():
            for entry in range(first, first + count):
                body = storage.reader.body(ledger.id, entry, *ledger.index.get(entry))
                assert body is not None
                found[ledger.id, entry] = body[PAYLOAD_AT:]
    return found


async def any_id(self: NewLedgerIds, after: LedgerId, *_: object) -> LedgerId:
    """Return the next id as before G27."""
    while (ledger := await self._ids.next_id()) <= after:
        pass
    return ledger


async def nothing(*_: object) -> None:
    """Mark no older copy."""


# docs/protocol.md G27
@pytest.mark.parametrize("seed", range(1, 4))
def test_no_ledger_is_created_in_older_copy_and_later_copy_has_all(seed: int) -> None:
    async def story(stage: Stage) -> None:
        seen = await older_copy(stage, ledgers=2, wait_s=20.0)
        assert seen.made == set()
        assert seen.after == seen.before

    play(story, KNOBS, seed)


class Kept(Exception):
    """The story is over. A replica that has followed an older copy is not judged."""


# docs/protocol.md B36
@pytest.mark.parametrize("seed", range(1, 4))
def test_bookies_overwrite_nothing_when_ledger_ids_are_assigned_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test behaves as if no node noticed the older copy."""
    monkeypatch.setattr(NewLedgerIds, "next_id", any_id)
    monkeypatch.setattr(ClusterIdentity, "mark_older", nothing)
    monkeypatch.setattr(PeerReplicas, "furthest", nothing)
    monkeypatch.setattr(LedgerList, "explains", lambda *_: True)

    async def story(stage: Stage) -> None:
        seen = await older_copy(stage, ledgers=12, wait_s=8.0)
        assert seen.made != set()
        assert seen.before.items() <= seen.after.items()
        raise Kept

    with pytest.raises(Kept):
        play(story, KNOBS, seed)
