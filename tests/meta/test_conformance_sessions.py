"""The promises of every driver of the metadata store about watches and about sessions that break, expire and end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvstore.errors import MetadataUnavailable
from kvstore.meta.store import MetadataStore, SessionState, ensure_path
from tests.meta.drivers import Driver, Hint, States, let_run

CHANGES: dict[str, Callable[[MetadataStore], Awaitable[object]]] = {
    "set": lambda store: store.set("/d", b"1", 0),
    "child created": lambda store: store.create("/d/new"),
    "child deleted": lambda store: store.delete("/d/old", 0),
    "created": lambda store: store.create("/absent"),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_watch_is_called_after_a_change(what: str, store: MetadataStore, other: MetadataStore) -> None:
    await ensure_path(store, "/d/old")
    hint = Hint()
    store.watch("/absent" if what == "created" else "/d", hint)
    await store.sync("/d")
    await let_run()
    await CHANGES[what](other)
    await hint.wait()


async def test_watch_is_called_after_a_delete_and_after_the_next_create(
    store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a")
    hint = Hint()
    store.watch("/a", hint)
    await store.sync("/a")
    await other.delete("/a", 0)
    await hint.wait()
    await store.sync("/a")
    await other.create("/a")
    await hint.wait()
    await store.sync("/a")
    await other.create("/a/b")
    await hint.wait()


async def test_reader_that_reads_when_called_ends_with_the_last_value(
    store: MetadataStore, other: MetadataStore
) -> None:
    """However the changes, the calls and the re-arming of watches interleave."""
    await store.create("/a", b"0")
    hint = Hint()
    store.watch("/a", hint)
    seen, _ = await store.get("/a")
    for version in range(200):
        await other.set("/a", b"%d" % (version + 1), version)
        if version % 7 == 0:
            await hint.wait()
            seen = (await store.get("/a"))[0]
    while seen != b"200":
        await hint.wait()
        seen = (await store.get("/a"))[0]


async def test_both_watches_of_one_path_are_called_and_a_closed_one_is_not(store: MetadataStore) -> None:
    await store.create("/a")
    first, second, closed = Hint(), Hint(), Hint()
    store.watch("/a", first)
    watch = store.watch("/a", closed)
    store.watch("/a", second)
    await store.sync("/a")
    watch.close()
    calls = closed.calls
    await store.set("/a", b"1", 0)
    await first.wait()
    await second.wait()
    await store.sync("/a")
    await let_run()
    assert closed.calls == calls


async def test_closing_a_watch_twice_is_allowed(store: MetadataStore) -> None:
    watch = store.watch("/a", Hint())
    watch.close()
    watch.close()


async def test_watch_may_close_itself_when_called(store: MetadataStore) -> None:
    await store.create("/a")
    hint = Hint()

    def once() -> None:
        hint()
        watch.close()

    watch = store.watch("/a", once)
    await store.sync("/a")
    await store.set("/a", b"1", 0)
    await hint.wait()
    await store.set("/a", b"2", 1)
    await store.sync("/a")
    await let_run()
    assert hint.calls == 1


async def test_every_watch_is_called_and_works_after_a_broken_connection(
    driver: Driver, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a")
    hint, absent = Hint(), Hint()
    store.watch("/a", hint)
    store.watch("/absent", absent)
    await store.sync("/a")
    await driver.blink(store)
    await hint.wait()
    await absent.wait()
    await store.sync("/a")
    await other.set("/a", b"1", 0)
    await hint.wait()
    await other.create("/absent")
    await absent.wait()


async def test_broken_connection_keeps_the_session_and_its_ephemerals(
    driver: Driver, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/e", ephemeral=True)
    session, states = store.session, States(store)
    await driver.blink(store)
    await states.wait_for(SessionState.CONNECTED)
    assert states.seen == [SessionState.SUSPENDED, SessionState.CONNECTED]
    assert store.session == session
    await other.sync("/e")
    assert (await other.get("/e"))[1].owner == session


async def test_expired_session_is_lost_and_replaced(driver: Driver, store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/e", ephemeral=True)
    await store.create("/p")
    session, states = store.session, States(store)
    await driver.expire(store)
    await states.wait_for(SessionState.CONNECTED)
    assert states.seen[-2:] == [SessionState.LOST, SessionState.CONNECTED]
    assert store.session not in (0, session)
    await other.sync("/")
    names = await other.children("/")
    assert "e" not in names
    assert "p" in names
    await store.create("/e", ephemeral=True)
    assert (await store.get("/e"))[1].owner == store.session


async def test_watches_survive_an_expired_session(driver: Driver, store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/e", ephemeral=True)
    hint, others = Hint(), Hint()
    store.watch("/e", hint)
    other.watch("/e", others)
    await store.sync("/e")
    await other.sync("/e")
    await driver.expire(store)
    await hint.wait()
    await others.wait()
    await store.sync("/e")
    await other.create("/e", ephemeral=True)
    await hint.wait()


async def test_closing_a_session_deletes_its_ephemerals_and_refuses_calls(
    store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/e", ephemeral=True)
    hint = Hint()
    other.watch("/e", hint)
    await other.sync("/e")
    await store.close()
    while "e" in await other.children("/"):
        await hint.wait()
    with pytest.raises(MetadataUnavailable):
        await store.get("/")
    await store.close()


async def test_listener_gets_states_in_order_on_the_event_loop(driver: Driver, store: MetadataStore) -> None:
    states = States(store)
    await driver.blink(store)
    await states.wait_for(SessionState.CONNECTED)
    seen = len(states.seen)
    await driver.expire(store)
    await states.wait_for(SessionState.LOST)
    assert SessionState.CONNECTED in states.seen[seen:] or store.state is SessionState.CONNECTED
    assert store.state is SessionState.CONNECTED
