import asyncio

import pytest

from kvstore.errors import MetadataDenied, MetadataError, MetadataUnavailable, MetadataUnknown, NodeExists
from kvstore.meta import paths, registration
from kvstore.meta.bookies import BookieView
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.registration import BookieRegistration, RegisteredBookies, RegistrationClient
from kvstore.meta.service_info import encode_service_info
from kvstore.meta.store import ensure_path
from kvstore.types import BookieId
from tests.meta.drivers import ClosedStore, FaultyStore, Hint, TestNursery, let_run

B1, B2 = BookieId("b1-1"), BookieId("b2-1")
A1, A2 = "127.0.0.1:3181", "127.0.0.1:3182"


@pytest.fixture
async def store() -> FaultyStore:
    store = FaultyStore()
    await ensure_path(store, paths.READONLY)
    return store


@pytest.fixture
def other(store: FaultyStore) -> MemoryStore:
    return MemoryStore(store.tree)


async def test_registered_bookie_is_found_with_its_address(store: FaultyStore, nursery: TestNursery) -> None:
    await BookieRegistration(store, B1, A1).start(nursery)
    await BookieRegistration(store, B2, A2).start(nursery, readonly=True)
    found = await RegistrationClient(store).bookies()
    assert found == RegisteredBookies(writable={B1: A1}, readonly={B2: A2})
    assert found.all == {B1: A1, B2: A2}


async def test_bookie_that_turns_read_only_is_never_in_neither_set(store: FaultyStore, nursery: TestNursery) -> None:
    bookie = BookieRegistration(store, B1, A1)
    await bookie.start(nursery)
    present: list[set[str]] = []

    def note(*_: object) -> None:
        tree = store.tree.paths()
        present.append({path for path in (paths.available(B1), paths.readonly(B1)) if path in tree})

    store.tree.observers.append(note)
    await bookie.set_readonly(True)
    assert (await RegistrationClient(store).bookies()).readonly == {B1: A1}
    await bookie.set_readonly(False)
    assert (await RegistrationClient(store).bookies()).writable == {B1: A1}
    assert len(present) == 4
    assert all(present)


@pytest.mark.parametrize("last", [True, False])
async def test_consecutive_moves_end_as_the_last_one_says(store: FaultyStore, nursery: TestNursery, last: bool) -> None:
    """The disk is freed while the store is being updated that it is full."""
    bookie = BookieRegistration(store, B1, A1)
    await bookie.start(nursery, readonly=last)
    await let_run()
    for delay in range(20):
        first = asyncio.ensure_future(bookie.set_readonly(not last))
        for _ in range(delay):
            await asyncio.sleep(0)
        await asyncio.gather(first, bookie.set_readonly(last))
        found = await RegistrationClient(store).bookies()
        assert found == RegisteredBookies(*({}, {B1: A1}) if last else ({B1: A1}, {})), f"{delay} turns apart"


async def test_bookie_registers_again_after_its_session_was_lost(store: FaultyStore, nursery: TestNursery) -> None:
    await BookieRegistration(store, B1, A1).start(nursery)
    await let_run()
    store.expire()
    store.resume()
    await let_run()
    assert (await RegistrationClient(store).bookies()).writable == {B1: A1}


async def test_interrupted_move_is_completed_later(
    store: FaultyStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "RETRY_S", 0)
    bookie = BookieRegistration(store, B1, A1)
    await bookie.start(nursery)
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        await bookie.set_readonly(True)
    store.resume()
    await let_run()
    assert await RegistrationClient(store).bookies() == RegisteredBookies(writable={}, readonly={B1: A1})


async def test_registration_of_a_dead_predecessor_is_replaced_at_once(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery
) -> None:
    """It named the address on which this process listens now, so its process is gone."""
    await other.create(paths.available(B1), encode_service_info(A1), ephemeral=True)
    await BookieRegistration(store, B1, A1).start(nursery)
    other.expire()
    assert (await RegistrationClient(store).bookies()).writable == {B1: A1}


async def test_registration_with_another_address_is_waited_for(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "RETRY_S", 0)
    await other.create(paths.available(B1), encode_service_info(A2), ephemeral=True)
    starting = nursery.spawn(BookieRegistration(store, B1, A1).start(nursery), name="start")
    await let_run()
    assert not starting.done()
    other.expire()
    await starting
    assert (await RegistrationClient(store).bookies()).writable == {B1: A1}


async def test_id_held_by_a_live_process_is_refused_in_the_end(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "RETRY_S", 0)
    await other.create(paths.available(B1), encode_service_info(A2), ephemeral=True)
    with pytest.raises(NodeExists):
        await BookieRegistration(store, B1, A1).start(nursery)


async def test_stopped_bookie_is_in_no_set(store: FaultyStore, nursery: TestNursery) -> None:
    bookie = BookieRegistration(store, B1, A1)
    await bookie.start(nursery)
    await bookie.stop()
    assert await RegistrationClient(store).bookies() == RegisteredBookies({}, {})


async def test_bookie_with_an_unreadable_registration_is_left_out(store: FaultyStore) -> None:
    await store.create(paths.available(B1), b"\xff", ephemeral=True)
    await store.create(paths.available(B2), encode_service_info(A2), ephemeral=True)
    assert (await RegistrationClient(store).bookies()).writable == {B2: A2}


async def test_watch_on_bookies_is_called_for_both_sets(store: FaultyStore, nursery: TestNursery) -> None:
    hint = Hint()
    RegistrationClient(store).watch(hint)
    bookie = BookieRegistration(store, B1, A1)
    await bookie.start(nursery)
    await hint.wait()
    await bookie.set_readonly(True)
    await hint.wait()


async def test_view_follows_the_bookies(store: FaultyStore, other: MemoryStore, nursery: TestNursery) -> None:
    view = BookieView(store)
    changes: list[RegisteredBookies] = []
    view.on_change(lambda: changes.append(view.current))
    await view.start(nursery)
    assert view.address(B1) is None
    await BookieRegistration(other, B1, A1).start(nursery)
    await let_run()
    await let_run()
    assert view.current.writable == {B1: A1}
    assert view.address(B1) == A1
    assert changes == [view.current]


async def test_view_stays_unchanged_while_the_store_is_away(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery
) -> None:
    await BookieRegistration(other, B1, A1).start(nursery)
    view = BookieView(store)
    await view.start(nursery)
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        await view.refresh()
    assert view.current.writable == {B1: A1}


# docs/protocol.md P34
async def test_bookie_registered_for_another_user_only_hides_no_other(nursery: TestNursery) -> None:
    store = ClosedStore()
    await LayoutStore(store).initialise("id")
    for bookie, address in ((B1, A1), (B2, A2)):
        await BookieRegistration(MemoryStore(store.tree), bookie, address).start(nursery)
    store.closed = frozenset({paths.available(B1)})
    assert await RegistrationClient(store).bookies() == RegisteredBookies(writable={B2: A2}, readonly={})
    assert await RegistrationClient(store).names() == {B1, B2}, "it is not lost"


@pytest.mark.parametrize("error", [MetadataDenied, MetadataUnknown, MetadataError])
async def test_view_stays_unchanged_and_continues_after_any_error(
    store: FaultyStore,
    other: MemoryStore,
    nursery: TestNursery,
    monkeypatch: pytest.MonkeyPatch,
    error: type[MetadataError],
) -> None:
    """A node whose task has ended ends. All nodes would end together if an answer of the metadata store could
    cause it."""

    async def refuse(path: str) -> list[str]:
        raise error(f"{path}: not now")

    await BookieRegistration(other, B1, A1).start(nursery)
    view = BookieView(store)
    await view.start(nursery)
    await let_run()
    monkeypatch.setattr(store, "children", refuse)
    store.suspend()
    store.resume()  # its watches are called
    await let_run()
    assert view.current.writable == {B1: A1}
    monkeypatch.undo()
    await other.create(paths.available(B2), encode_service_info(A2), ephemeral=True)
    await let_run()
    assert view.current.writable == {B1: A1, B2: A2}


async def test_bookie_that_becomes_writable_between_two_reads_is_in_one_of_them(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookie in neither set would count as gone."""
    moving = BookieRegistration(other, B1, A1)
    await moving.start(nursery, readonly=True)
    children = store.children

    async def then_it_moves(path: str) -> list[str]:
        found = await children(path)
        if path == paths.AVAILABLE:
            await moving.set_readonly(False)
        return found

    monkeypatch.setattr(store, "children", then_it_moves)
    found = await RegistrationClient(store).bookies()
    assert (found.writable, found.readonly) == ({B1: A1}, {})


async def test_address_outlives_its_registration(store: FaultyStore, other: MemoryStore, nursery: TestNursery) -> None:
    await other.create(paths.available(B1), encode_service_info(A1), ephemeral=True)
    view = BookieView(store)
    await view.start(nursery)
    other.expire()
    await let_run()
    assert view.current.writable == {}
    assert view.address(B1) == A1
