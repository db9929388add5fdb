"""The table of slots, and the redirects that keep it fresh."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.ring import MURMUR3, SLOTS_HASH, Ring, new_ring, plan
from kvstore.ring.hashing import SLOTS, slot_of
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.server.redis.slot_table import (
    SlotRedirects,
    node_id,
    nodes_of,
    ranges_by_primary,
    shards,
    slot_ranges,
)
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import settle
from tests.server.redis.resp_port import Raw, redis_port

N1, N2, N3 = ServerId("n1"), ServerId("n2"), ServerId("n3")
P1, P2, P3 = PartitionId("p1"), PartitionId("p2"), PartitionId("p3")
LEADERS = {P1: (N1, 1), P2: (N2, 1), P3: (N3, 1)}
SERVERS = {each: Member(id=each, resp=f"[::1]:700{number}") for number, each in enumerate((N1, N2, N3), start=1)}


def ring_of_slots() -> Ring:
    return new_ring([P1, P2, P3], {N1: "", N2: "", N3: ""}, 3, SLOTS_HASH)


TOPOLOGY = ClusterTopology(ring_of_slots(), LEADERS, SERVERS)


def slots_of(topology: ClusterTopology) -> list[int]:
    return [slot for each in slot_ranges(topology) for slot in range(each.first, each.last + 1)]


def key_of(server: ServerId, topology: ClusterTopology = TOPOLOGY) -> bytes:
    """Return a key that the server leads."""
    owners = (topology.ring.partition_of(b"%d" % number) for number in range(1_000))
    return b"%d" % next(number for number, owner in enumerate(owners) if topology.leaders[owner][0] == server)


def test_primary_of_each_slot_is_the_leader_of_its_keys() -> None:
    assert slots_of(TOPOLOGY) == list(range(SLOTS))
    primary = {slot: each.nodes[0] for each in slot_ranges(TOPOLOGY) for slot in range(each.first, each.last + 1)}
    for number in range(2_000):
        key = b"key%d" % number
        leader, _ = LEADERS[TOPOLOGY.ring.partition_of(key)]
        assert primary[slot_of(key)].server == leader
    assert {node.host for node in primary.values()} == {b"::1"}


def test_table_follows_the_ring_while_ranges_move() -> None:
    ring = settle(plan.shift(TOPOLOGY.ring, P1, P2, 1 << 20))
    moved = {each for each in range(SLOTS) if ring.owner_of(each << 18) != TOPOLOGY.ring.owner_of(each << 18)}
    assert len(moved) == 4
    after = replace(TOPOLOGY, ring=ring)
    assert slots_of(after) == list(range(SLOTS))
    [primary] = {
        each.nodes[0].server for each in slot_ranges(after) if not moved.isdisjoint(range(each.first, each.last + 1))
    }
    assert primary == N2


def test_other_replicas_are_replicas() -> None:
    for each in slot_ranges(TOPOLOGY):
        assert {node.server for node in each.nodes} == {N1, N2, N3}
        assert len(each.nodes) == 3
    assert [shard.nodes[0].server for shard in shards(TOPOLOGY)] == [N1, N2, N3]
    assert sum(last - first + 1 for shard in shards(TOPOLOGY) for first, last in shard.ranges) == SLOTS


def test_replica_stands_in_for_an_unknown_leader() -> None:
    headless = TOPOLOGY.with_leader(P2, None)
    assert slots_of(headless) == list(range(SLOTS))
    alone = replace(headless, servers={N1: SERVERS[N1]})
    assert {node.server for each in slot_ranges(alone) for node in each.nodes} == {N1}
    assert slot_ranges(replace(headless, servers={N1: Member(id=N1, resp="")})) == []


def test_ranges_by_primary_cover_all_slots() -> None:
    found = ranges_by_primary(TOPOLOGY)
    assert set(found) == {N1, N2, N3}
    assert sorted(slot for each in found.values() for a, b in each for slot in range(a, b + 1)) == list(range(SLOTS))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slots_are_divided_among_the_servers_with_another_hash(count: int) -> None:
    servers = {ServerId(f"n{n}"): Member(id=ServerId(f"n{n}"), resp=f"[::1]:{7000 + n}") for n in range(count)}
    topology = ClusterTopology(new_ring([P1], {N1: ""}, 1, MURMUR3), {P1: (N1, 1)}, servers)
    assert slots_of(topology) == list(range(SLOTS))
    assert [each.nodes[0].server for each in slot_ranges(topology)] == sorted(servers)
    assert [node.id for node in nodes_of(topology)] == [node_id(each) for each in sorted(servers)]


# ── redirects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def redirects(topology: ClusterTopology = TOPOLOGY, reachable: Collection[ServerId] = (N2, N3)) -> SlotRedirects:
    return SlotRedirects(N1, lambda: topology, lambda server: server in reachable)


def test_key_of_another_leader_is_redirected() -> None:
    key = key_of(N2)
    assert redirects().moved_or_none([key]) == f"MOVED {slot_of(key)} ::1:7002"
    assert redirects().moved_or_none([b"{%b}a" % key, b"{%b}b" % key]) == f"MOVED {slot_of(key)} ::1:7002"


def test_command_is_executed_here_unless_another_server_leads_it() -> None:
    key = key_of(N2)
    assert redirects().moved_or_none([key_of(N1)]) is None
    assert redirects().moved_or_none([key, key_of(N3)]) is None
    assert redirects(reachable=()).moved_or_none([key]) is None
    owner = TOPOLOGY.ring.partition_of(key)
    assert redirects(TOPOLOGY.with_leader(owner, None)).moved_or_none([key]) is None
    assert redirects(replace(TOPOLOGY, servers={N1: SERVERS[N1]})).moved_or_none([key]) is None
    of_murmur = replace(TOPOLOGY, ring=new_ring([P1, P2, P3], {N1: "", N2: "", N3: ""}, 3, MURMUR3))
    assert all(redirects(of_murmur).moved_or_none([b"%d" % each]) is None for each in range(100))


async def test_port_redirects_every_kind_of_command_on_keys(tmp_path: Path) -> None:
    mine, other = key_of(N1), key_of(N2)
    moved = b"-MOVED %d ::1:7002\r\n" % slot_of(other)
    async with redis_port(tmp_path, hash=SLOTS_HASH) as resp:
        resp.backend.topology = TOPOLOGY
        async with resp.raw() as plain:
            assert await plain.ask(b"SET %b 1\r\n" % other, b"+OK\r\n") == b"+OK\r\n"
        resp.server.redirects = redirects()
        async with resp.raw() as raw:
            for command in (b"GET %b", b"SET %b 1", b"INCR %b", b"DEL %b", b"get %b", b"SET %b 1 EX 9", b"MGET %b"):
                assert await raw.ask(command % other + b"\r\n", moved) == moved
            many = b"SET %b 1\r\n" % mine + b"SET %b 1\r\nGET %b\r\n" % (other, other) * 4
            wanted = b"+OK\r\n" + moved * 8
            assert await raw.ask(many, wanted) == wanted
            puts, gets = (b"SET %b 2\r\n" % other) * 5, (b"GET %b\r\n" % other) * 5
            assert await raw.ask(puts + gets, moved * 10) == moved * 10
            assert await raw.ask(b"GET %b\r\n" % mine, b"$1\r\n1\r\n") == b"$1\r\n1\r\n"
            transaction = b"MULTI\r\nGET %b\r\nEXEC\r\n" % other
            executed = b"+OK\r\n+QUEUED\r\n*1\r\n$1\r\n1\r\n"
            assert await raw.ask(transaction, executed) == executed
            stale = b"+OK\r\n$1\r\n1\r\n"
            assert await raw.ask(b"READONLY\r\nGET %b\r\n" % other, stale) == stale


async def test_port_is_a_cluster_for_clients_only_where_it_redirects(tmp_path: Path) -> None:
    """With `cluster_enabled:0`, redis-cli --cluster refuses to check the cluster."""
    async with redis_port(tmp_path, hash=SLOTS_HASH) as resp, resp.raw() as raw:
        for redirecting, mode in ((None, b"standalone"), (redirects(resp.backend.topology), b"cluster")):
            resp.server.redirects = redirecting
            raw.writer.write(b"HELLO 3\r\n")
            assert b"\r\n$4\r\nmode\r\n$%d\r\n%b\r\n" % (len(mode), mode) in await raw.read_until(b"modules\r\n*0\r\n")
            facts = resp.server.facts()
            assert facts["Server"]["redis_mode"] == mode.decode()
            assert facts["Cluster"] == {"cluster_enabled": int(redirecting is not None)}
    async with redis_port(tmp_path / "murmur3") as resp:
        resp.server.redirects = redirects(resp.backend.topology)
        assert resp.server.mode == "standalone"


# docs/protocol.md H14
async def test_keys_of_a_slot_are_counted_and_listed(tmp_path: Path) -> None:
    tagged = [b"{%d}" % tag for tag in range(40)]
    slots: dict[int, set[bytes]] = {}
    async with redis_port(tmp_path, hash=SLOTS_HASH) as resp, resp.raw() as raw:
        for key in (b"%b%d" % (tag, number) for tag in tagged for number in range(5)):
            slots.setdefault(slot_of(key), set()).add(key)
            assert await raw.ask(b"SET %b 1\r\n" % key, b"+OK\r\n") == b"+OK\r\n"
        empty = next(slot for slot in range(SLOTS) if slot not in slots)
        for slot in (0, SLOTS - 1, empty, *slots):
            wanted = b":%d\r\n" % len(slots.get(slot, ()))
            assert await raw.ask(b"CLUSTER COUNTKEYSINSLOT %d\r\n" % slot, wanted) == wanted
        for slot, mine in slots.items():
            assert await keys_of(raw, slot, 10_000) == mine
            some = await keys_of(raw, slot, 3)
            assert len(some) == 3
            assert some < mine
            assert await keys_of(raw, slot, 0) == set()
        assert await keys_of(raw, empty, 9) == set()


async def keys_of(raw: Raw, slot: int, most: int) -> set[bytes]:
    """Return the reply to CLUSTER GETKEYSINSLOT."""
    raw.writer.write(b"CLUSTER GETKEYSINSLOT %d %d\r\n" % (slot, most))
    count = int((await raw.read_line())[1:])
    lines = [await raw.read_line() for _ in range(2 * count)]
    found = {line.strip() for line in lines[1::2]}
    assert len(found) == count
    return found


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("COUNTKEYSINSLOT -1", b"-ERR Invalid or out of range slot\r\n"),
        ("COUNTKEYSINSLOT 16384", b"-ERR Invalid or out of range slot\r\n"),
        ("COUNTKEYSINSLOT x", b"-ERR value is not an integer or out of range\r\n"),
        ("GETKEYSINSLOT 16384 1", b"-ERR Invalid or out of range slot\r\n"),
        ("GETKEYSINSLOT 1 -1", b"-ERR expected 0 to 10000 keys, got -1\r\n"),
        ("GETKEYSINSLOT 1 10001", b"-ERR expected 0 to 10000 keys, got 10001\r\n"),
        ("GETKEYSINSLOT 1 x", b"-ERR value is not an integer or out of range\r\n"),
    ],
)
async def test_wrong_slots_and_counts_are_refused(tmp_path: Path, words: str, answer: bytes) -> None:
    async with redis_port(tmp_path, hash=SLOTS_HASH) as resp, resp.raw() as raw:
        assert await raw.ask(b"CLUSTER %b\r\n" % words.encode(), answer) == answer
    async with redis_port(tmp_path / "murmur3") as resp, resp.raw() as raw:
        wanted = b"-ERR expected the key hash slots, got murmur3"
        assert await raw.ask(b"CLUSTER COUNTKEYSINSLOT 1\r\n", wanted) == wanted


async def test_cluster_commands_show_the_table(tmp_path: Path) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        resp.backend.topology = replace(TOPOLOGY, ring=new_ring([P1], {N1: ""}, 1, SLOTS_HASH))
        node = b"*4\r\n$3\r\n::1\r\n:7001\r\n$40\r\n%b\r\n*0\r\n" % node_id(N1)
        slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node
        assert await raw.ask(b"CLUSTER SLOTS\r\n", slots) == slots
        raw.writer.write(b"CLUSTER NODES\r\n")
        await raw.read_line()
        lines = [await raw.read_line() for _ in range(3)]
        assert lines[0].startswith(node_id(N1) + b" ::1:7001@7001 ")
        assert [line.endswith(b" connected 0-16383\n") for line in lines] == [True, False, False]
        assert await raw.read_line() == b"\r\n"
        assert await raw.ask(b"CLUSTER KEYSLOT {foo}x\r\n", b":12182\r\n") == b":12182\r\n"
