"""A survey ends in time if nodes do not answer, states why, is shared by its callers, and needs no metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstore.env.nursery import TaskNursery
from kvstore.errors import BookieError, InvalidRequest, MetadataUnavailable, NotLeader, PeerRefused
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.registration import RegisteredBookies
from kvstore.meta.store import SessionState
from kvstore.namespaces import Book, Namespace, NamespaceTable, UsageReport
from kvstore.namespaces.book import Amount
from kvstore.proto.admin_pb2 import ClientsReport, NodeReport
from kvstore.server.access.identities import Access
from kvstore.server.clock.clock_sync import ClockReport
from kvstore.server.config import NodeConfig
from kvstore.server.status import surveyor
from kvstore.server.status.surveyor import METHOD, STATUS, Surveyor
from kvstore.types import BookieId, PartitionId, ServerId
from tests.server.status.test_overview import N1, N2, N3, REGISTERED, TOPOLOGY, told
from tests.waiting import PATIENCE_S

FAR = BookieId("far-00")


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now(self) -> float:
        return self.seconds

    def date_ms(self) -> int:
        return round(self.seconds * 1000)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class World:
    """The node n1, whose peers and bookies answer as a test says."""

    def __init__(self, tmp_path: Any) -> None:
        self.clock = Clock()
        self.answers: dict[ServerId, Callable[[], Awaitable[bytes]]] = {}
        self.asked: list[ServerId] = []
        self.space: Callable[[], Awaitable[tuple[int, int]]] = self.roomy
        nothing: Any = SimpleNamespace(statistics=dict, loads=list, by_move=dict)
        store = SimpleNamespace(state=SessionState.CONNECTED)
        self.store = store
        self.namespaces: Any = SimpleNamespace(
            book=Book(), refusals=lambda: {"shop": {"keys": 4}}, refused_ago_s=lambda: {"shop": {"keys": 2.5}}
        )
        node: Any = SimpleNamespace(
            id=N1,
            version="0.1.0",
            zookeeper="zk:2181",
            store=store,
            is_open=True,
            is_draining=False,
            bookie=None,
            worker=None,
            auditor=None,
            resident_bytes=lambda: 7,
            tls=None,
            not_ready=list,
            replicas=dict,
            config=NodeConfig(id="n1", data_dir=tmp_path, secret_file=tmp_path / "s", zookeeper="zk:2181"),
            links=SimpleNamespace(call=self.call, refusals=lambda: {N2: "the link was refused"}),
            membership=SimpleNamespace(
                topology=TOPOLOGY,
                read_at=self.clock.now(),
                announcement=SimpleNamespace(member=TOPOLOGY.servers[N1]),
            ),
            access=Access(),
            clock_sync=SimpleNamespace(report=lambda: ClockReport(1, True)),
            versions=SimpleNamespace(cluster=2),
            namespaces=self.namespaces,
            load_sampler=nothing,
            progress=nothing,
            copy_count=SimpleNamespace(report=lambda: None),
            histograms=dict,
        )
        self.nursery = TaskNursery("survey")
        env: Any = SimpleNamespace(clock=self.clock, nursery=self.nursery, starved=lambda: 0.0)
        view: Any = SimpleNamespace(current=RegisteredBookies({FAR: "far:3181", **REGISTERED.writable}, {}))
        bookies: Any = SimpleNamespace(space=lambda _: self.space(), refusals=lambda: {FAR: "it closed the connection"})
        self.surveyor = Surveyor(env, node, view, bookies)

    async def roomy(self) -> tuple[int, int]:
        return 100, 40

    async def call(self, server: ServerId, partition: str, method: str, body: bytes, timeout_s: float) -> bytes:
        assert (partition, method) in ((STATUS, METHOD), (STATUS, "clients"))
        self.asked.append(server)
        return await self.answers[server]()


async def never() -> Any:
    await asyncio.Event().wait()


def saying(report: Message) -> Callable[[], Awaitable[bytes]]:
    async def answer() -> bytes:
        return report.SerializeToString()

    return answer


def failing(error: Exception) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        raise error

    return answer


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    async def cookies(_: CookieStore) -> list[BookieId]:
        return [BookieId("n2-00"), FAR]

    monkeypatch.setattr(CookieStore, "bookies", cookies)
    made = World(tmp_path)
    made.answers = {each: saying(told(each, p1=("serving", 1, 1))) for each in (N2, N3)}
    return made


async def test_silent_nodes_are_named_and_delay_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveyor, "CALL_S", 0.05)
    world.answers = {N2: never, N3: failing(PeerRefused("n3 refuses connections"))}
    world.space = never
    async with asyncio.timeout(PATIENCE_S):
        report = await world.surveyor.take()
    reasons = {each.id: each.no_answer for each in report.nodes}
    assert reasons == {"n1": "", "n2": "no answer within 0.05 s", "n3": "refuses connections"}
    assert [each.no_answer for each in report.bookies if each.id == FAR] == ["no answer within 0.05 s"]
    await world.nursery.close()


async def test_undecodable_answer_counts_as_none(world: World) -> None:
    world.answers[N2] = failing(BookieError("x"))
    world.answers[N3] = saying(told(N3))

    async def rubbish() -> bytes:
        return b"\xff\xff"

    world.answers[N2] = rubbish
    report = await world.surveyor.take()
    assert report.nodes[1].no_answer
    assert not report.nodes[2].no_answer
    await world.nursery.close()


async def test_server_of_old_release_counts_as_up(world: World) -> None:
    world.answers[N2] = failing(NotLeader(STATUS))
    report = await world.surveyor.take()
    assert (report.nodes[1].no_answer, report.nodes[1].report.version) == ("", "0.1.0")
    await world.nursery.close()


async def test_concurrent_callers_share_one_survey(world: World) -> None:
    found = await asyncio.gather(*(world.surveyor.take() for _ in range(20)))
    assert found[0].cluster_version == 2, "as the node that answers knows it"
    assert sorted(world.asked) == [N2, N3]
    assert all(each is found[0] for each in found)
    world.clock.advance(surveyor.CACHED_S)
    await world.surveyor.take()
    assert len(world.asked) == 4
    await world.nursery.close()


async def test_known_bookies_stay_known_during_metadata_outage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.id for each in (await world.surveyor.take()).bookies if each.state == "away"] == ["n2-00"]

    async def lost(_: CookieStore) -> list[BookieId]:
        raise MetadataUnavailable("gone")

    monkeypatch.setattr(CookieStore, "bookies", lost)
    for state in (SessionState.CONNECTED, SessionState.SUSPENDED):
        world.store.state = state
        world.clock.advance(surveyor.COOKIES_S)
        report = await world.surveyor.take()
        assert [each.id for each in report.bookies if each.state == "away"] == ["n2-00"]
    assert report.metadata.state == "suspended"
    assert report.ring.age_s == 2 * surveyor.COOKIES_S
    await world.nursery.close()


async def test_servers_answer_with_their_own_report_only(world: World) -> None:
    report = NodeReport.FromString(world.surveyor.answer(N2, METHOD, b""))
    assert (report.id, report.resident_bytes, report.metadata.address) == ("n1", 7, "zk:2181")
    with pytest.raises(InvalidRequest, match="expected the method node, got 'all'"):
        world.surveyor.answer(N2, "all", b"")
    await world.nursery.close()


async def test_details_of_all_servers_name_those_that_report_nothing(world: World) -> None:
    own, other = ClientsReport(counts={"streams": 1}), ClientsReport(counts={"streams": 2})
    world.surveyor.details = {"clients": lambda: own}
    world.answers = {N2: saying(other), N3: failing(PeerRefused("n3 refuses connections"))}
    assert await world.surveyor.details_of_all("clients", ClientsReport) == (
        {"n1": own, "n2": other}, {"n3": "refuses connections"},
    )  # fmt: skip
    world.answers[N2] = failing(InvalidRequest("expected the method node, got 'clients'"))
    _, silent = await world.surveyor.details_of_all("clients", ClientsReport)
    assert silent["n2"] == "its release does not report this"
    assert ClientsReport.FromString(world.surveyor.answer(N2, "clients", b"")) == own
    await world.nursery.close()


async def test_namespaces_are_reported_without_metadata_store(world: World) -> None:
    world.store.state = SessionState.SUSPENDED
    book = world.namespaces.book
    book.take(NamespaceTable(namespaces=(Namespace(name="shop", prefix=b"shop/", keys_max=10),)))
    book.take_reports([UsageReport(PartitionId("p1"), 1, {"shop": Amount(9, 90)})])
    world.answers = {N2: saying(NodeReport(id=N2)), N3: saying(NodeReport(id=N3))}
    (found,) = (await world.surveyor.take()).namespaces
    assert (found.name, found.prefix, found.keys, found.bytes, found.limits.keys_max) == ("shop", b"shop/", 9, 90, 10)
    assert (found.refused, found.refused_ago_s) == ({"keys": 4}, {"keys": 2.5})


async def test_report_names_refusing_peers_and_users_named_like_it(world: World) -> None:
    own = world.surveyor.own()
    assert [(each.by, each.reason) for each in own.refused_by] == [
        (N2, "the link was refused"), (FAR, "it closed the connection"),
    ]  # fmt: skip
    assert own.users_like_nodes == []
