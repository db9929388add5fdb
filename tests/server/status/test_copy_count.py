"""The server that counts copies, with a metadata store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.env.real import real_env
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.registration import RegisteredBookies
from kvstore.meta.store import SessionState, ensure_path
from kvstore.proto.admin_pb2 import CopiesReport
from kvstore.server.status import copy_count as module
from kvstore.server.status.copy_count import CopyCount
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum, ServerId
from kvstore.wal import census
from tests.waiting import wait_until

A, B, C = (BookieId(each) for each in "abc")
N1, N2 = ServerId("n1"), ServerId("n2")


class Counter:
    """The first of two servers, three bookies, and ledgers of another client."""

    def __init__(self, root: Path) -> None:
        self.env, self.store = real_env(root, name="count"), MemoryStore()
        self.view: Any = SimpleNamespace(current=RegisteredBookies({A: "a:1", B: "b:1", C: "c:1"}, {}))
        self.topology = SimpleNamespace(servers={N1: None, N2: None})
        self.state = SessionState.CONNECTED
        store = self.store

        class Store:
            """The store, whose session a test ends."""

            state = property(lambda _: self.state)

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        node: Any = SimpleNamespace(id=N1, store=Store(), topology=self.topology)
        self.count = CopyCount(self.env, node, self.view)

    async def make(self, number: int, *ensemble: BookieId) -> None:
        fragment = Fragment(EntryId(0), ensemble or (A, B, C))
        made = LedgerMetadata(LedgerId(number), Quorum(3, 3, 2), (fragment,), token=1)
        await LedgerStore(self.store).create(made.closed(EntryId(9), 100))

    def lose(self, bookie: BookieId) -> None:
        left = {each: at for each, at in self.view.current.writable.items() if each != bookie}
        self.view.current = RegisteredBookies(left, {})

    async def until(self, condition: Callable[[CopiesReport], object]) -> CopiesReport:
        async def is_so() -> bool:
            found = self.count.report()
            return found is not None and bool(condition(found))

        await wait_until(is_so)
        found = self.count.report()
        assert found is not None
        return found


@pytest.fixture
async def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counter]:
    monkeypatch.setattr(module, "CHECK_S", 0.005)
    monkeypatch.setattr(census, "REST_MIN_S", 0.01)
    made = Counter(tmp_path)
    yield made
    await made.count.close()
    await made.env.nursery.close()


async def test_copies_are_missing_while_a_bookie_is_down(counter: Counter) -> None:
    for number in range(5):
        await counter.make(number)
    assert counter.count.report() is None
    counter.count.start()
    found = await counter.until(lambda report: report.ledgers == 5)
    assert (found.lacking, found.foreign) == (0, 5)
    counter.lose(C)
    found = await counter.until(lambda report: report.lacking == 5)
    assert [(each.bookie, each.closed, each.lacking) for each in found.away] == [(C, 5, 5)]
    d = BookieId("d")
    for number in range(5):
        await LedgerStore(counter.store).update(
            LedgerId(number), lambda metadata: metadata.with_ensemble(EntryId(0), (A, B, d))
        )
    counter.view.current = RegisteredBookies({**counter.view.current.writable, d: "d:1"}, {})
    await counter.until(lambda report: report.lacking == 0)


async def test_ledger_created_after_the_count_is_counted_later(counter: Counter) -> None:
    await ensure_path(counter.store, paths.LEDGERS)
    counter.count.start()
    await counter.until(lambda report: report.ledgers == 0)
    await counter.make(7)
    counter.lose(B)
    await counter.until(lambda report: report.lacking == 1)


async def test_only_the_first_server_counts(counter: Counter) -> None:
    counter.topology.servers = {ServerId("n0"): None, N1: None}
    counter.count.start()
    await counter.make(7)
    counter.topology.servers = {N1: None}
    await counter.until(lambda report: report.ledgers == 1)
    counter.topology.servers = {ServerId("n0"): None, N1: None}

    async def is_gone() -> bool:
        return counter.count.report() is None

    await wait_until(is_gone)


async def test_last_count_stays_while_metadata_store_is_down(counter: Counter) -> None:
    await counter.make(7)
    counter.count.start()
    await counter.until(lambda report: report.ledgers == 1)
    counter.state = SessionState.SUSPENDED
    first = await counter.until(lambda report: report.age_s > 0)
    second = await counter.until(lambda report: report.age_s > first.age_s)
    assert second.ledgers == 1, "it is shown with its age"


async def test_ledger_with_damaged_metadata_is_counted_separately(
    counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """Each count also used to log that it was not audited: every 10 s while a bookie was away."""
    await counter.make(7)
    await counter.make(8)
    await counter.store.set(paths.ledger(LedgerId(8)), b"nonsense", -1)
    counter.count.start()
    found = await counter.until(lambda report: report.ledgers)
    assert (found.ledgers, found.unreadable) == (1, 1)
    assert "not audited" not in caplog.text
