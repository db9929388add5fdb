"""Only the metadata store changes the ring that servers use, and nothing else removes their data (docs/protocol.md
H8, H9, H10)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from kvstore.errors import InvalidRequest
from kvstore.meta import paths
from kvstore.partition.moves.source import FLIPPED, ROUTED_BYTES
from kvstore.ring import Ring, codec
from kvstore.server import hosting
from kvstore.server.cluster.ring_store import change_ring
from kvstore.types import ServerId
from tests.sim.damaged.strangers import WAYS, Stranger, forged
from tests.sim.judges.operations import Status
from tests.sim.stories.scenarios import P, Stage, knobs, play

pytestmark = pytest.mark.sim


def rings(stage: Stage) -> list[bytes]:
    return [codec.encode(node.served.rings.ring) for node in stage.cluster.nodes if node.served is not None]


@pytest.mark.parametrize("how", sorted(WAYS))
def test_unauthenticated_peer_is_refused_everywhere(how: str) -> None:
    async def story(stage: Stage) -> None:
        before = rings(stage)
        for number in range(12):
            node = stage.cluster.nodes[number % 3]
            stranger = Stranger(stage.cluster, Random(number))
            received = await stranger.attempt(node, how)
            assert received.count(b"+") <= 1, "a nonce at the most"
            assert b"peer version" not in received or how == "says so", "it is refused earlier"
        await asyncio.sleep(2.0)
        assert rings(stage) == before
        for node in stage.cluster.nodes:
            assert node.served is not None
            assert len(node.served.peers._connections) <= 2, "the other two servers'"
            assert node.engines.find() == [P]
        assert (await stage.put_until_done(stage.leader)).status is Status.OK

    play(story, knobs())


def test_forged_ring_from_server_is_ignored_and_removes_nothing() -> None:
    """In a former version every server that received the ring removed its replicas from its disk."""

    async def story(stage: Stage) -> None:
        written = await stage.put_until_done(stage.leader)
        caller, *others = stage.cluster.nodes
        assert caller.served is not None
        ring = forged(stage.cluster.ring)
        before = rings(stage)
        for node in others:
            with pytest.raises(InvalidRequest):
                await caller.served.links.call(node.id, P, FLIPPED, codec.encode(ring), 5.0)
            ahead = ring.routed.to_bytes(ROUTED_BYTES, "big")
            for _ in range(100):
                assert await caller.served.links.call(node.id, P, FLIPPED, ahead, 5.0) == b""
            assert node.served is not None
            assert node.served.membership.false_hints <= 1
        await asyncio.sleep(3.0)
        assert rings(stage) == before
        assert all(node.engines.find() == [P] and not node.engines.retired for node in stage.cluster.nodes)
        for node in stage.cluster.nodes:
            read = await stage.get(node)
            assert read.status is Status.OK
            assert read.result[0] == written.op.value

    play(story, knobs())


def nowhere(ring: Ring) -> Ring:
    """Return a mistaken ring with all replicas elsewhere."""
    members = {id_: replace(each, replicas=(ServerId("n99"),)) for id_, each in ring.partitions.items()}
    return replace(ring, version=ring.version + 1, partitions=members)


def test_one_mistaken_ring_in_metadata_store_loses_nothing_once_corrected() -> None:
    async def story(stage: Stage) -> None:
        written = await stage.put_until_done(stage.leader)
        assert (await stage.put_until_done(stage.leader, b"r2")).status is Status.OK
        store = await stage.cluster.metadata.connect()
        right = stage.cluster.ring
        wrong = await change_ring(store, nowhere)
        await stage.until(lambda: all(P in node.engines.retired for node in stage.cluster.nodes))
        assert all(node.engines.find() == [] for node in stage.cluster.nodes)
        await asyncio.sleep(5.0)
        await change_ring(store, lambda ring: replace(ring, version=wrong.version + 1, partitions=right.partitions))
        await stage.until(lambda: stage.cluster.leader(P) is not None)
        for node in stage.cluster.nodes:
            read = await stage.get(node, timeout_s=5.0)
            assert read.status is Status.OK
            assert read.result[0] == written.op.value
        assert all(node.engines.find() == [P] and not node.engines.retired for node in stage.cluster.nodes)
        await store.close()

    play(story, knobs(), 1)
    play(story, knobs(), 2)


def test_state_is_set_aside_only_when_metadata_store_says_so_now() -> None:
    """A ring known to this server is not enough, whatever its source; an unreachable metadata store is not enough
    either."""

    async def story(stage: Stage) -> None:
        leader = stage.leader
        other = stage.others(leader)[0]
        assert other.served is not None
        await stage.put_until_done(leader)
        for _ in range(2):
            other.served.membership.note_written(nowhere(other.served.rings.ring), 99)
            await stage.until(lambda: P in other.served.hosting._leaving)
            await asyncio.sleep(2.0)
            assert (other.engines.find(), other.engines.retired) == ([P], {})
            stage.cluster.metadata.stop()
            await asyncio.sleep(3.0)
            assert (other.engines.find(), other.engines.retired) == ([P], {})
            stage.cluster.metadata.start()
        other.crash()
        other.start()
        await stage.until(lambda: other.replica(P) is not None)
        assert not other.engines.retired

    play(story, knobs())


def test_set_aside_state_is_removed_after_its_delay_not_by_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "LEFT_S", 0.1)
    monkeypatch.setattr(hosting, "AGE_S", 1)

    async def story(stage: Stage) -> None:
        leader = stage.leader
        other = stage.others(leader)[0]
        store = await stage.cluster.metadata.connect()
        await stage.put_until_done(leader)
        member = stage.cluster.ring.partitions[P]
        left = tuple(each for each in member.replicas if each != other.id)
        moved = {**stage.cluster.ring.partitions, P: replace(member, replicas=left)}
        right = stage.cluster.ring
        await change_ring(store, lambda ring: replace(ring, version=ring.version + 1, partitions=moved))
        await stage.until(lambda: P in other.engines.retired)
        other.sim.clock.step_wall(10 * 86_400_000)
        await stage.until(lambda: other.engines.retired[P][1] == 2)
        other.config = replace(other.config, retired_keep_s=5)
        for _ in range(2):
            other.crash()
            other.start()
            await asyncio.sleep(0.9)
        assert other.engines.retired[P][1] == 2, "starts make it no older"
        await stage.until(lambda: other.engines.retired[P][1] == 4)
        await stage.until(lambda: P not in other.engines.retired)
        await change_ring(store, lambda ring: replace(ring, version=ring.version + 1, partitions=right.partitions))
        await stage.until(lambda: P in other.engines.find())
        other.sim.clock.step_wall(-10 * 86_400_000)
        data, _ = await store.get(paths.RING)
        assert codec.decode(data).partitions == right.partitions
        await store.close()

    play(story, knobs())
