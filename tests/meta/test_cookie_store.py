from dataclasses import replace

import pytest

from kvstore.errors import NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.store import ensure_path
from kvstore.types import BookieId
from tests.meta.drivers import FaultyStore

BOOKIE = BookieId("b1-1")
COOKIE = Cookie(bookie=BOOKIE, journal_dirs=("/j",), ledger_dirs=("/l",), instance_id="i")


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


async def test_a_cookie_is_kept_under_a_version(store: FaultyStore) -> None:
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
async def test_a_cookie_of_unknown_outcome_is_recognised(store: FaultyStore, kind: str) -> None:
    await ensure_path(store, paths.COOKIES)
    cookies = CookieStore(store)
    store.faults = [("create", "lost"), ("create", "lost"), ("create", kind)]
    assert await cookies.write(COOKIE, None) == 0
    assert (await cookies.read(BOOKIE))[0] == COOKIE


async def test_without_a_cookie_nobody_is_known(store: FaultyStore) -> None:
    assert await CookieStore(store).bookies() == []
