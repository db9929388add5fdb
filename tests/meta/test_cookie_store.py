from copy import deepcopy
from dataclasses import replace

import pytest

from kvstore.errors import NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import ensure_path
from kvstore.types import BookieId
from tests.meta.drivers import FaultyStore

BOOKIE = BookieId("b1-1")
COOKIE = Cookie(bookie=BOOKIE, journal_dirs=("/j",), ledger_dirs=("/l",), instance_id="i")


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


async def test_cookie_is_stored_under_a_version(store: FaultyStore) -> None:
    cookies = CookieStore(store)
    assert await cookies.write(COOKIE, None) == 0
    assert await cookies.read(BOOKIE) == (COOKIE, 0)
    moved = replace(COOKIE, ledger_dirs=("/m",))
    with pytest.raises(NodeExists):
        await cookies.write(moved, None)
    assert await cookies.write(moved, 0) == 1
    with pytest.raises(VersionConflict):
        await cookies.write(COOKIE, 0)
    with pytest.raises(VersionConflict):
        await cookies.delete(BOOKIE, 0)
    assert await cookies.bookies() == [BOOKIE]
    await cookies.delete(BOOKIE, 1)
    with pytest.raises(NoSuchNode):
        await cookies.read(BOOKIE)


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_cookie_of_unknown_outcome_is_recognised(store: FaultyStore, kind: str) -> None:
    await ensure_path(store, paths.COOKIES)
    cookies = CookieStore(store)
    store.faults = [("create", "lost"), ("create", "lost"), ("create", kind)]
    assert await cookies.write(COOKIE, None) == 0
    assert (await cookies.read(BOOKIE))[0] == COOKIE


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_cookie_is_deleted_together_with_its_age_or_not_at_all(store: FaultyStore, kind: str) -> None:
    cookies = CookieStore(store)
    await cookies.write(COOKIE, None)
    await cookies.set_age(BOOKIE, 7, None)
    with pytest.raises(VersionConflict):
        await cookies.delete(BOOKIE, 1)
    assert (await cookies.bookies(), await cookies.age(BOOKIE)) == ([BOOKIE], (7, 0))
    store.faults = [("multi", kind)]
    await cookies.delete(BOOKIE, 0)
    assert (await cookies.bookies(), await cookies.age(BOOKIE)) == ([], (0, None))
    with pytest.raises(NoSuchNode):
        await cookies.delete(BOOKIE, 0)


async def test_decommissioned_bookie_that_continues_leaves_no_age(store: FaultyStore) -> None:
    cookies = CookieStore(store)
    await cookies.write(COOKIE, None)
    await cookies.delete(BOOKIE, 0)
    with pytest.raises(NoSuchNode):
        await cookies.set_age(BOOKIE, 1, None)
    assert await cookies.age(BOOKIE) == (0, None)


class Lagging(MemoryStore):
    """At a server that shows the former state until a sync."""

    def __init__(self, before: MemoryTree, now: MemoryTree) -> None:
        super().__init__(before)
        self._now = now

    async def sync(self, path: str) -> None:
        self.tree = self._now


async def test_start_never_uses_an_older_cookie_or_age(store: FaultyStore) -> None:
    cookies = CookieStore(store)
    await cookies.write(COOKIE, None)
    await cookies.set_age(BOOKIE, 1, None)
    before = deepcopy(store.tree)
    await cookies.write(COOKIE, 0)
    await cookies.set_age(BOOKIE, 2, 0)
    assert await CookieStore(Lagging(before, store.tree)).read(BOOKIE) == (COOKIE, 1)
    assert await CookieStore(Lagging(before, store.tree)).age(BOOKIE) == (2, 1)


async def test_bookie_without_a_cookie_is_unknown(store: FaultyStore) -> None:
    assert await CookieStore(store).bookies() == []
