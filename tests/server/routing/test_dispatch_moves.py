"""Operations on one key that follow each other during a ring change are sent in order of arrival."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, Unavailable
from kvstore.partition.state import commands
from kvstore.partition.state.commands import NOT_NOW, Level, NotNow, Op, Sink
from kvstore.ring import Ring, plan, steps
from kvstore.ring.moves import MoveId
from kvstore.server.routing.ports import LocalReplica
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import unit_of
from tests.server.routing.test_dispatch import has_arrived, has_lost, kill, result_of, send
from tests.server.servers import Servers, servers
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("key_hash")
P1, P2 = PartitionId("p1"), PartitionId("p2")


class Holding(LocalReplica):
    """A replica that answers when the test says so."""

    serving = True

    def __init__(self) -> None:
        self.held: list[tuple[Op, Sink, int]] = []
        self.has_rejected_moved = False

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        self.held += ((op, sink, token) for op, token in zip(ops, tokens, strict=True))

    def read_now(self, keys: list[bytes], *_: object, in_turn: bool = False) -> NotNow:
        return NOT_NOW

    def redirect_moved(self) -> None:
        self.has_rejected_moved = True


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    """Start servers, of which n1 is asked, n2 leads p1, and n3 leads p2."""
    async with servers(tmp_path, ["n1", "n2", "n3"], partitions=2) as started:
        await started.lead("p1", "n2")
        await started.lead("p2", "n3")
        yield started


def flipped(ring: Ring, key: bytes) -> Ring:
    """Return a ring in which p1's range around the key has moved to p2."""
    ring = plan.shift_range(ring, *unit_of(ring.hash, key), P2)
    (id_,) = ring.moves
    return steps.finish(steps.flip(steps.begin(ring, MoveId(id_), 1), MoveId(id_)), MoveId(id_))


def learn(cluster: Servers, ring: Ring, *names: str) -> None:
    for name in names or cluster.servers:
        cluster[name].membership.note_written(ring, 0)


def hold(cluster: Servers, name: str, partition: PartitionId) -> Holding:
    holding = Holding()
    cluster[name].dispatcher.host(partition, holding)
    return holding


async def has(holding: Holding, count: int) -> bool:
    return len(holding.held) >= count


def reject(cluster: Servers, name: str, holding: Holding) -> None:
    held, holding.held = holding.held, []
    for op, sink, token in held:
        cluster[name].dispatcher.reject(op, sink, token, Moved("p2", 0))
        sink.flush()


async def value_of(cluster: Servers, key: bytes) -> bytes:
    record = await result_of(cluster["n3"], commands.Get(key))
    return record[0]  # type: ignore[no-any-return]


async def test_writes_behind_a_returned_write_follow_it(cluster: Servers) -> None:
    server, key, other = cluster["n1"], cluster.key_of("p1"), cluster.key_of("p2")
    holding = hold(cluster, "n2", P1)
    first = send(server, commands.Put(key, b"first"))
    await wait_until(lambda: has(holding, 1), what="the first is at n2")
    learn(cluster, flipped(cluster.ring, key))
    second = send(server, commands.Put(key, b"second"))
    assert isinstance(await result_of(server, commands.Put(other, b"v")), int), "other keys do not wait"
    assert second not in server.sink.results
    reject(cluster, "n2", holding)
    one, two = await server.sink.wait(first, second)
    assert one < two
    assert await value_of(cluster, key) == b"second"


async def test_writes_behind_a_completed_write_follow_it(cluster: Servers) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    first = send(server, commands.Put(key, b"first"))
    await wait_until(lambda: has(holding, 1), what="the first is at n2")
    learn(cluster, flipped(cluster.ring, key))
    second = send(server, commands.Put(key, b"second"))
    _, sink, token = holding.held.pop()
    sink.complete(token, 7)
    sink.flush()
    assert (await server.sink.wait(first, second))[0] == 7
    assert await value_of(cluster, key) == b"second"


async def test_write_of_unknown_outcome_blocks_nothing(cluster: Servers) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    first = send(server, commands.Put(key, b"first"))
    await wait_until(lambda: has(holding, 1), what="the first is at n2")
    learn(cluster, flipped(cluster.ring, key))
    second = send(server, commands.Put(key, b"second"))
    await kill(cluster, "n2")
    await wait_until(lambda: has_lost(server, 1), what="n1 has noticed")
    one, two = await server.sink.wait(first, second)
    assert isinstance(one, OutcomeUnknown)
    assert isinstance(two, int)


async def test_operations_behind_a_batch_wait_for_all_its_keys(cluster: Servers) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    also = b"{%b}also" % key
    holding = hold(cluster, "n2", P1)
    batch = commands.Batch(key, (commands.Put(key, b"first"), commands.Put(also, b"first")))
    first = send(server, batch)
    await wait_until(lambda: has(holding, 1), what="the batch is at n2")
    learn(cluster, flipped(cluster.ring, key))
    second = send(server, commands.Put(also, b"second"))
    reject(cluster, "n2", holding)
    await server.sink.wait(first, second)
    assert await value_of(cluster, also) == b"second"


async def test_writes_behind_a_locally_rejected_write_follow_it(cluster: Servers) -> None:
    """This holds also while this server still asks the former owner, which might own the key again by now."""
    server, key = cluster["n2"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    first = send(server, commands.Put(key, b"first"))
    reject(cluster, "n2", holding)
    second = send(server, commands.Put(key, b"second"))
    assert not holding.held
    learn(cluster, flipped(cluster.ring, key))
    one, two = await server.sink.wait(first, second)
    assert one < two


async def test_operations_state_the_ring_they_were_submitted_by(
    cluster: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, there, versions = cluster["n1"], cluster["n2"].dispatcher, []
    await result_of(server, commands.Put(cluster.key_of("p1"), b"the link is open"))
    replica_here = there.replica_here

    def look(partition: PartitionId, ring_version: int) -> LocalReplica | None:
        versions.append(ring_version)
        return replica_here(partition, ring_version)

    monkeypatch.setattr(there, "replica_here", look)
    token = send(server, commands.Put(cluster.key_of("p1", 1), b"v"))
    learn(cluster, flipped(cluster.ring, cluster.key_of("p1")), "n1")
    await server.sink.wait(token)
    assert versions == [cluster.ring.routed]


@pytest.mark.parametrize("asked", ["n1", "n2"])
async def test_pipelined_puts_stay_in_order_per_partition(cluster: Servers, asked: str) -> None:
    server, keys = cluster[asked], [cluster.key_of(each, number) for number in range(5) for each in ("p1", "p2")]
    ops = [commands.Put(key, b"%d" % number) for number in range(3) for key in keys]
    tokens = range(70_000, 70_000 + 8 * len(ops), 8)
    await result_of(server, commands.Put(keys[0], b"the link is open"))
    server.dispatcher.submit(ops, server.sink, tokens)
    versions = await server.sink.wait(*tokens)
    for partition in ("p1", "p2"):
        its = [
            version for op, version in zip(ops, versions, strict=True) if cluster.ring.partition_of(op.key) == partition
        ]
        assert its == sorted(its)
        assert len(set(its)) == 15
    assert [(await result_of(server, commands.Get(key)))[0] for key in keys] == [b"2"] * 10


async def test_first_rejected_operation_stays_first(cluster: Servers) -> None:
    """It is sent again to the same leader, which first rejects the operation behind it, and then rejects it again."""
    server, key = cluster["n2"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    first, second = (send(server, commands.Put(key, value)) for value in (b"first", b"second"))
    behind = holding.held.pop()
    reject(cluster, "n2", holding)
    await wait_until(lambda: has(holding, 1), what="the first is here again")
    holding.held.insert(0, behind)
    reject(cluster, "n2", holding)
    learn(cluster, flipped(cluster.ring, key))
    one, two = await server.sink.wait(first, second)
    assert one < two


async def test_read_does_not_wait_behind_rejected_write(cluster: Servers) -> None:
    """The former owner may still answer it (docs/protocol.md M7)."""
    server, key = cluster["n2"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    write = send(server, commands.Put(key, b"first"))
    reject(cluster, "n2", holding)
    send(server, commands.Get(key))
    assert [op for op, _, _ in holding.held] == [commands.Get(key)]
    learn(cluster, flipped(cluster.ring, key))
    await server.sink.wait(write)


async def test_local_leader_rejects_moved_keys_before_resending(cluster: Servers) -> None:
    holding, key = hold(cluster, "n2", P1), cluster.key_of("p1")
    learn(cluster, flipped(cluster.ring, key))
    assert holding.has_rejected_moved


async def test_operations_waiting_for_former_owner_follow_those_in_transit(
    cluster: Servers,
) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    await result_of(server, commands.Put(cluster.key_of("p2"), b"the link is open"))
    first = send(server, commands.Put(key, b"first"))
    await wait_until(lambda: has(holding, 1), what="the first is at n2")
    server.dispatcher._router.routes._refused_by[P1] = (ServerId("n2"), 1e12)
    second = send(server, commands.Put(key, b"second"))
    learn(cluster, flipped(cluster.ring, key))
    assert second not in server.sink.results
    reject(cluster, "n2", holding)
    one, two = await server.sink.wait(first, second)
    assert one < two


async def test_refusal_of_former_owner_redirects_to_new_owner(cluster: Servers) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    first = send(server, commands.Put(key, b"first"))
    await wait_until(lambda: has(holding, 1), what="the first is at n2")
    learn(cluster, flipped(cluster.ring, key))
    second = send(server, commands.Put(key, b"second"))
    _, sink, token = holding.held.pop()
    sink.complete(token, NotLeader("p1"))
    sink.flush()
    one, two = await server.sink.wait(first, second)
    assert one < two


async def test_operation_behind_a_lost_one_times_out(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.routing.redirects.WAIT_S", 0.1)
    server, key = cluster["n1"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    send(server, commands.Put(key, b"first"))
    await wait_until(lambda: has(holding, 1), what="the first is at n2")
    learn(cluster, flipped(cluster.ring, key))
    (second,) = await server.sink.wait(send(server, commands.Put(key, b"second")))
    assert isinstance(second, Unavailable)


async def test_nothing_is_kept_after_the_end(cluster: Servers) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    holding = hold(cluster, "n2", P1)
    tokens: list[Any] = [send(server, commands.Put(key, b"%d" % number)) for number in range(20)]
    await wait_until(lambda: has(holding, 20), what="they are at n2")
    learn(cluster, flipped(cluster.ring, key))
    tokens += [send(server, commands.Put(key, b"%d" % number)) for number in range(20)]
    reject(cluster, "n2", holding)
    versions = await server.sink.wait(*tokens)
    assert versions == sorted(versions)
    server.dispatcher._router.check()
    assert server.dispatcher._router.redirects.keys == {}
    assert server.dispatcher._router.redirects.bytes == 0
    assert await has_arrived(cluster["n3"], 40)


async def test_batch_split_by_a_move_is_refused_at_once(cluster: Servers) -> None:
    server, key, staying = cluster["n1"], cluster.key_of("p1"), cluster.key_of("p1", 1)
    holding = hold(cluster, "n2", P1)
    parted = send(server, commands.Batch(key, (commands.Put(key, b"v"), commands.Put(staying, b"v"))))
    await wait_until(lambda: has(holding, 1), what="the batch is at n2")
    learn(cluster, flipped(cluster.ring, key))
    reject(cluster, "n2", holding)
    (refused,) = await server.sink.wait(parted)
    assert isinstance(refused, InvalidRequest)
    assert "p1 and p2" in str(refused)


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Following(Holding):
    """A replica that does not lead."""

    serving = False


@pytest.mark.parametrize("op", [commands.Get, commands.Meta])
async def test_session_read_is_local_only_with_the_same_ring(cluster: Servers, op: Any) -> None:
    server, key = cluster["n1"], cluster.key_of("p1")
    following, leader = Following(), hold(cluster, "n2", P1)
    server.dispatcher.host(P1, following)
    send(server, op(key, Level.SESSION, 5), ring_version=cluster.ring.routed)
    send(server, op(key, Level.SESSION, 0))
    assert [held[0] for held in following.held] == [op(key, Level.SESSION, 5), op(key, Level.SESSION, 0)]
    later = flipped(cluster.ring, cluster.key_of("p1", 1))
    learn(cluster, later)
    for number, version in enumerate((cluster.ring.routed, 0)):
        send(server, op(key, Level.SESSION, 5), ring_version=version)
        await wait_until(lambda number=number: has(leader, number + 1), what="the leader has it")
        assert leader.held[-1][0] == op(key), "as a linearizable read"
    assert len(following.held) == 2


async def test_session_read_with_later_ring_waits_for_it(cluster: Servers) -> None:
    """The client's token may be of another partition. A token of 0 counts as a token of the partition that owns the key
    according to the client's ring."""
    server, key = cluster["n1"], cluster.key_of("p1")
    following = Following()
    server.dispatcher.host(P1, following)
    later = flipped(cluster.ring, key)
    token = send(server, commands.Get(key, Level.SESSION, 0), ring_version=later.routed)
    learn(cluster, later)
    assert await server.sink.wait(token) == [None]
    assert not following.held


async def test_operation_with_old_ring_is_rejected(cluster: Servers) -> None:
    key = cluster.key_of("p1")
    later = flipped(cluster.ring, key)
    learn(cluster, later, "n3")
    server, other = cluster["n3"], cluster.key_of("p2")
    server.dispatcher.submit_here(P2, commands.Get(other), server.sink, 9001, cluster.ring.routed)
    server.dispatcher.submit_here(P2, commands.Get(other), server.sink, 9002, later.partitions[P2].owned_at)
    moved, found = await server.sink.wait(9001, 9002)
    assert isinstance(moved, Moved)
    assert found is None


async def test_keys_of_several_partitions_are_not_read_in_one(tmp_path: Path) -> None:
    async with servers(tmp_path, ["n1"], partitions=2) as cluster:
        await cluster.lead("p1", "n1")
        await cluster.lead("p2", "n1")
        server, keys = cluster["n1"], [cluster.key_of("p1"), cluster.key_of("p2")]
        for key in keys:
            await result_of(server, commands.Put(key, b"v"))
            assert server.dispatcher.read_now([key, key]) == server.dispatcher.read_now([key]) * 2
        assert server.dispatcher.read_now(keys) is NOT_NOW
        assert server.dispatcher.read_now(keys[::-1]) is NOT_NOW
