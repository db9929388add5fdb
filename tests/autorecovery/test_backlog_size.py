"""Of very many marked ledgers no call, and no turn of the event loop, looks at all at once. Counted by work, not by
time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvstore.autorecovery.backlog import Backlog
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import LedgerId
from tests.autorecovery.test_backlog import LONG, drawn

MANY = 5_000


class Counted(dict[Any, Any]):
    """Counts the values that are gone through."""

    looked = 0

    def values(self) -> Any:
        Counted.looked += len(self)
        return super().values()

    def items(self) -> Any:
        Counted.looked += len(self)
        return super().items()


def test_backlog_never_iterates_over_all_between_rounds() -> None:
    backlog = Backlog(Random(1))
    ledgers = [LedgerId(each) for each in range(MANY)]
    for ledger in ledgers:
        backlog.later(ledger, 0.0, LONG, is_unreadable=True)
    backlog._known, Counted.looked = Counted(backlog._known), 0
    backlog.all_due()
    assert backlog.next_due_s(1.0, 10.0) == 10.0
    assert backlog.unreadable == MANY
    drawn(backlog, ledgers, 1.0)
    assert Counted.looked == 0


def test_backlog_counts_unreadable_ledgers_across_rounds() -> None:
    backlog = Backlog(Random(1))
    a, b, c = (LedgerId(each) for each in range(3))
    for ledger in (a, b, c):
        backlog.later(ledger, 0.0, 1.0, is_unreadable=True)
        backlog.later(ledger, 0.0, 1.0, is_unreadable=True)
    backlog.later(a, 0.0, 1.0)
    assert backlog.unreadable == 2
    drawn(backlog, [a, b], 0.5)
    assert backlog.unreadable == 1, "c has no mark any more"
    backlog.done(b)
    assert backlog.unreadable == 0


def test_backlog_keeps_history_after_an_aborted_round() -> None:
    backlog = Backlog(Random(1))
    a, b = LedgerId(0), LedgerId(1)
    for ledger in (a, b):
        backlog.later(ledger, 0.0, LONG)
    backlog.begin()
    backlog.see(a, 1.0)
    assert drawn(backlog, [a, b], 1.0) == []
    assert backlog.next_due_s(1.0, 1_000.0) == LONG - 1.0


class Page(MemoryStore):
    """One page of a tree, full."""

    def __init__(self, page: str, names: list[str]) -> None:
        super().__init__()
        self._pages = {page: names}
        for path in (page, *_above(page)):
            above, _, name = path.rpartition("/")
            self._pages.setdefault(above, []).append(name)

    async def children(self, path: str) -> list[str]:
        return self._pages.get(path, [])


def _above(path: str) -> list[str]:
    found = []
    while (path := paths.parent(path)) != paths.LEDGERS:
        found.append(path)
    return found


async def most_in_a_turn(seen: list[object], work: Callable[[], Any]) -> int:
    """How many things one turn of the event loop adds to `seen` at most, while `work` goes through a tree."""
    most, task = 0, asyncio.ensure_future(work())
    while not task.done():
        before = len(seen)
        await asyncio.sleep(0)
        most = max(most, len(seen) - before)
    await task
    return most


async def test_ledger_listing_yields_within_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    understand = paths.ledger_of
    monkeypatch.setattr(paths, "ledger_of", lambda path: seen.append(path) or understand(path))
    store = Page(paths.parent(paths.ledger(LedgerId(1_000_000))), [f"L{each:04d}" for each in range(MANY)])
    found: list[list[LedgerId]] = []

    async def go() -> None:
        found.extend([page async for page in LedgerStore(store).pages()])

    assert await most_in_a_turn(seen, go) <= MANY / 10
    assert found == [[LedgerId(1_000_000 + each) for each in range(MANY)]]


async def test_mark_listing_yields_within_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    understand = paths.marks_of_page

    def marks_of_page(path: str, names: list[str]) -> list[LedgerId]:
        seen.extend(names)
        return understand(path, names)

    monkeypatch.setattr(paths, "marks_of_page", marks_of_page)
    page = paths.mark(LedgerId(1 << 20)).rsplit("/", 2)[0]
    store = Page(page, [f"{each:04x}" for each in range(MANY)])
    found: list[LedgerId] = []

    async def go() -> None:
        found.extend([ledger async for ledger in Underreplication(store).marked_ledgers()])

    assert await most_in_a_turn(seen, go) <= MANY / 5
    assert found == [LedgerId((1 << 20) + each) for each in range(MANY)]
