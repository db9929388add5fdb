"""A server registers itself in its cluster and learns about the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.env.events import end_task
from kvstore.env.ports import Env
from kvstore.env.real import real_env
from kvstore.errors import Corrupted, MetadataUnavailable, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Stat, Watch, ensure_path
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.ring import MURMUR3, SLOTS_HASH, builder, codec
from kvstore.ring.builder import with_partitions
from kvstore.ring.ring import Member as RingMember
from kvstore.server.cluster import membership as module
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.types import PartitionId, ServerId
from tests.meta.drivers import ClosedStore
from tests.ring.rings import new_ring
from tests.waiting import PATIENCE_S, wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
N1, N2 = ServerId("n1"), ServerId("n2")
RING = new_ring([P1], {N1: "", N2: ""}, 2)


class World:
    """A metadata store, and changes to it by other processes."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.tree = MemoryTree()
        self.other = MemoryStore(self.tree)

    async def prepare(self) -> None:
        await ensure_path(self.other, paths.SERVERS)
        await ensure_path(self.other, paths.partition(P1))

    def membership(self, store: MemoryStore, name: str = "n1", resp: str = "h:1") -> Membership:
        found = Membership(self.env, store, Member(id=name, resp=resp, nonce="x"))
        found.start()
        return found


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    env = real_env(tmp_path)
    made = World(env)
    await made.prepare()
    yield made
    await env.nursery.close()


async def knows(membership: Membership, wanted: ClusterTopology) -> bool:
    found = membership.topology
    return (found.ring.version, found.leaders, sorted(found.servers)) == (
        *(wanted.ring.version, wanted.leaders, sorted(wanted.servers)),
    )


async def test_membership_waits_for_the_ring(world: World) -> None:
    membership = world.membership(MemoryStore(world.tree))
    waiting = asyncio.ensure_future(membership.wait_ring())
    await asyncio.sleep(0)
    assert not waiting.done()
    await world.other.create(paths.RING, codec.encode(RING))
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).version == RING.version


async def test_changes_are_seen_and_reported(world: World) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    told: list[ClusterTopology] = []
    forget = membership.on_topology(lambda: told.append(membership.topology))
    await world.other.create(paths.partition_leader(P1), LeaderRecord(N2, 4, "n").encode(), ephemeral=True)
    await world.other.create(paths.server(N2), Member(id="n2", resp="h:2").encode(), ephemeral=True)
    wanted = ClusterTopology(RING, {P1: (N2, 4)}, {N2: Member(id="n2", resp="h:2")})
    await wait_until(lambda: knows(membership, wanted), what="leader and server are known")
    assert told[-1] == membership.topology
    later = with_partitions(RING, [RingMember(P2, (N1,))])
    await world.other.set(paths.RING, codec.encode(later), 0)
    wanted = ClusterTopology(later, {P1: (N2, 4)}, wanted.servers)
    await wait_until(lambda: knows(membership, wanted), what="the ring's change is known")
    forget()
    count = len(told)
    await world.other.delete(paths.partition_leader(P1), 0)
    wanted = ClusterTopology(later, {}, wanted.servers)
    await wait_until(lambda: knows(membership, wanted), what="the leader's end is known")
    assert len(told) == count, "told only until it was forgotten"


async def test_changed_registration_is_read_on_request(world: World) -> None:
    """No watch reports a change that keeps the set of servers."""
    await world.other.create(paths.RING, codec.encode(RING))
    await world.other.create(paths.server(N2), Member(id="n2", resp="h:2", draining=True).encode(), ephemeral=True)
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    await world.other.set(paths.server(N2), Member(id="n2", resp="h:2").encode(), 0)
    await membership.reread_servers()
    assert not membership.topology.servers[N2].draining


async def test_older_ring_of_lagging_metadata_server_is_ignored(world: World) -> None:
    later = with_partitions(RING, [RingMember(P2, (N1,))])
    await world.other.create(paths.RING, codec.encode(later))
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    await world.other.set(paths.RING, codec.encode(RING), 0)
    await world.other.create(paths.server(N2), Member(id="n2", resp="h:2").encode(), ephemeral=True)
    wanted = ClusterTopology(later, {}, {N2: Member(id="n2", resp="h:2")})
    await wait_until(lambda: knows(membership, wanted), what="the server is known, the ring kept")


# docs/protocol.md H7
async def test_everything_is_reread_in_time_despite_many_hints(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost watch, a partition without a leader causes this server to look for its leader continuously."""

    class Deaf(MemoryStore):
        def watch(self, path: str, changed: Callable[[], None]) -> Watch:
            return super().watch(path, (lambda: None) if path == paths.SERVERS else changed)

    monkeypatch.setattr(module, "REREAD_S", 0.1)
    await world.other.create(paths.RING, codec.encode(RING))
    membership = world.membership(Deaf(world.tree))
    await membership.wait_ring()
    await world.other.create(paths.server(N2), Member(id="n2", resp="h:2", nonce="x").encode(), ephemeral=True)

    async def knows_it() -> bool:
        membership.suspect(P1)
        return N2 in membership.topology.servers

    await wait_until(knows_it, what="the server is known")


# docs/protocol.md H7
async def test_change_during_full_read_is_read_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reading took seconds, operations on a partition whose leader had changed used to be refused."""
    partitions = [PartitionId(f"p{number}") for number in range(1, 10)]
    ring = new_ring(partitions, {N1: "", N2: ""}, 2)
    for each in partitions:
        await ensure_path(world.other, paths.partition(each))
        await world.other.create(paths.partition_leader(each), LeaderRecord(N1, 1, "n").encode())
    await world.other.create(paths.RING, codec.encode(ring))
    first, middle, last = (paths.partition_leader(partitions[at]) for at in (0, 4, -1))
    asked: list[str] = []

    class Slow(MemoryStore):
        """During the second full read, the last leader changes while the first is read."""

        async def get(self, path: str) -> tuple[bytes, Stat]:
            if path == first and middle in asked:
                asked.clear()
                await world.other.set(last, LeaderRecord(N2, 2, "n").encode(), -1)
            asked.append(path)
            for _ in range(5):
                await asyncio.sleep(0)
            return await super().get(path)

    monkeypatch.setattr(module, "REREAD_S", 0.0)
    membership = world.membership(Slow(world.tree))
    await membership.wait_ring()

    async def knows_it() -> bool:
        return middle in asked and membership.topology.leaders[partitions[-1]] == (N2, 2)

    await wait_until(knows_it, what="the change is known, and reading went on")
    assert asked.index(last) < asked.index(middle)
    await membership.close()


# docs/protocol.md P34
async def test_undecodable_node_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    await world.other.create(paths.partition_leader(P1), b"no leader")
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    for _ in range(3):
        await membership._read_all()
    assert len([each for each in caplog.messages if "cannot decode" in each]) == 1


# docs/protocol.md P34
async def test_nodes_of_another_user_do_not_end_following(world: World) -> None:
    """The third server has a wrong password, so that only it may read what it has created."""
    await LayoutStore(world.other).initialise("id")
    await world.other.create(paths.RING, codec.encode(with_partitions(RING, [RingMember(P2, (N2,))])))
    for name in ("n2", "n3"):
        await world.other.create(paths.server(ServerId(name)), Member(id=name, resp="h:2", nonce="y").encode())
    await ensure_path(world.other, paths.partition(P2))
    for partition in (P1, P2):
        await world.other.create(paths.partition_leader(partition), LeaderRecord(N2, 2, "n").encode())
    store = ClosedStore(world.tree)
    store.closed = frozenset({paths.server(ServerId("n3")), paths.partition_leader(P1)})
    membership = world.membership(store)
    await asyncio.wait_for(membership.wait_ring(), PATIENCE_S)
    assert set(membership.topology.servers) == {N2}
    assert membership.topology.leaders == {P2: (N2, 2)}
    assert membership.undecodable_servers == ["n3"]
    await membership.close()


# docs/protocol.md H14
async def test_ring_with_another_key_hash_is_passed_over(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    other = builder.new_ring([P1], {N1: "", N2: ""}, 2, SLOTS_HASH)
    await world.other.set(paths.RING, codec.encode(replace(other, version=RING.version + 1)), 0)
    await membership._read_all()
    assert membership.topology.ring.hash is MURMUR3
    assert any("expected key hash murmur3, got slots" in each for each in caplog.messages)


# docs/protocol.md H7
async def test_full_read_starts_with_unknown_leaders(world: World) -> None:
    """Operations wait for those. One of a thousand partitions that had just joined used to be read seconds later."""
    asked: list[str] = []

    class Noting(MemoryStore):
        async def get(self, path: str) -> tuple[bytes, Stat]:
            asked.append(path)
            return await super().get(path)

    p3 = PartitionId("p3")
    ring = with_partitions(RING, [RingMember(P2, (N2,))])
    await world.other.create(paths.RING, codec.encode(ring))
    for each in (P1, P2):
        await ensure_path(world.other, paths.partition(each))
        await world.other.create(paths.partition_leader(each), LeaderRecord(N1, 1, "n").encode())
    membership = world.membership(Noting(world.tree))
    await membership.wait_ring()
    membership._watches[paths.RING].close()
    await world.other.set(paths.RING, codec.encode(with_partitions(ring, [RingMember(p3, (N2,))])), 0)
    asked.clear()
    await membership._read_all()
    leaders = [paths.partition_leader(each) for each in (p3, P1, P2)]
    assert [path for path in asked if path in leaders] == leaders


async def test_partitions_removed_during_full_read_are_not_watched(world: World) -> None:
    await world.other.create(paths.RING, codec.encode(with_partitions(RING, [RingMember(P2, (N2,))])))
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    assert paths.partition_leader(P2) in membership._watches
    later = replace(RING, version=membership.topology.ring.version + 1)
    membership._watches[paths.RING].close()
    await world.other.set(paths.RING, codec.encode(later), 0)
    await membership._read_all()
    assert membership.topology.ring.version == later.version
    assert paths.partition_leader(P2) not in membership._watches


async def test_known_state_stays_while_metadata_store_is_down(world: World) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    await world.other.create(paths.partition_leader(P1), LeaderRecord(N2, 4, "n").encode())
    store = MemoryStore(world.tree)
    membership = world.membership(store)
    await membership.wait_ring()
    await wait_until(lambda: knows(membership, ClusterTopology(RING, {P1: (N2, 4)}, {})), what="all is known")
    store.suspend()
    membership.suspect(P1)
    await asyncio.sleep(0)
    assert membership.topology.leaders == {P1: (N2, 4)}
    await world.other.delete(paths.partition_leader(P1), 0)
    store.resume()
    await wait_until(lambda: knows(membership, ClusterTopology(RING, {}, {})), what="it is read again")


async def test_leader_of_new_partition_is_read_after_failed_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REREAD_S", 10 * PATIENCE_S)

    class FailsOnce(MemoryStore):
        failed = False

        async def get(self, path: str) -> tuple[bytes, Stat]:
            if path == paths.partition_leader(P2) and not self.failed:
                self.failed = True
                raise MetadataUnavailable("the session is suspended")
            return await super().get(path)

    await world.other.create(paths.RING, codec.encode(RING))
    await ensure_path(world.other, paths.partition(P2))
    await world.other.create(paths.partition_leader(P2), LeaderRecord(N2, 4, "n").encode())
    store = FailsOnce(world.tree)
    membership = world.membership(store)
    await membership.wait_ring()
    later = with_partitions(RING, [RingMember(P2, (N2,))])
    await world.other.set(paths.RING, codec.encode(later), 0)
    await wait_until(lambda: knows(membership, ClusterTopology(later, {P2: (N2, 4)}, {})), what="its leader is known")
    assert store.failed


async def test_server_registers_again_after_lost_session_with_same_nonce(world: World) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    store = MemoryStore(world.tree)
    membership = world.membership(store)
    await membership.wait_ring()
    await membership.announce()
    first, stat = await world.other.get(paths.server(N1))
    store.expire()
    store.resume()

    async def is_back() -> bool:
        try:
            again, later = await world.other.get(paths.server(N1))
        except NoSuchNode:
            return False
        return again == first and later.created != stat.created

    await wait_until(is_back, what="the server's znode is back")
    assert Member.decode(first).nonce == "x"


async def test_restarted_server_takes_over_only_its_own_znode(world: World) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    await world.other.create(paths.server(N1), Member(id="n1", resp="h:1", nonce="before").encode(), ephemeral=True)
    stranger = world.membership(MemoryStore(world.tree), resp="elsewhere:1")
    announcing = asyncio.create_task(stranger.announce())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not announcing.done()
    assert Member.decode((await world.other.get(paths.server(N1)))[0]).nonce == "before"
    await end_task(announcing)
    await stranger.close()
    membership = world.membership(MemoryStore(world.tree))
    await membership.announce()
    assert Member.decode((await world.other.get(paths.server(N1)))[0]).nonce == "x"


# docs/protocol.md H12
async def test_second_process_of_one_id_waits_for_the_first(world: World) -> None:
    """Two servers would host replicas under one name, and each would remove what the other publishes."""
    await world.other.create(paths.RING, codec.encode(RING))
    first = MemoryStore(world.tree)
    await world.membership(first).announce()
    second = world.membership(MemoryStore(world.tree), resp="elsewhere:1")
    announcing = asyncio.create_task(second.announce())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not announcing.done()
    first.expire()
    async with asyncio.timeout(PATIENCE_S):
        await announcing
    assert Member.decode((await world.other.get(paths.server(N1)))[0]).resp == "elsewhere:1"


async def test_leader_learned_by_local_replica_counts_at_once(world: World) -> None:
    await world.other.create(paths.RING, codec.encode(RING))
    membership = world.membership(MemoryStore(world.tree))
    await membership.wait_ring()
    told: list[object] = []
    membership.on_topology(lambda: told.append(membership.topology.leaders))
    membership.note_leader(P1, N2)
    assert told == [{P1: (N2, 0)}]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[]", b'{"format": 9, "id": "n1", "resp": ""}', b'{"format": 1}'),
        b'{"format": 1, "id": "n1", "resp": "h:1", "can": "9"}',
        b'{"format": 1, "id": "n1", "resp": 5}',
        b'{"format": 1, "id": "n1", "resp": "h:1", "zone": null}',
        b'{"format": 1, "id": "n1", "resp": "h:1", "roles": [["server"]]}',
        b'{"format": 1, "id": "n1", "resp": "h:1", "starting": "no"}',
        b"[" * 100_000,
    ],
)
def test_invalid_member_is_undecodable(data: bytes) -> None:
    with pytest.raises(Corrupted):
        Member.decode(data)


def test_member_ignores_unknown_fields() -> None:
    member = Member(id="n1", resp="h:1", grpc="h:2", zone="z", roles=("server",), nonce="x")
    assert Member.decode(member.encode()) == member
    assert Member.decode(member.encode()[:-1] + b',"later":1}') == member
