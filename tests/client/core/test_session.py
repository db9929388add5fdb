"""A client's progress never decreases, and its request ids carry the leader's time."""

from random import Random

from kvstore.client.core.operation import SEEN_STEP_MS
from kvstore.client.core.session import ClientState
from kvstore.client.core.values import RING
from kvstore.proto import kv_pb2


def answers(partition: str, sequence: int, *, time_ms: int = 0, ring_version: int = 0) -> kv_pb2.Answers:
    progress = kv_pb2.Progress(partition=partition, sequence=sequence, time_ms=time_ms)
    return kv_pb2.Answers(progress=[progress], ring_version=ring_version)


def test_progress_never_decreases() -> None:
    seen = ClientState(Random(1))
    seen.absorb_answers(answers("p1", 7))
    seen.absorb_answers(answers("p1", 5))
    seen.absorb({"p1": 6, "p2": 3})
    assert seen.tokens == {"p1": 7, "p2": 3}


def test_token_carries_the_newest_known_ring() -> None:
    seen, other = ClientState(Random(1)), ClientState(Random(2))
    assert seen.absorb_answers(answers("p1", 7, ring_version=4))
    assert seen.token == {"p1": 7, RING: 4}
    other.absorb(seen.token)
    assert other.token == seen.token


def test_request_ids_carry_the_time_of_their_partitions_leader() -> None:
    seen = ClientState(Random(1))
    seen.absorb_answers(answers("p1", 1, time_ms=50 * SEEN_STEP_MS))
    topology = kv_pb2.TopologyResponse()
    topology.partitions.add(id="p2").progress.time_ms = 60 * SEEN_STEP_MS
    seen.learn(topology)
    assert (seen.numberings["p1"].seen_ms, seen.numberings["p2"].seen_ms) == (50 * SEEN_STEP_MS, 60 * SEEN_STEP_MS)


def test_each_partition_has_its_own_client_id() -> None:
    seen = ClientState(Random(1))
    assert seen.numberings["p1"].client != seen.numberings["p2"].client
    assert seen.numberings["p1"] is seen.numberings["p1"]


def test_cluster_time_is_that_of_the_earliest_partition() -> None:
    """One log may be ahead of the clock; keys of the other partitions must not count as expired by it."""
    seen = ClientState(Random(1))
    assert seen.time_ms == 0
    topology = kv_pb2.TopologyResponse(ring_version=1, tokens=[0], owners=[0])
    for partition, time_ms in (("p1", 90_000_000), ("p2", 5_000_000), ("p3", 0)):
        topology.partitions.add(id=partition).progress.time_ms = time_ms
    seen.learn(topology)
    assert seen.time_ms == 5_000_000
