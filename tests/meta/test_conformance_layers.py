"""The layers on top of the metadata store, on every driver: ledgers, ids, layout, registrations."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import NodeExists, VersionConflict
from kvstore.meta import paths
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledger_ids import LedgerIdGenerator
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import BookieRegistration, RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from tests.meta.drivers import Driver, Hint, TestNursery
from tests.waiting import wait_until

B1, B2 = BookieId("b1-1"), BookieId("b2-1")
A1, A2 = "127.0.0.1:3181", "127.0.0.1:3182"


def ledger(ledger_id: int, token: int = 42) -> LedgerMetadata:
    return LedgerMetadata(LedgerId(ledger_id), Quorum(2, 2, 2), (Fragment(EntryId(0), (B1, B2)),), token=token)


async def test_one_of_all_concurrent_founders_names_the_cluster(store: MetadataStore, other: MetadataStore) -> None:
    names = await asyncio.gather(*(LayoutStore(each).ensure(name) for each, name in ((store, "a"), (other, "b"))))
    assert len(set(names)) == 1
    await LayoutStore(store).check()


async def test_ledger_passes_through_its_life(store: MetadataStore, other: MetadataStore) -> None:
    await LayoutStore(store).ensure("id")
    writer, recovery = LedgerStore(store), LedgerStore(other)
    for ledger_id in (7, 123456789, 2**31 - 1, 2**40):
        assert await writer.create(ledger(ledger_id)) == 0
    with pytest.raises(NodeExists):
        await recovery.create(ledger(7, token=43))
    assert await writer.create(ledger(7)) == 0, "one's own"
    assert await recovery.read_latest(LedgerId(7)) == (ledger(7), 0)
    _, version = await recovery.update(LedgerId(7), LedgerMetadata.recovering)
    with pytest.raises(VersionConflict):
        await writer.write(ledger(7).closed(EntryId(1), 5), 0)
    assert await recovery.write(ledger(7).closed(EntryId(9), 90), version) == 2
    found, _ = await writer.read_latest(LedgerId(7))
    assert (found.state, found.last_entry, found.length) == (LedgerState.CLOSED, 9, 90)
    assert await writer.list_ids() == [7, 123456789, 2**31 - 1, 2**40]
    await writer.remove(LedgerId(7), 2)
    await recovery.remove(LedgerId(7), 2)
    assert await recovery.list_ids() == [123456789, 2**31 - 1, 2**40]


async def test_no_id_is_assigned_twice(store: MetadataStore, other: MetadataStore) -> None:
    generators = [LedgerIdGenerator(store), LedgerIdGenerator(other)]
    await generators[0].next_id()
    ids = await asyncio.gather(*(generator.next_id() for generator in generators * 10))
    assert len(set(ids)) == 20
    await store.sync(paths.IDGEN)
    assert await store.children(paths.IDGEN) == []


async def test_bookie_registers_again_after_a_lost_session(
    driver: Driver, store: MetadataStore, other: MetadataStore, nursery: TestNursery
) -> None:
    await LayoutStore(store).ensure("id")
    await BookieRegistration(store, B1, A1).start(nursery)
    view = BookieView(other)
    changed = Hint()
    view.on_change(changed)
    await other.sync("/")
    await view.start(nursery)
    while view.current.writable != {B1: A1}:
        await changed.wait()
    await driver.expire(store)

    async def is_back() -> bool:
        await other.sync(paths.AVAILABLE)
        if B1 not in await other.children(paths.AVAILABLE):
            return False
        return (await other.get(paths.available(B1)))[1].owner == store.session

    await wait_until(is_back)
    await view.refresh()
    assert view.current.writable == {B1: A1}


async def test_restarted_bookie_replaces_its_predecessors_registration(
    store: MetadataStore, other: MetadataStore, nursery: TestNursery
) -> None:
    await LayoutStore(store).ensure("id")
    await BookieRegistration(store, B1, A1).start(nursery)
    await nursery.close()
    await BookieRegistration(other, B1, A1).start(TestNursery())
    await store.close()
    await other.sync(paths.AVAILABLE)
    assert (await RegistrationClient(other).bookies()).writable == {B1: A1}


async def test_bookie_moves_between_writable_and_read_only(store: MetadataStore, nursery: TestNursery) -> None:
    await LayoutStore(store).ensure("id")
    bookie, client = BookieRegistration(store, B1, A1), RegistrationClient(store)
    await bookie.start(nursery)
    await bookie.set_readonly(True)
    assert (await client.bookies())[:2] == ({}, {B1: A1})
    await store.create(paths.available(B2), b"what we do not understand", ephemeral=True)
    assert await client.names() == {B1, B2}
    assert await client.names_by_state() == ({B2}, {B1})
    await store.delete(paths.available(B2), 0)
    await bookie.set_readonly(False)
    assert (await client.bookies())[:2] == ({B1: A1}, {})


async def test_cookie_is_written_once_and_then_by_version(store: MetadataStore, other: MetadataStore) -> None:
    await LayoutStore(store).ensure("id")
    cookie = Cookie(bookie=B1, journal_dirs=("/j",), ledger_dirs=("/l",), instance_id="id")
    assert await CookieStore(store).write(cookie, None) == 0
    assert await CookieStore(other).read(B1) == (cookie, 0)
    assert await CookieStore(other).bookies() == [B1]


async def test_kept_node_is_recreated_after_its_deletion(
    store: MetadataStore, other: MetadataStore, nursery: TestNursery
) -> None:
    kept = KeptEphemeral(store, "/servers/n1")
    await kept.publish(b"a")
    kept.start(nursery)
    _, before = await store.get("/servers/n1")
    await other.delete("/servers/n1", 0)

    async def is_back() -> bool:
        await other.sync("/servers")
        return "n1" in await other.children("/servers")

    await wait_until(is_back)
    assert (await other.get("/servers/n1"))[1].created > before.created
