"""Operations are sent to the leader, on this server or another, also while it is unknown, moves or fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    RateExceeded,
    StoreError,
    Unavailable,
)
from kvstore.namespaces.rates import Rates
from kvstore.namespaces.table import Namespace
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Code, Level, Record, RequestId
from kvstore.partition.state.rows import record_of
from kvstore.partition.state.traits import home_key
from kvstore.server.config import Limits
from kvstore.server.peer import link as peer_link
from kvstore.server.routing import flight, router
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import Pending
from kvstore.types import PartitionId, ServerId
from tests.server.backends import Collector
from tests.server.servers import Server, Servers, servers
from tests.waiting import wait_until

P1 = PartitionId("p1")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    async with servers(tmp_path, ["n1", "n2"]) as started:
        yield started


_token = 0


async def result_of(server: Server, op: commands.Op, partition: str | None = None, ring_version: int = 0) -> Any:
    (result,) = await server.sink.wait(send(server, op, partition, ring_version))
    return result


def send(server: Server, op: commands.Op, partition: str | None = None, ring_version: int = 0) -> int:
    """Send a put; every second one is sent like those of a pipeline."""
    global _token
    _token += 1
    if _token % 2 and op.code == Code.PUT and partition is None and not ring_version:
        server.dispatcher._submit_puts([op], server.sink, (_token,))
    else:
        to = PartitionId(partition) if partition else None
        server.dispatcher.submit((op,), server.sink, (_token,), ring_version, to)
    return _token


async def test_forwarded_operations_are_answered_like_local_ones(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    for server in (cluster["n2"], cluster["n1"]):
        suffix = server.id.encode()
        k, n, b = b"k" + suffix, b"n" + suffix, b"b" + suffix
        version = await result_of(server, commands.Put(k, b"v"))
        assert version > 0
        found = await result_of(server, commands.Get(k))
        assert tuple(found[:3]) == (b"v", version, version)
        assert (await result_of(server, commands.Meta(k)))[0] == 1
        assert await result_of(server, commands.Get(b"absent")) is None
        assert (await result_of(server, commands.Increment(n, 5)))[0] == 5
        assert (await result_of(server, commands.Append(k, b"w")))[0] == 2
        assert await result_of(server, commands.Expire(k, 60_000, commands.Flag.RELATIVE_TTL)) is True
        request = RequestId(suffix * 8, 1, 1, server.dispatcher.progress(P1)[1])
        batch = commands.Batch(b, (commands.Put(b, b"1"), commands.Get(b)), request=request)
        version, record = await result_of(server, batch)
        assert version > 0
        assert record[0] == b"1"
        old = await result_of(server, commands.Put(b, b"2", flags=commands.Flag.RETURN_OLD))
        assert old[0] is True
        assert old[2][0] == b"1"
        refused = await result_of(server, commands.Put(b, b"3", flags=commands.Flag.IF_ABSENT))
        assert isinstance(refused, ConditionFailed)
        assert refused.version > 0
        items, after = await result_of(server, commands.Scan(b"", b"", 100), "p1")
        assert {k, n, b} <= {item[0] for item in items}
        assert after is None
        items, after = await result_of(server, commands.ScanTokens(0, 100), "p1")
        assert {k, n, b} <= {item[0] for item in items}
        assert await result_of(server, commands.Count(), "p1") >= 3
        assert await result_of(server, commands.Delete(k)) > 0
        assert await result_of(server, commands.DeleteRange(n, n + b"\x00"), "p1") == 1
    assert cluster["n1"].dispatcher.statistics()["forwarded_total"] > 10
    assert cluster["n2"].dispatcher.statistics()["forwarded_total"] == 0


async def test_forwarded_operations_keep_their_order(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    server = cluster["n1"]
    ops = [commands.Append(b"k", b"%d," % i) if i % 3 else commands.Put(b"k", b"%d," % i) for i in range(200)]
    await server.sink.wait(*(send(server, op) for op in ops))
    record = await result_of(server, commands.Get(b"k"))
    assert record[0] == b"198,199,"


async def test_operations_of_one_turn_leave_in_one_frame(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    server = cluster["n1"]
    await result_of(server, commands.Put(b"k", b"v"))
    before = cluster["n2"].hosted[P1].log.payloads[:]
    tokens = [send(server, commands.Put(b"k%d" % i, b"v")) for i in range(500)]
    await server.sink.wait(*tokens)
    entries = len(cluster["n2"].hosted[P1].log.payloads) - len(before)
    assert entries <= 2, f"500 operations of one turn came to the leader in {entries} groups"


async def test_read_now_works_only_for_settled_local_partition(
    cluster: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.lead("p1", "n2")
    leads, other = cluster["n2"].dispatcher, cluster["n1"].dispatcher
    await result_of(cluster["n2"], commands.Put(b"k", b"v"))
    found = leads.read_now([b"k"])
    assert isinstance(found, list)
    assert found[0] is not None
    assert record_of(found[0]).value == b"v"
    assert other.read_now([b"k"]) is commands.NOT_NOW
    assert leads.read_now([b"k", b"{k}absent"]) == [*found, None]
    assert other.read_now([b"k", b"{k}absent"]) is commands.NOT_NOW
    monkeypatch.setattr(leads, "_held_keys", {b"k": 1})
    assert leads.read_now([b"k"]) is commands.NOT_NOW, "a write that was sent back may be about to be done"
    assert leads.read_now([b"k", b"k"]) is commands.NOT_NOW


class Leaving(Collector):
    """A caller that may leave."""

    left = False

    @property
    def is_gone(self) -> bool:
        return self.left


async def test_waiting_reads_of_gone_clients_are_dropped(cluster: Servers) -> None:
    server, leaving = cluster["n1"], Leaving()
    ops = [commands.Get(b"k"), commands.Put(b"k", b"v"), commands.Meta(b"k")]
    for token, op in enumerate(ops):
        server.dispatcher.submit((op,), leaving, (token,))
    leaving.left = True
    await cluster.lead("p1", "n2")
    results = await leaving.wait(*range(len(ops)))
    assert [type(each) for each in results] == [Unavailable, int, Unavailable]
    assert server.dispatcher.statistics()["forwarded_total"] == 1


# docs/protocol.md N5
async def test_page_over_all_partitions_counts_once(tmp_path: Path) -> None:
    """Each partition's part used to count: with more partitions than a namespace's rate, no scan ever ended."""
    async with servers(tmp_path, ["n1"], partitions=5) as cluster:
        server, partitions = cluster["n1"], [f"p{number}" for number in range(1, 6)]
        for partition in partitions:
            await cluster.lead(partition, "n1")
        rates = Rates(lambda: 0.0, Counter())
        rates.take([Namespace(name="shop", prefix=b"shop/", ops_per_s=2)])
        server.dispatcher.rates = rates
        for op in (commands.Scan(b"shop/", b"shop0", 10), commands.Range(b"shop/", b"shop0", 10)):
            pages = [await result_of(server, op, partition) for partition in partitions]
            assert [each[0] for each in pages] == [[]] * 5
        assert rates.passed == {"shop": 2}
        owner = server.dispatcher.topology.ring.partition_of(b"shop/k")
        going_on = commands.Scan(b"shop/k", b"shop0", 10)
        assert isinstance(await result_of(server, going_on, owner), RateExceeded)
        assert isinstance(await result_of(server, commands.Get(b"shop/k")), RateExceeded)


# docs/protocol.md N5, Tx11
async def test_read_transaction_counts_each_operation_once(tmp_path: Path) -> None:
    """It looks at each key twice. A bucket that holds as many operations as it has keys must be enough."""
    async with servers(tmp_path, ["n1"], partitions=3) as cluster:
        server = cluster["n1"]
        partition_of = server.dispatcher.topology.ring.partition_of
        for number in (1, 2, 3):
            await cluster.lead(f"p{number}", "n1")
        keys = [b"shop/%d" % number for number in range(6)]
        assert len(set(map(partition_of, keys))) == 3
        for key in keys:
            await result_of(server, commands.Put(key, b"of " + key))
        rates = Rates(lambda: 0.0, Counter())
        rates.take([Namespace(name="shop", prefix=b"shop/", ops_per_s=6)])
        server.dispatcher.rates = rates
        reads = commands.Transact(keys[0], tuple(commands.Get(key) for key in keys))
        results, positions = await result_of(server, reads)
        assert [each[0] for each in results] == [b"of " + key for key in keys]
        assert sorted(partition for partition, _ in positions) == ["p1", "p2", "p3"]
        assert rates.passed == {"shop": 6}
        assert isinstance(await result_of(server, reads), RateExceeded)


# docs/protocol.md Tx1
@pytest.mark.parametrize("writes", [True, False])
async def test_transaction_over_partitions_with_a_lock_is_refused(tmp_path: Path, *, writes: bool) -> None:
    """Every endpoint submits its transactions here."""
    async with servers(tmp_path, ["n1"], partitions=3) as cluster:
        server = cluster["n1"]
        ops: list[commands.Op] = [commands.Get(b"k%d" % number) for number in range(9)]
        ops.append(commands.Put(b"{a}/leader/l/1", b"") if writes else commands.Get(b"{a}/leader/l/1"))
        refused = await result_of(server, commands.Transact(home_key(ops), tuple(ops)))
        assert isinstance(refused, InvalidRequest)
        assert str(refused).startswith("expected no key of a session, lock, election,")


async def test_operation_waits_for_a_leader(cluster: Servers) -> None:
    server = cluster["n1"]
    waiting = [send(server, commands.Put(b"k", b"%d" % i)) for i in range(10)]
    await cluster.lead("p1", "n2")
    assert all(isinstance(result, int) for result in await server.sink.wait(*waiting))
    assert (await result_of(server, commands.Get(b"k")))[0] == b"9", "what waits keeps its order"


async def test_operation_waiting_for_a_leader_times_out(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "WAIT_S", 0.2)
    result = await result_of(cluster["n1"], commands.Put(b"k", b"v"))
    assert isinstance(result, Unavailable)
    assert "p1 has no leader" in str(result)


async def test_waiting_operations_are_limited(tmp_path: Path) -> None:
    async with servers(tmp_path, ["n1"], limits=Limits(waiting_max=5)) as cluster:
        tokens = [send(cluster["n1"], commands.Put(b"k", b"v")) for _ in range(8)]
        results = await cluster["n1"].sink.wait(*tokens[5:])
        assert all(isinstance(result, Overloaded) for result in results)
        await cluster.lead("p1", "n1")
        assert all(isinstance(result, int) for result in await cluster["n1"].sink.wait(*tokens[:5]))


async def test_waiting_operations_are_limited_in_bytes(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = cluster["n1"]
    routing = server.dispatcher._router
    monkeypatch.setattr(routing.waiting, "_bytes_max", 4_500)
    large = [commands.Append(b"k", b"x" * 990), commands.Batch(b"k", (commands.Put(b"k", b"x" * 990),))]
    tokens = [send(server, large[number % 2]) for number in range(8)]
    results = await server.sink.wait(*tokens[5:])
    assert all(isinstance(result, Overloaded) for result in results)
    await cluster.lead("p1", "n1")
    assert not [result for result in await server.sink.wait(*tokens[:5]) if isinstance(result, StoreError)]
    monkeypatch.setattr(routing.routes, "is_settled", lambda *_: False)
    routing.routes.sent_to[P1] = ServerId("n2")
    tokens = [send(server, large[number % 2]) for number in range(5)]
    assert not server.sink.results.keys() & set(tokens), "there is room again"
    monkeypatch.undo()
    await server.sink.wait(*tokens)


async def test_operations_in_transit_are_limited_in_bytes(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await cluster.lead("p1", "n2")
    server = cluster["n1"]
    await result_of(server, commands.Put(b"k", b"v"))
    monkeypatch.setattr(flight, "BYTES_IN_FLIGHT_MAX", 3_000)
    replica.log.is_held = True
    large = [commands.Append(b"k", b"x" * 990), commands.Batch(b"k", (commands.Put(b"k", b"x" * 990),))]
    tokens = [send(server, large[number % 2]) for number in range(8)]
    await wait_until(lambda: has_arrived(cluster["n2"], 2), what="the first are at n2")
    assert server.links.statistics()["peer_operations_in_flight"] < 5
    replica.log.let_go()
    assert not [result for result in await server.sink.wait(*tokens) if isinstance(result, StoreError)]


async def test_future_leader_holds_forwarded_operations(cluster: Servers) -> None:
    replica = await cluster.lead("p1", "n2")
    replica.is_up = False
    token = send(cluster["n1"], commands.Put(b"k", b"v"))
    await wait_until(lambda: waits(cluster["n2"]), what="n2 holds it")
    replica.is_up = True
    (result,) = await cluster["n1"].sink.wait(token)
    assert isinstance(result, int)


async def waits(server: Server) -> bool:
    return server.dispatcher.statistics()["waiting_for_leader"] > 0


async def test_operation_at_former_leader_reaches_the_new_one(cluster: Servers) -> None:
    """n1 still takes n2 for the leader when the operation is sent. n2 refuses it and n1 looks again."""
    await cluster.lead("p1", "n2")
    await result_of(cluster["n1"], commands.Put(b"k", b"v"))
    cluster["n2"].dispatcher.host(P1, None)
    tokens = [send(cluster["n1"], commands.Put(b"k", b"%d" % i)) for i in range(20)]
    await wait_until(lambda: waits(cluster["n1"]), what="n2 has refused")
    await cluster.host("p1", "n1")
    tokens += [send(cluster["n1"], commands.Put(b"k", b"last"))]
    await cluster.announce_leader("p1", "n1")
    assert all(isinstance(result, int) for result in await cluster["n1"].sink.wait(*tokens))
    assert (await result_of(cluster["n1"], commands.Get(b"k")))[0] == b"last"


async def test_refused_operations_are_resent_before_later_ones(cluster: Servers) -> None:
    server = cluster["n1"]
    later = send(server, commands.Put(b"k", b"later"))
    flight = Flight(ServerId("n2"), 10)
    number = flight.begin(P1, Pending(7, commands.Put(b"k", b"earlier"), server.sink, 9001))
    server.dispatcher.take_refusals(flight, [(number, NotLeader("p1"))])
    await cluster.lead("p1", "n1")
    await server.sink.wait(later, 9001)
    assert (await result_of(server, commands.Get(b"k")))[0] == b"later"


async def test_held_peer_operations_are_refused_when_lead_moves(
    cluster: Servers,
) -> None:
    replica = await cluster.lead("p1", "n2")
    replica.is_up = False
    cluster["n2"].dispatcher.submit_here(P1, commands.Put(b"k", b"v"), cluster["n2"].sink, 78, 1)
    await cluster.lead("p1", "n1")
    (result,) = await cluster["n2"].sink.wait(78)
    assert isinstance(result, NotLeader)


async def test_server_never_forwards_peer_operations(cluster: Servers) -> None:
    await cluster.lead("p1", "n1")
    cluster["n2"].dispatcher.submit_here(P1, commands.Put(b"k", b"v"), cluster["n2"].sink, 77, 1)
    (result,) = await cluster["n2"].sink.wait(77)
    assert isinstance(result, NotLeader)
    assert result.leader == "n1"


async def test_stale_and_session_reads_use_local_replica(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    await result_of(cluster["n1"], commands.Put(b"k", b"there"))
    replica = await cluster.host("p1", "n1")
    cluster["n1"].dispatcher.submit_here(P1, commands.Put(b"k", b"here"), cluster["n1"].sink, 5000, 1)
    await cluster["n1"].sink.wait(5000)
    replica.is_up = False
    for level in (Level.STALE, Level.SESSION):
        assert (await result_of(cluster["n1"], commands.Get(b"k", level)))[0] == b"here"
    assert (await result_of(cluster["n1"], commands.Get(b"k", Level.LINEARIZABLE)))[0] == b"there"
    assert (await result_of(cluster["n1"], commands.Count(level=Level.STALE), "p1")) == 1


async def test_sent_writes_are_unknown_when_leader_dies(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    server = cluster["n1"]
    await result_of(server, commands.Put(b"k", b"old"))
    cluster["n2"].hosted[P1].log.is_held = True
    written = send(server, commands.Put(b"k", b"new"))
    await wait_until(lambda: has_arrived(cluster["n2"], 2), what="the write is at n2")
    await kill(cluster, "n2")
    await wait_until(lambda: has_lost(server, 1), what="n1 has noticed")
    read = send(server, commands.Get(b"k"))
    unsent = send(server, commands.Put(b"j", b"v"))
    (unknown,) = await server.sink.wait(written)
    assert isinstance(unknown, OutcomeUnknown)
    await cluster.lead("p1", "n1")
    value, version = await server.sink.wait(read, unsent)
    assert value is None, "the new leader's state is empty in this test"
    assert isinstance(version, int)


async def test_pending_reads_are_answered_by_next_leader(cluster: Servers) -> None:
    replica = await cluster.lead("p1", "n2")
    server = cluster["n1"]
    await result_of(server, commands.Put(b"k", b"v"))
    replica.log.is_held = True
    strict = send(server, commands.Get(b"k", Level.STRICT))
    await wait_until(lambda: has_arrived(cluster["n2"], 2), what="the read is at n2")
    await kill(cluster, "n2")
    await cluster.lead("p1", "n1")
    assert await server.sink.wait(strict) == [None]


async def has_lost(server: Server, links: int) -> bool:
    return server.links.lost_links >= links


async def has_arrived(server: Server, count: int) -> bool:
    return server.peers.operations >= count


async def kill(cluster: Servers, name: str) -> None:
    server = cluster.servers.pop(name)
    for connection in list(server.peers._connections.values()):
        connection.close()
    server.resp._listener.close()  # type: ignore[union-attr]
    for replica in server.hosted.values():
        replica.log.close_for_good()


async def test_stopping_server_finishes_and_accepts_nothing(cluster: Servers) -> None:
    replica = await cluster.lead("p1", "n2")
    server = cluster["n1"]
    await result_of(server, commands.Put(b"k", b"v"))
    replica.log.is_held = True
    written = send(server, commands.Put(b"k", b"w"))
    await wait_until(lambda: has_arrived(cluster["n2"], 2), what="the write is at n2")
    closing = asyncio.ensure_future(cluster["n2"].peers.close())
    await wait_until(lambda: is_leaving(server), what="n1 knows that n2 leaves")
    later = send(server, commands.Put(b"j", b"v"))
    replica.log.let_go()
    (version,) = await server.sink.wait(written)
    assert isinstance(version, int)
    await closing
    await cluster.lead("p1", "n1")
    assert isinstance((await server.sink.wait(later))[0], int)


async def is_leaving(server: Server) -> bool:
    return any(link._is_leaving for link in server.links.by_server.values())


async def test_waiting_operations_return_when_hosting_ends(cluster: Servers) -> None:
    replica = await cluster.lead("p1", "n2")
    replica.is_up = False
    tokens = [send(cluster["n1"], commands.Put(b"k", b"%d" % i)) for i in range(5)]
    await wait_until(lambda: waits(cluster["n2"]), what="they wait at n2")
    cluster["n2"].dispatcher.host(P1, None)
    await wait_until(lambda: waits(cluster["n1"]), what="they are back at n1")
    await cluster.lead("p1", "n1")
    assert all(isinstance(each, int) for each in await cluster["n1"].sink.wait(*tokens))


async def test_silent_leader_makes_writes_unknown_in_time(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await cluster.lead("p1", "n2")
    assert await result_of(cluster["n1"], commands.Get(b"k")) is None  # so that there is a link
    monkeypatch.setattr(peer_link, "OPERATION_TIMEOUT_S", 0.3)
    monkeypatch.setattr(peer_link, "SWEEP_S", 0.05)
    replica.log.is_held = True
    result = await result_of(cluster["n1"], commands.Put(b"k", b"v"))
    assert isinstance(result, OutcomeUnknown)
    assert "within 0.3 s" in str(result)
    replica.log.let_go()
    assert (await result_of(cluster["n1"], commands.Get(b"k")))[0] == b"v", "the late answer disturbs nothing"


async def test_silent_link_with_open_answers_is_closed(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "SILENCE_S", 0.3)
    monkeypatch.setattr(peer_link, "SWEEP_S", 0.05)
    replica = await cluster.lead("p1", "n2")
    replica.log.is_held = True
    for connection in cluster["n2"].peers._connections.values():
        connection.data_received = lambda data: None  # type: ignore[method-assign]  # as a stopped process
    token = send(cluster["n1"], commands.Put(b"k", b"v"))
    await wait_until(lambda: has_arrived(cluster["n2"], 1), what="the write is at n2")
    for connection in cluster["n2"].peers._connections.values():
        connection._write = lambda data: None  # type: ignore[method-assign]
    (result,) = await cluster["n1"].sink.wait(token)
    assert isinstance(result, OutcomeUnknown)
    assert cluster["n1"].links.statistics()["peer_links_lost_total"] == 1


async def test_values_beyond_one_frame_are_split(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    server = cluster["n1"]
    value = b"x" * (1 << 20)
    tokens = [send(server, commands.Put(b"k%d" % i, value)) for i in range(40)]
    results = await server.sink.wait(*tokens)
    assert not [each for each in results if isinstance(each, StoreError) and not isinstance(each, Overloaded)]
    reads = [send(server, commands.Get(b"k%d" % i)) for i in range(40)]
    found = [each for each in await server.sink.wait(*reads) if each is not None]
    assert found
    assert all(each[0] == value for each in found)


class Newer(commands.WriteOp, tag=99):
    """An operation that only servers of a later release know."""

    key: bytes


Newer.code = 99


async def test_malformed_operation_does_not_affect_neighbours(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    server, newer = cluster["n1"], cast(Any, Newer(b"k"))
    tokens = [
        send(server, commands.Increment(b"a", 1)),
        send(server, newer),
        send(server, commands.Increment(b"k", cast(Any, "text"))),
        send(server, commands.Batch(b"k", (newer,))),
        send(server, commands.Increment(b"b", 1)),
    ]
    first, *malformed, last = await server.sink.wait(*tokens)
    assert first[0] == last[0] == 1
    assert [type(each) for each in malformed] == [InvalidRequest] * 3
    assert server.links.lost_links == 0


async def test_progress_covers_every_answer_given_here(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    version = await result_of(cluster["n1"], commands.Put(b"k", b"v"))
    assert cluster["n1"].dispatcher.progress(P1) >= (version, 1)
    assert cluster["n2"].dispatcher.progress(P1) >= (version, 1)


async def test_results_never_arrive_inside_submit(cluster: Servers) -> None:
    await cluster.lead("p1", "n1")
    for op in (commands.Get(b"k"), commands.Put(b"k", b"v")):
        token = send(cluster["n1"], op)
        assert token not in cluster["n1"].sink.results
        await cluster["n1"].sink.wait(token)


def test_link_record_is_a_plain_tuple() -> None:
    assert Record._fields == ("value", "version", "created", "written_ms", "expires_ms")
