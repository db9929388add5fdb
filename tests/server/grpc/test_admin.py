"""The Admin service over a real loopback connection, on metadata in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvstore import versions
from kvstore.env import Env
from kvstore.env.log_config import LogOutput
from kvstore.env.log_output import Output
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.nursery import TaskNursery
from kvstore.env.slow_log import SlowLog, hash_of
from kvstore.errors import InvalidRequest, NoSuchLedger, Overloaded, StoreError, Unavailable
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.namespaces import Book
from kvstore.partition.election.ranking import Published
from kvstore.proto import admin_pb2, admin_pb2_grpc
from kvstore.rpc import calls
from kvstore.rpc.channels import channel_options
from kvstore.rpc.server import GrpcServer
from kvstore.rpc.status import from_rpc_error
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.changes import AdminChanges
from kvstore.server.access.identities import Access
from kvstore.server.grpc import admin
from kvstore.server.grpc.admin import Admin, numbers
from kvstore.server.grpc.audit import Audited
from kvstore.server.status.ledger_survey import LedgerSurvey
from kvstore.types import (
    BookieId,
    EntryId,
    Fragment,
    LedgerId,
    LedgerMetadata,
    PartitionId,
    Quorum,
    Seq,
    ServerId,
)
from kvstore.wal.lists import LedgerLists
from tests.client.model import Endpoint, ModelCluster, View
from tests.client.serving import ModelClock
from tests.waiting import PATIENCE_S

P1, P2 = PartitionId("p1"), PartitionId("p2")
B1, B2, B3 = BookieId("b1"), BookieId("b2"), BookieId("b3")


class Source:
    """A node without a server behind it."""

    id = ServerId("n1")
    version = "9.9"
    zookeeper = "zk:2181/kvstore"
    is_draining = False
    rings: Any = None
    versions = versions.FIXED

    def __init__(self, store: MemoryStore, topology: View) -> None:
        self.store, self.topology = store, topology
        self.held = asyncio.Event()
        nobody: Any = SimpleNamespace(leading=dict, call=self.silent)
        self.ledger_survey = LedgerSurvey(TaskNursery("test"), self, nobody, nobody)
        self.access = Access()
        self.namespaces = SimpleNamespace(book=Book(), refusals=dict, uncounted=tuple)
        self.log_output = Output(LogOutput())
        self.env = SimpleNamespace(slow=SlowLog(100, lambda: 1.0, lambda: 5_000))

    async def silent(self, *_: Any) -> bytes:
        raise Unavailable("no answer")

    def replicas(self) -> Mapping[PartitionId, Mapping[str, Any]]:
        return {P1: {"role": "serving", "seq": 70, "keys": 5, "leading": {"lease_s": 0.4}, "failure": None}}

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        return {"server": {"connections": 3, "name": "text"}}

    async def drain(self) -> list[PartitionId]:
        await self.held.wait()
        return [P1]

    async def undrain(self) -> bool:
        if not self.held.is_set():
            raise Unavailable("node n1 stops")
        return True


async def metadata() -> MemoryStore:
    """Two ledgers of p1's log, one closed; a ledger that is in no list; the published states of two replicas."""
    store = MemoryStore()
    ledgers = LedgerStore(store)
    quorum = Quorum(3, 3, 2)
    for number in (1, 2, 3):
        fragments = (Fragment(EntryId(0), (B1, B2, B3)),)
        opened = LedgerMetadata(LedgerId(number), quorum, fragments, ctime_ms=5, token=7)
        version = await ledgers.create(opened)
        if number == 1:
            await ledgers.write(opened.closed(EntryId(41), 4_100), version)
    lists = LedgerLists(store)
    for number, first in ((1, 1), (2, 43)):
        listed, version = await lists.make(P1)
        grown = listed.with_ledger(LedgerId(number), Seq(first), epoch=number, lease_ms=500)
        await lists.write(P1, grown, version)
    await ensure_path(store, paths.partition_replicas(P1))
    await ensure_path(store, paths.partition_replicas(P2))
    for server, seq in (("n1", 60), ("n2", 50)):
        path = paths.partition_replica(P1, ServerId(server))
        await store.create(path, Published(Seq(seq), Seq(seq), 2, "x").encode(), ephemeral=True)
    await ensure_path(store, paths.READONLY)
    await ensure_path(store, paths.COOKIES)
    return store


@pytest.fixture
async def source() -> Source:
    cluster = ModelCluster(servers=3, partitions=2)
    leaders = {P1: (ServerId("n1"), 2), P2: (ServerId("n2"), 4)}
    servers = {ServerId(each): Endpoint(f"{each}:1", f"{each}:2", f"{each}:3", "east") for each in ("n1", "n2")}
    return Source(await metadata(), View(cluster.ring, leaders, servers))


@pytest.fixture
async def stub(source: Source) -> AsyncIterator[Any]:
    nothing: Any = None
    nursery = TaskNursery("admin")
    env = Env(ModelClock(), Random(1), nothing, nothing, nursery, nothing)
    backend: Any = SimpleNamespace(on_topology=lambda changed: None)
    admin, audit = Admin(env, source, backend), AuditLog(env.clock.now, env.clock.date_ms, AuditLines())

    def audited(server: grpc.aio.Server) -> grpc.aio.Server:
        return cast(grpc.aio.Server, Audited(server, env.clock.now, audit, AdminChanges(env, audit)))

    register = [lambda each: admin_pb2_grpc.add_AdminServicer_to_server(admin, audited(each))]
    server = GrpcServer(["kvstore.v1.Admin"], register)
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield admin_pb2_grpc.AdminStub(channel)
    await server.stop(0)
    await nursery.close()


async def failure_of(call: Any) -> StoreError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    failure: Any = caught.value
    return from_rpc_error(failure)


async def test_status_shows_nodes_that_are_down(stub: Any) -> None:
    status = await stub.Status(admin_pb2.StatusRequest(), timeout=PATIENCE_S)
    assert (status.server, status.version, status.ring_version, status.metadata_connected) == ("n1", "9.9", 1, True)
    assert [(node.id, node.alive, list(node.leads), node.resp) for node in status.nodes] == [
        ("n1", True, ["p1"], "n1:2"),
        ("n2", True, ["p2"], "n2:2"),
        ("n3", False, [], ""),
    ]
    assert dict(status.statistics) == {"server.connections": 3.0}


async def test_surveys_of_the_metadata_store_are_bounded(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each survey reads every ledger's metadata: many at once keep the metadata store from others."""
    monkeypatch.setattr(calls, "FEW", 2)
    begun, resume = asyncio.Event(), asyncio.Event()

    async def survey(store: MemoryStore) -> admin_pb2.BookiesResponse:
        begun.set()
        await resume.wait()
        return admin_pb2.BookiesResponse()

    monkeypatch.setattr(admin, "_bookies", survey)
    first = asyncio.ensure_future(stub.Bookies(admin_pb2.BookiesRequest(), timeout=PATIENCE_S))
    await begun.wait()
    for call, request in (
        (stub.Bookies, admin_pb2.BookiesRequest()),
        (stub.Ledgers, admin_pb2.LedgersRequest()),
        (stub.Partitions, admin_pb2.PartitionsRequest()),
        (stub.RingStatus, admin_pb2.RingStatusRequest()),
        (stub.Loads, admin_pb2.LoadsRequest()),
    ):
        assert isinstance(await failure_of(call(request, timeout=PATIENCE_S)), Overloaded)
    await stub.Status(admin_pb2.StatusRequest(), timeout=PATIENCE_S)
    resume.set()
    await first
    await stub.Ledgers(admin_pb2.LedgersRequest(), timeout=PATIENCE_S)


async def test_ring_shows_shares_and_tokens(stub: Any, source: Source) -> None:
    ring = await stub.Ring(admin_pb2.RingRequest(), timeout=PATIENCE_S)
    assert [(each.id, each.leader) for each in ring.partitions] == [("p1", "n1"), ("p2", "n2")]
    assert sum(each.share for each in ring.partitions) == pytest.approx(1)
    assert list(ring.tokens) == list(source.topology.ring.tokens)


async def test_partitions_show_the_freshest_state_of_each_replica(stub: Any) -> None:
    p1, p2 = (await stub.Partitions(admin_pb2.PartitionsRequest(), timeout=PATIENCE_S)).partitions
    assert (p1.leader, p1.epoch, list(p1.ledgers), list(p2.ledgers)) == ("n1", 2, [1, 2], [])
    replicas = {each.server: each for each in p1.replicas}
    assert {id: (each.role, each.sequence, each.reachable) for id, each in replicas.items()} == {
        "n1": ("serving", 70, True),
        "n2": ("follower", 50, True),
        "n3": ("follower", 0, False),
    }
    assert dict(replicas["n1"].statistics) == {"seq": 70.0, "keys": 5.0, "leading.lease_s": 0.4}


async def test_ledgers_of_a_partition_are_in_log_order(stub: Any) -> None:
    first, second = (await stub.Ledgers(admin_pb2.LedgersRequest(partition="p1"), timeout=PATIENCE_S)).ledgers
    assert (first.id, first.state, first.last_entry, first.length, first.first_sequence) == (1, "CLOSED", 41, 4_100, 1)
    assert (second.id, second.state, second.HasField("last_entry"), second.epoch) == (2, "OPEN", False, 2)
    assert list(second.fragments[0].bookies) == ["b1", "b2", "b3"]
    assert len((await stub.Ledgers(admin_pb2.LedgersRequest(), timeout=PATIENCE_S)).ledgers) == 2


async def test_ledger_without_a_list_is_shown_by_its_id(stub: Any) -> None:
    ledger = (await stub.Ledger(admin_pb2.LedgerRequest(ledger=3), timeout=PATIENCE_S)).ledger
    assert (ledger.id, ledger.HasField("first_sequence"), ledger.ack_quorum) == (3, False, 2)
    assert isinstance(
        await failure_of(stub.Ledger(admin_pb2.LedgerRequest(ledger=9), timeout=PATIENCE_S)), NoSuchLedger
    )


async def test_unknown_partition_is_refused_with_the_known_ones(stub: Any) -> None:
    error = await failure_of(stub.Ledgers(admin_pb2.LedgersRequest(partition="p9"), timeout=PATIENCE_S))
    assert isinstance(error, InvalidRequest)
    assert "p1, p2" in str(error)


async def test_bookies_named_by_ledgers_are_shown_when_lost(stub: Any) -> None:
    bookies = (await stub.Bookies(admin_pb2.BookiesRequest(), timeout=PATIENCE_S)).bookies
    assert [(each.id, each.state, each.ledgers) for each in bookies] == [(b, "lost", 3) for b in ("b1", "b2", "b3")]


async def test_drain_waits_until_no_partition_is_led(stub: Any, source: Source) -> None:
    source.held.set()
    assert list((await stub.Drain(admin_pb2.DrainRequest(timeout_s=5), timeout=PATIENCE_S)).handed_over) == ["p1"]


async def test_drain_reports_its_timeout(stub: Any) -> None:
    error = await failure_of(stub.Drain(admin_pb2.DrainRequest(timeout_s=0.05), timeout=PATIENCE_S))
    assert isinstance(error, Unavailable)


async def test_undrain_ends_a_drain_and_fails_while_the_node_stops(stub: Any, source: Source) -> None:
    error = await failure_of(stub.Undrain(admin_pb2.UndrainRequest(), timeout=PATIENCE_S))
    assert isinstance(error, Unavailable)
    source.held.set()
    assert (await stub.Undrain(admin_pb2.UndrainRequest(), timeout=PATIENCE_S)).was_draining


def test_nested_statistics_get_dotted_names() -> None:
    assert numbers({"a": {"b": 1, "c": {"d": 2.5}}, "e": True, "f": "text", "g": None, "h": [1]}) == {
        "a.b": 1.0,
        "a.c.d": 2.5,
        "e": 1.0,
    }


async def test_impossible_ledger_id_is_refused(stub: Any) -> None:
    for ledger in (2**63, 2**64 - 1):
        error = await failure_of(stub.Ledger(admin_pb2.LedgerRequest(ledger=ledger), timeout=PATIENCE_S))
        assert isinstance(error, InvalidRequest)


async def test_log_level_is_set_shown_and_reset(stub: Any) -> None:
    async def levels(logger: str, level: str) -> dict[str, str]:
        request = admin_pb2.LogLevelRequest(logger=logger, level=level)
        return dict((await stub.LogLevel(request, timeout=PATIENCE_S)).levels)

    logger = logging.getLogger("kvstore.server.grpc")
    assert await levels("", "") == {"kvstore": "INFO"}
    assert await levels(logger.name, "DEBUG") == {"kvstore": "INFO", logger.name: "DEBUG"}
    assert logger.level == logging.DEBUG
    assert await levels(logger.name, "") == {"kvstore": "INFO"}
    assert logger.level == logging.NOTSET


@pytest.mark.parametrize(
    ("logger", "level", "said"),
    [
        ("grpc", "DEBUG", "expected the logger kvstore"),
        ("kvstore", "loud", "expected one of DEBUG"),
        ("", "INFO", "a logger"),
    ],
)
async def test_unknown_log_level_is_refused(stub: Any, logger: str, level: str, said: str) -> None:
    request = admin_pb2.LogLevelRequest(logger=logger, level=level)
    failure = await failure_of(stub.LogLevel(request, timeout=PATIENCE_S))
    assert isinstance(failure, InvalidRequest)
    assert said in str(failure)


async def test_slow_log_is_shown_newest_first_with_parts_and_hashes(stub: Any, source: Source) -> None:
    slow = source.env.slow
    slow.note("leader", "write", 0.25, key=b"a", partition="p1", operations=3, queue=0.05, log=0.2)
    slow.note("endpoint", "GET", 0.5, key=b"b")
    answer = await stub.SlowLog(admin_pb2.SlowLogRequest(), timeout=PATIENCE_S)
    assert (answer.slow_ms, answer.total) == (100, 4)
    get, write = answer.operations
    assert (get.at, get.operation, get.key, get.took_ms, get.operations) == ("endpoint", "GET", hash_of(b"b"), 500, 1)
    assert dict(write.parts) == {"queue": 50, "log": 200}
    assert (write.partition, write.operations, write.date_ms) == ("p1", 3, 5_000)
    of_a = await stub.SlowLog(admin_pb2.SlowLogRequest(key=hash_of(b"a")), timeout=PATIENCE_S)
    assert [each.operation for each in of_a.operations] == ["write"]
    last = await stub.SlowLog(admin_pb2.SlowLogRequest(count=1), timeout=PATIENCE_S)
    assert [each.operation for each in last.operations] == ["GET"]


async def test_profile_has_stacks_of_functions_by_thread(stub: Any) -> None:
    answer = await stub.Profile(admin_pb2.ProfileRequest(seconds=0.2, rate=100), timeout=PATIENCE_S)
    assert answer.samples > 0
    stacks = [(each.thread, [answer.frames[place] for place in each.frames]) for each in answer.stacks]
    assert any(thread == "MainThread" and names for thread, names in stacks)


async def test_profile_without_a_duration_is_refused(stub: Any) -> None:
    failure = await failure_of(stub.Profile(admin_pb2.ProfileRequest(), timeout=PATIENCE_S))
    assert isinstance(failure, InvalidRequest)
