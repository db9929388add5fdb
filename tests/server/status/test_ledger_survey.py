"""The list of ledgers comes from the metadata store, and from the leaders while the store is unavailable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.env.nursery import TaskNursery
from kvstore.errors import InvalidRequest, MetadataUnavailable, NoSuchLedger, Unavailable
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import SessionState
from kvstore.proto.admin_pb2 import LedgersResponse
from kvstore.server.status import ledger_survey
from kvstore.server.status.ledger_survey import LEDGERS, METHOD, LedgerSurvey
from kvstore.types import EntryId, Fragment, LedgerId, LedgerMetadata, Quorum, Seq, ServerId
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.ports import ListedLedger
from tests.server.grpc.test_admin import B1, B2, B3, metadata
from tests.server.status.test_overview import N1, N2, N3, P1, P2, TOPOLOGY

PASSWORD = b"distinctive"


def log_of(*ids: int, epoch: int = 4) -> tuple[list[ListedLedger], LedgerMetadata]:
    """Return a log as its leader knows it: the last of these ledgers is open."""
    listed = LedgerList()
    for number in ids:
        listed = listed.with_ledger(LedgerId(number), Seq(10 * number), epoch=epoch, lease_ms=500)
    fragments = (Fragment(EntryId(0), (B1, B2, B3)),)
    return listed.infos, LedgerMetadata(LedgerId(ids[-1]), Quorum(3, 3, 2), fragments, password=PASSWORD, token=7)


class World:
    """The server n1, which is asked and leads p1. n2 leads p2, and n3 does not answer."""

    def __init__(self, store: MemoryStore) -> None:
        self.inner = store
        self.state = SessionState.CONNECTED
        self.away = LedgersResponse()
        leading = {P1: SimpleNamespace(known_ledgers=lambda: log_of(1, 2))}
        node: Any = SimpleNamespace(id=N1, store=self, topology=TOPOLOGY)
        links: Any = SimpleNamespace(call=self.call)
        hosting: Any = SimpleNamespace(leading=lambda: leading)
        self.leading = leading
        self.survey = LedgerSurvey(TaskNursery("test"), node, links, hosting)
        other: Any = SimpleNamespace(leading=lambda: {P2: SimpleNamespace(known_ledgers=lambda: log_of(7, epoch=6))})
        self.other = LedgerSurvey(TaskNursery("test"), node, links, other)

    def __getattr__(self, name: str) -> Any:
        if self.state is not SessionState.CONNECTED:
            raise AssertionError("it is known to be away, and is not asked")
        return getattr(self.inner, name)

    async def call(self, server: ServerId, partition: str, method: str, body: bytes, timeout_s: float) -> bytes:
        assert (partition, method) == (LEDGERS, METHOD)
        if server == N3:
            raise Unavailable("no answer")
        return await self.other.answer(N1, method, body)


@pytest.fixture
async def world() -> World:
    return World(await metadata())


async def test_foreign_ledgers_are_listed_only_on_the_full_page(world: World) -> None:
    assert [each.id for each in (await world.survey.ledgers()).ledgers] == [1, 2]
    everything = await world.survey.page(LedgerId(0))
    assert [(each.id, each.partition, each.state) for each in everything.ledgers] == [
        (1, "", "CLOSED"),
        (2, "", "OPEN"),
        (3, "", "OPEN"),
    ]
    assert not everything.from_leaders


async def test_unreadable_ledger_is_not_a_metadata_outage(world: World) -> None:
    await world.inner.set(paths.ledger(LedgerId(2)), b"spoilt", -1)
    found = await world.survey.ledger(LedgerId(2))
    assert (found.ledger.id, found.from_leaders) == (2, False)
    assert found.ledger.state.startswith("unreadable: ")
    states = {each.id: each.state for each in (await world.survey.page(LedgerId(0))).ledgers}
    assert states[2] == found.ledger.state


async def test_all_ledgers_are_listed_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_survey, "PAGE_MAX", 2)
    first = await world.survey.page(LedgerId(0))
    assert ([each.id for each in first.ledgers], first.next) == ([1, 2], 3)
    second = await world.survey.page(LedgerId(first.next))
    assert ([each.id for each in second.ledgers], second.HasField("next")) == ([3], False)


async def test_newest_ledgers_are_the_last_of_the_log(world: World) -> None:
    assert [each.id for each in (await world.survey.ledgers(P1, newest=1)).ledgers] == [2]


async def test_leaders_answer_while_metadata_store_is_down(
    world: World,
) -> None:
    world.state = SessionState.SUSPENDED
    told = await world.survey.ledgers()
    assert told.from_leaders
    assert [(each.partition, each.id, each.first_sequence, each.state) for each in told.ledgers] == [
        ("p1", 1, 10, ""),
        ("p1", 2, 20, "OPEN"),
        ("p2", 7, 70, "OPEN"),
    ]
    assert [list(each.bookies) for each in told.ledgers[2].fragments] == [[B1, B2, B3]]
    world.leading.clear()
    assert list((await world.survey.ledgers()).unknown) == ["p1"]
    with pytest.raises(MetadataUnavailable, match="no leader answers for the log of p1"):
        await world.survey.ledgers(P1)


async def test_pages_and_single_ledgers_come_from_leaders_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.state = SessionState.LOST
    monkeypatch.setattr(ledger_survey, "PAGE_MAX", 2)
    page = await world.survey.page(LedgerId(2))
    assert ([each.id for each in page.ledgers], page.HasField("next")) == ([2, 7], False)
    first = await world.survey.page(LedgerId(0))
    assert ([each.id for each in first.ledgers], first.next) == ([1, 2], 7)
    found = await world.survey.ledger(LedgerId(7))
    assert (found.ledger.partition, found.ledger.state, found.from_leaders) == ("p2", "OPEN", True)
    with pytest.raises(MetadataUnavailable, match="ledger 3: the metadata store is unavailable, and no leader"):
        await world.survey.ledger(LedgerId(3))


async def test_hanging_metadata_store_counts_as_unavailable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_survey, "READ_S", 0.0)
    assert (await world.survey.ledgers(P1)).from_leaders
    assert (await world.survey.ledger(LedgerId(1))).from_leaders


async def test_leader_of_later_epoch_is_believed_for_ledgers(world: World) -> None:
    world.state = SessionState.LOST
    world.leading[P2] = SimpleNamespace(known_ledgers=lambda: log_of(7, 8, epoch=5))
    assert [each.id for each in (await world.survey.ledgers(P2)).ledgers] == [7]
    world.leading[P2] = SimpleNamespace(known_ledgers=lambda: log_of(7, 8, epoch=7))
    assert [each.id for each in (await world.survey.ledgers(P2)).ledgers] == [7, 8]


async def test_answers_never_contain_a_ledger_password(world: World) -> None:
    world.state = SessionState.LOST
    assert PASSWORD not in (await world.survey.ledgers()).SerializeToString()


async def test_unknown_ledger_is_refused(world: World) -> None:
    with pytest.raises(NoSuchLedger):
        await world.survey.ledger(LedgerId(9))
    with pytest.raises(InvalidRequest, match="no partition p9; expected one of p1, p2"):
        await world.survey.ledgers("p9")
    with pytest.raises(InvalidRequest, match="expected the method led, got 'x'"):
        await world.survey.answer(N2, "x", b"")
