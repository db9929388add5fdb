"""Ownership of tokens."""

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sortedcontainers import SortedDict

from kvstore.errors import Corrupted, UndecodableNode
from kvstore.ring import (
    MURMUR3,
    SLOTS_HASH,
    TOKENS,
    Member,
    Ring,
    TokenRange,
    builder,
    decode,
    encode,
    place_replicas,
    with_partitions,
)
from kvstore.ring.balance import Balance
from kvstore.ring.operations import RingOperation
from kvstore.types import PartitionId, ServerId, machine_of
from tests.ring.rings import new_ring

SERVERS = {ServerId(f"n{i}"): "" for i in range(1, 4)}


def ids(count: int) -> list[PartitionId]:
    return [PartitionId(f"p{i}") for i in range(1, count + 1)]


def ring_of(tokens: dict[int, str]) -> Ring:
    owners = {PartitionId(owner) for owner in tokens.values()}
    return Ring(1, {owner: Member(owner, ()) for owner in owners}, SortedDict(tokens), MURMUR3)


# docs/protocol.md H1
@pytest.mark.parametrize(
    ("token", "owner"),
    [(0, "a"), (9, "a"), (10, "a"), (11, "b"), (20, "b"), (21, "a"), (TOKENS - 1, "a")],
)
def test_range_ends_with_its_token_and_the_last_one_wraps(token: int, owner: str) -> None:
    assert ring_of({10: "a", 20: "b"}).owner_of(token) == owner


def test_largest_token_routes_like_any_other() -> None:
    ring = ring_of({10: "a", TOKENS - 1: "b"})
    assert ring.owner_of(TOKENS - 1) == "b"
    assert ring.owner_of(0) == "a"


@given(st.dictionaries(st.integers(0, TOKENS - 1), st.sampled_from("abc"), min_size=1, max_size=8))
def test_lookups_agree_with_the_listed_ranges(tokens: dict[int, str]) -> None:
    ring = ring_of(tokens)
    assert sum(span.size for span in ring.ranges()) == TOKENS
    for span in ring.ranges():
        assert ring.owner_of(span.end) == span.owner
        assert ring.owner_of((span.start + 1) % TOKENS) == span.owner


@pytest.mark.parametrize(
    ("count", "limit"), [(1, 1.0), (2, 1.0001), (3, 1.0001), (10, 1.05), (100, 1.05), (1000, 1.05)]
)
def test_partitions_own_at_most_a_twentieth_above_the_mean(count: int, limit: float) -> None:
    ring = new_ring(ids(count), SERVERS, 3)
    shares, unit = ring.shares(), ring.hash.unit / TOKENS
    assert sum(shares.values()) == pytest.approx(1)
    assert (max(shares.values()) - 2 * unit) * count <= limit, "an owner has whole slots"


def test_join_moves_ranges_only_to_the_newcomer() -> None:
    before = new_ring(ids(9), SERVERS, 3)
    newcomer = PartitionId("p10")
    after = with_partitions(before, [Member(newcomer, tuple(SERVERS))])
    assert after.version == before.version + 1
    for token in range(0, TOKENS, 1_000_003):
        assert after.owner_of(token) in (before.owner_of(token), newcomer)


def test_ring_of_a_thousand_partitions_fits_its_znode() -> None:
    assert len(encode(new_ring(ids(1000), SERVERS, 3))) <= 512 * 1024


def test_ring_round_trips() -> None:
    ring = new_ring(ids(5), SERVERS, 3)
    again = decode(encode(ring))
    assert encode(again) == encode(ring)
    assert (again.version, again.partitions, again.tokens) == (ring.version, ring.partitions, ring.tokens)


def test_only_rings_of_murmur3_are_readable_by_older_releases() -> None:
    one, two = (builder.new_ring(ids(1), SERVERS, 1, hash) for hash in (MURMUR3, SLOTS_HASH))
    document, hashed = orjson.loads(encode(one)), orjson.loads(encode(two))
    assert (document["format"], hashed["format"]) == (2, 3)
    assert "hash" not in document
    assert hashed == document | {"format": 3, "hash": "slots"}
    assert (decode(encode(one)).hash, decode(encode(two)).hash) == (MURMUR3, SLOTS_HASH)


@pytest.mark.parametrize("change", [{"hash": "md5"}, {"hash": 7}, {"hash": ""}, {"tokens": [5]}])
def test_ring_with_an_unknown_hash_or_a_divided_slot_is_refused(change: dict[str, object]) -> None:
    one = builder.new_ring(ids(1), SERVERS, 1, SLOTS_HASH)
    document = orjson.loads(encode(one)) | {"tokens": [TOKENS - 1], "owners": [0]}
    assert decode(orjson.dumps(document)).hash is SLOTS_HASH
    with pytest.raises(UndecodableNode):
        decode(orjson.dumps(document | change))


def test_every_partition_needs_a_slot() -> None:
    unit, all_ids = SLOTS_HASH.unit, ids(SLOTS_HASH.units)
    ranges = [TokenRange((slot * unit - 1) % TOKENS, (slot + 1) * unit - 1, all_ids[slot]) for slot in range(1 << 14)]
    full = Balance(SLOTS_HASH, ranges, all_ids)
    assert set(full.loads().values()) == {unit}
    with pytest.raises(ValueError, match="at most 16384 partitions, got 16385"):
        full.join(PartitionId("more"))


def test_newcomer_takes_whole_ranges_of_one_slot() -> None:
    unit, one = SLOTS_HASH.unit, PartitionId("one")
    owners = [one if slot % 2 else PartitionId("two") for slot in range(1 << 14)]
    ranges = [TokenRange((slot * unit - 1) % TOKENS, (slot + 1) * unit - 1, owners[slot]) for slot in range(1 << 14)]
    balance = Balance(SLOTS_HASH, ranges, [one, PartitionId("two")])
    balance.join(PartitionId("three"))
    assert balance.loads()[PartitionId("three")] == 16 * unit
    assert sum(balance.loads().values()) == TOKENS


def test_ring_encodes_operations_as_documented_and_optionally() -> None:
    """See docs/reference/formats.md."""
    ring = new_ring(ids(1), SERVERS, 1)
    assert b"operations" not in encode(ring)
    done = RingOperation("a1", "00ff", 1, 2, 1, 3, (PartitionId("p2"),))
    data = encode(replace(ring, operations=(done,)))
    more = b',"hash":"slots"' if ring.hash is SLOTS_HASH else b""
    assert data.endswith(b',"operations":[["a1","00ff",1,2,1,3,["p2"]]]%b}' % more)
    assert decode(data).operations == (done,)
    assert decode(encode(ring)).operations == ()


@pytest.mark.parametrize("operations", [b'[["a1"]]', b"7", b'[["a1","00",1,2,1,3,[],4]]'])
def test_malformed_operations_are_refused(operations: bytes) -> None:
    data = encode(new_ring(ids(1), SERVERS, 1))
    with pytest.raises(Corrupted):
        decode(data[:-1] + b',"operations":' + operations + b"}")


def test_ring_of_an_unknown_format_is_refused_by_number() -> None:
    with pytest.raises(Corrupted, match="expected format 1 to 3, got 7"):
        decode(b'{"format": 7}')


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"format": 1}', b'{"format":1,"version":1,"partitions":[],"tokens":[[1,0]]}']
)
def test_document_that_is_not_a_ring_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupted):
        decode(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "7"),
        ("version", None),
        ("version", -1),
        ("routed", 1.5),
        ("next_move", []),
        ("owners", [-1]),
        ("tokens", ["4294967295"]),
        ("draining", "n1"),
        ("retired", [1]),
        ("pace", {"paused": "no"}),
        ("journey", {"moves": {}}),
        ("partitions", [{"id": 1, "state": "serving", "replicas": ["n1"]}]),
        ("partitions", [{"id": "p1", "state": "serving", "replicas": "n1"}]),
        ("partitions", [{"id": "p1", "state": "serving", "replicas": ["n1"], "owned": [1, "2"]}]),
    ],
)
def test_ring_with_fields_of_other_types_is_refused(field: str, value: object) -> None:
    """It would end every process that compares its version or sorts its servers (docs/protocol.md, P34)."""
    ring = ring_of({TOKENS - 1: "p1"})
    document = orjson.loads(encode(ring))
    assert encode(decode(orjson.dumps(document))) == encode(ring)
    with pytest.raises(UndecodableNode):
        decode(orjson.dumps({**document, field: value}))


def test_leaders_and_replicas_are_spread_over_servers() -> None:
    ring = new_ring(ids(6), SERVERS, 2)
    leads = [member.replicas[0] for member in ring.partitions.values()]
    assert sorted(leads) == ["n1", "n1", "n2", "n2", "n3", "n3"]
    held = [server for member in ring.partitions.values() for server in member.replicas]
    assert {held.count(server) for server in SERVERS} == {4}


def test_replicas_go_to_distinct_zones_first() -> None:
    zones = {ServerId("a1"): "a", ServerId("a2"): "a", ServerId("b1"): "b", ServerId("c1"): "c"}
    chosen = place_replicas(zones, 3, {ServerId("b1"): 9, ServerId("c1"): 9}, {})
    assert {zones[server] for server in chosen} == {"a", "b", "c"}


# docs/protocol.md H15
def test_replicas_are_on_distinct_machines() -> None:
    servers = {ServerId(f"n{machine}{process}"): "" for machine in (1, 2, 3) for process in ("", ".2", ".3")}
    ring = new_ring(ids(30), servers, 3)
    assert all(len(set(map(machine_of, each.replicas))) == 3 for each in ring.partitions.values())
    held = [server for member in ring.partitions.values() for server in member.replicas]
    assert {held.count(server) for server in servers} == {10}
    two = {server: zone for server, zone in servers.items() if machine_of(server) != "n3"}
    with pytest.raises(ValueError, match="expected 1 to 2 replicas, one per machine, got 3"):
        place_replicas(two, 3, {}, {})


def test_more_replicas_than_servers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 3 replicas"):
        place_replicas(SERVERS, 4, {}, {})


def test_rings_of_every_size_up_to_a_thousand_are_balanced() -> None:
    ring = new_ring(ids(1), SERVERS, 3)
    balance = Balance(ring.hash, ring.ranges(), ring.partitions)
    owned = dict.fromkeys(ring.partitions, TOKENS)
    coarse, slices_max = (2 * SLOTS_HASH.unit, 52) if ring.hash is SLOTS_HASH else (0, 42)
    for count, newcomer in enumerate(ids(1000)[1:], start=2):
        before = len(balance.owners)
        balance.join(newcomer)
        owned = balance.loads()
        assert sum(owned.values()) == TOKENS
        assert (max(owned.values()) - coarse) * count <= 1.05 * TOKENS, f"{count} partitions"
        assert len(balance.owners) - before <= slices_max, f"{count} partitions"
