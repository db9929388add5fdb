import pytest

from kvstore.errors import MetadataUnavailable, MetadataUnknown, NodeExists
from kvstore.meta import ephemeral
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.memory import MemoryStore
from tests.meta.drivers import FaultyStore, TestNursery, let_run

PATH = "/servers/n1"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def other(store: FaultyStore) -> MemoryStore:
    return MemoryStore(store.tree)


async def held(store: MemoryStore) -> tuple[bytes, bool]:
    """The node's data and whether it is this session's."""
    data, stat = await store.get(PATH)
    return data, stat.owner == store.session


async def test_publishing_creates_the_node_and_its_parents(store: FaultyStore) -> None:
    await KeptEphemeral(store, PATH).publish(b"a")
    assert await held(store) == (b"a", True)


async def test_publishing_again_changes_the_data_and_nothing_else(store: FaultyStore) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    created = (await store.get(PATH))[1].created
    await kept.publish(b"b")
    await kept.publish(b"b")
    data, stat = await store.get(PATH)
    assert (data, stat.created, stat.version) == (b"b", created, 1)


async def test_publishing_nothing_removes_the_node(store: FaultyStore) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    await kept.publish(None)
    await kept.publish(None)
    assert await store.children("/servers") == []


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_a_create_of_unknown_outcome_is_put_right(store: FaultyStore, nursery: TestNursery, kind: str) -> None:
    kept = KeptEphemeral(store, PATH)
    kept.start(nursery)
    await let_run()
    store.faults = [("create", kind)]
    with pytest.raises(MetadataUnknown):
        await kept.publish(b"a")
    await let_run()
    assert await held(store) == (b"a", True)


async def test_after_a_lost_session_the_node_is_made_again(store: FaultyStore, nursery: TestNursery) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    kept.start(nursery)
    await let_run()
    store.expire()
    store.resume()
    await let_run()
    assert await held(store) == (b"a", True)


async def test_a_node_that_somebody_removes_is_made_again(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery
) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    kept.start(nursery)
    await let_run()
    await other.delete(PATH, 0)
    await let_run()
    assert await held(store) == (b"a", True)


async def test_what_is_wanted_while_the_store_is_away_is_done_when_it_is_back(
    store: FaultyStore, nursery: TestNursery
) -> None:
    kept = KeptEphemeral(store, PATH)
    kept.start(nursery)
    await let_run()
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        await kept.publish(b"a")
    store.resume()
    await let_run()
    assert await held(store) == (b"a", True)


async def test_the_node_of_another_session_is_never_taken_for_ones_own(store: FaultyStore, other: MemoryStore) -> None:
    await KeptEphemeral(other, PATH).publish(b"a")
    with pytest.raises(NodeExists):
        await KeptEphemeral(store, PATH).publish(b"a")
    assert await held(other) == (b"a", True)


async def test_the_node_of_another_session_is_waited_out(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery
) -> None:
    await KeptEphemeral(other, PATH).publish(b"old")
    kept = KeptEphemeral(store, PATH)
    kept.start(nursery)
    with pytest.raises(NodeExists):
        await kept.publish(b"new")
    await let_run()
    other.expire()
    await let_run()
    assert await held(store) == (b"new", True)


async def test_the_node_of_ones_own_earlier_session_is_replaced(store: FaultyStore, other: MemoryStore) -> None:
    await KeptEphemeral(other, PATH).publish(b"mine")
    await KeptEphemeral(store, PATH, is_our_former=b"mine".__eq__).publish(b"mine")
    assert await held(store) == (b"mine", True)
    other.expire()
    assert await held(store) == (b"mine", True)


async def test_nothing_of_others_is_removed(store: FaultyStore, other: MemoryStore) -> None:
    await KeptEphemeral(other, PATH).publish(b"theirs")
    await KeptEphemeral(store, PATH).publish(None)
    assert await held(other) == (b"theirs", True)


async def test_without_any_hint_it_looks_again(
    store: FaultyStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ephemeral, "LOOK_AGAIN_S", 0)

    class Deaf(FaultyStore):
        def watch(self, path: str, changed: object) -> object:  # type: ignore[override]
            return super().watch(path, lambda: None)

    deaf = Deaf(store.tree)
    kept = KeptEphemeral(deaf, PATH)
    await kept.publish(b"a")
    kept.start(nursery)
    await let_run()
    await store.delete(PATH, 0)
    await let_run()
    await let_run()
    assert await held(deaf) == (b"a", True)
