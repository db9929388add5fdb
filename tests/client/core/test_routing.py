"""A client's conclusions from topologies and errors about which server to ask."""

from collections.abc import Iterator

import pytest

from kvstore.client.core.operations import get
from kvstore.client.core.routing import Routing
from kvstore.client.core.values import Level
from kvstore.errors import ConditionFailed, InvalidRequest, Moved, NotLeader, Unavailable
from kvstore.proto import kv_pb2
from kvstore.ring import SLOTS_HASH, KeyHash, new_ring
from kvstore.ring.hashing import MURMUR3, TOKENS
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.grpc.topology import topology_message
from kvstore.types import PartitionId, ServerId


def topology(version: int = 1, *, leader: str = "n1", epoch: int = 1, owners: str = "01") -> kv_pb2.TopologyResponse:
    """Two partitions that each own half of the ring; p1 is led by `leader`."""
    message = kv_pb2.TopologyResponse(
        ring_version=version, tokens=[TOKENS // 2 - 1, TOKENS - 1], owners=[int(each) for each in owners]
    )
    message.partitions.add(id="p1", leader=leader, epoch=epoch, replicas=["n1", "n2", "n3"])
    message.partitions.add(id="p2", leader="n2", epoch=1, replicas=["n2", "n3", "n1"])
    for number in (1, 2, 3):
        message.servers.add(id=f"n{number}", grpc=f"host{number}:1")
    return message


@pytest.fixture
def routing() -> Routing:
    known = Routing()
    assert known.learn(topology())
    return known


def test_key_belongs_to_the_owner_of_its_tokens_range(routing: Routing) -> None:
    for number in range(200):
        key = b"key-%d" % number
        assert routing.partition_of(key) == ("p1" if MURMUR3.token_of(key) < TOKENS // 2 else "p2")


def test_owners_are_partitions_that_own_a_range(routing: Routing) -> None:
    assert routing.owners == ["p1", "p2"]
    routing.learn(topology(2, owners="11"))
    assert (routing.owners, sorted(routing.partitions)) == (["p2"], ["p1", "p2"])


def test_tokens_after_the_last_one_wrap_around() -> None:
    routing = Routing()
    message = topology()
    message.tokens[:] = [10, 20]
    routing.learn(message)
    assert {routing.partition_of(b"key-%d" % number) for number in range(100)} == {"p1"}


@pytest.mark.parametrize("hash", [MURMUR3, SLOTS_HASH])
def test_client_uses_the_clusters_key_hash(hash: KeyHash) -> None:
    ring = new_ring([PartitionId("p1"), PartitionId("p2"), PartitionId("p3")], {ServerId("n1"): ""}, 1, hash)
    message, routing = topology_message(ClusterTopology(ring)), Routing()
    routing.learn(message)
    assert routing.hash is hash
    keys = [b"key-%d" % number for number in range(200)]
    assert [routing.partition_of(key) for key in keys] == [ring.partition_of(key) for key in keys]
    assert (len(message.tokens) == len(message.owners) == 0) == (hash is SLOTS_HASH), "an older client finds no ring"


def test_unknown_key_hash_is_refused() -> None:
    message = topology()
    message.hash = "md5"
    with pytest.raises(InvalidRequest, match="got 'md5'; upgrade kvstore"):
        Routing().learn(message)


def test_another_thread_sees_one_ring_while_the_next_is_learned(routing: Routing) -> None:
    looked = list[str]()

    class Message:
        ring_version, tokens, hash = 2, list(range(0, TOKENS, TOKENS >> 6)), ""
        hashed_tokens: tuple[int, ...] = ()
        hashed_owners: tuple[int, ...] = ()
        partitions = topology().partitions

        @property
        def owners(self) -> Iterator[int]:
            looked.extend(routing.partition_of(b"key-%d" % number) for number in range(50))
            return iter([1] * len(self.tokens))

    before = [routing.partition_of(b"key-%d" % number) for number in range(50)]
    routing._learn_ring(Message())  # type: ignore[arg-type]
    assert looked == before
    assert {routing.partition_of(b"key-%d" % number) for number in range(50)} == {"p2"}


def test_leader_is_asked_first_then_replicas_then_everybody(routing: Routing) -> None:
    asked = list(routing.candidates("p1", ("seed:1",), follow=False, turn=1))
    assert asked[0] == "host1:1"
    assert asked[1:4] == ["host2:1", "host3:1", "host1:1"]
    assert "seed:1" in asked


def test_read_from_any_replica_starts_at_the_clients_favourite(routing: Routing) -> None:
    asked = list(routing.candidates("p1", (), follow=True, turn=2))
    assert asked[:3] == ["host3:1", "host1:1", "host2:1"]


def test_session_reads_go_to_the_leader_until_the_named_ring_is_known(routing: Routing) -> None:
    assert not routing.note_ring_version(1)
    asked = [get(b"k", level) for level in Level]
    for operation in asked:
        routing.strengthen(operation)
    assert [operation.level for operation in asked] == list(Level)
    assert routing.note_ring_version(3)
    assert not routing.note_ring_version(1)
    for operation in asked:
        routing.strengthen(operation)
    assert [operation.level for operation in asked] == [
        Level.LINEARIZABLE,
        Level.STRICT,
        Level.LINEARIZABLE,
        Level.STALE,
    ]
    assert routing.learn(topology(3, leader="n2", epoch=2))
    again = get(b"k", Level.SESSION)
    routing.strengthen(again)
    assert again.level == Level.SESSION


def test_later_epoch_replaces_the_leader(routing: Routing) -> None:
    assert routing.learn(topology(leader="n3", epoch=2))
    assert routing.leader_of("p1") == "host3:1"


def test_earlier_epoch_is_ignored(routing: Routing) -> None:
    routing.learn(topology(leader="n3", epoch=2))
    assert not routing.learn(topology(leader="n1", epoch=1))
    assert routing.leader_of("p1") == "host3:1"


def test_server_that_knows_no_leader_removes_none(routing: Routing) -> None:
    assert not routing.learn(topology(leader="", epoch=0))
    assert routing.leader_of("p1") == "host1:1"


def test_later_ring_replaces_an_earlier_one_only(routing: Routing) -> None:
    routing.learn(topology(2, owners="11"))
    assert {routing.partition_of(b"key-%d" % number) for number in range(100)} == {"p2"}
    routing.learn(topology(1))
    assert {routing.partition_of(b"key-%d" % number) for number in range(100)} == {"p2"}


def test_leader_named_by_a_refusal_is_a_hint_until_a_newer_topology(routing: Routing) -> None:
    assert routing.learn_from(NotLeader("p1", "n2", "host2:1"))
    assert routing.leader_of("p1") == "host2:1"
    routing.learn(topology(leader="n3", epoch=2))
    assert routing.leader_of("p1") == "host3:1"


def test_changed_address_is_followed(routing: Routing) -> None:
    message = topology()
    message.servers[0].grpc = "elsewhere:2"
    assert routing.learn(message)
    assert routing.leader_of("p1") == "elsewhere:2"


def test_moved_key_requests_a_ring_only_if_ours_is_older(routing: Routing) -> None:
    assert routing.learn_from(Moved("p2", 2))
    assert not routing.learn_from(Moved("p2", 1))
    assert not routing.learn_from(ConditionFailed(3))


def test_unknown_partition_has_no_leader(routing: Routing) -> None:
    assert routing.leader_of("p9") == ""
    assert routing.replicas_of("p9") == []


def replaced(version: int) -> kv_pb2.TopologyResponse:
    """The third server is another one with each ring, at another address."""
    message = topology(version)
    for partition in message.partitions:
        partition.replicas[:] = [f"n{version + 2}" if each == "n3" else each for each in partition.replicas]
    message.servers[2].id, message.servers[2].grpc = f"n{version + 2}", f"host{version + 2}:1"
    message.servers[2].resp = f"host{version + 2}:2"
    return message


def test_removed_servers_are_forgotten() -> None:
    routing = Routing()
    for version in range(1, 21):
        routing.learn(replaced(version))
        routing.check(replaced(version), f"host{version + 2}:1")
    assert routing.everybody(()) == ["host1:1", "host22:1", "host2:1"]
    assert routing.answered == {"host22:1"}
    assert set(routing.stream_endpoints) == {"host22:1"}
    assert not routing.is_ours("host7:1")


@pytest.mark.parametrize("is_older", [True, False], ids=["an older ring", "a server that sees fewer"])
def test_lagging_server_makes_no_server_forgotten(routing: Routing, *, is_older: bool) -> None:
    message = topology(2)
    message.servers.add(id="n4", grpc="host4:1")
    routing.learn(message)
    message = topology(1 if is_older else 2)
    if not is_older:
        del message.servers[1]
    routing.learn(message)
    assert routing.everybody(()) == [f"host{number}:1" for number in (1, 2, 3, 4)]
    routing.learn(topology(2))
    assert routing.everybody(()) == [f"host{number}:1" for number in (1, 2, 3)]


def test_address_of_another_cluster_stays_foreign(routing: Routing) -> None:
    routing.check(kv_pb2.TopologyResponse(cluster="ours"), "host1:1")
    with pytest.raises(Unavailable):
        routing.check(kv_pb2.TopologyResponse(cluster="theirs"), "host3:1")
    routing.learn(replaced(2))
    routing.learn(topology(1))  # of a server that lags
    assert routing.is_named("host3:1")
    assert not routing.is_ours("host3:1")
