import asyncio

import pytest

from kvstore.errors import MetadataUnavailable, MetadataUnknown, NodeExists
from kvstore.meta import ephemeral
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.memory import MemoryStore
from tests.meta.drivers import FaultyStore, TestNursery, let_run
from tests.waiting import wait_until

PATH = "/servers/n1"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def other(store: FaultyStore) -> MemoryStore:
    return MemoryStore(store.tree)


async def held(store: MemoryStore) -> tuple[bytes, bool]:
    """Return the node's data, and whether it is this session's."""
    data, stat = await store.get(PATH)
    return data, stat.owner == store.session


async def test_publish_creates_the_node_and_its_parents(store: FaultyStore) -> None:
    await KeptEphemeral(store, PATH).publish(b"a")
    assert await held(store) == (b"a", True)


async def test_publish_again_changes_only_the_data(store: FaultyStore) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    created = (await store.get(PATH))[1].created
    await kept.publish(b"b")
    await kept.publish(b"b")
    data, stat = await store.get(PATH)
    assert (data, stat.created, stat.version) == (b"b", created, 1)


async def test_publish_none_removes_the_node(store: FaultyStore) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    await kept.publish(None)
    await kept.publish(None)
    assert await store.children("/servers") == []


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_create_of_unknown_outcome_is_corrected(store: FaultyStore, nursery: TestNursery, kind: str) -> None:
    kept = KeptEphemeral(store, PATH)
    kept.start(nursery)
    await let_run()
    store.faults = [("create", kind)]
    with pytest.raises(MetadataUnknown):
        await kept.publish(b"a")
    await let_run()
    assert await held(store) == (b"a", True)


async def test_node_is_recreated_after_a_lost_session(store: FaultyStore, nursery: TestNursery) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    kept.start(nursery)
    await let_run()
    store.expire()
    store.resume()
    await let_run()
    assert await held(store) == (b"a", True)


async def test_node_is_recreated_after_its_deletion(
    store: FaultyStore, other: MemoryStore, nursery: TestNursery
) -> None:
    kept = KeptEphemeral(store, PATH)
    await kept.publish(b"a")
    kept.start(nursery)
    await let_run()
    await other.delete(PATH, 0)
    await let_run()
    assert await held(store) == (b"a", True)


async def test_desired_value_is_written_when_the_store_is_back(store: FaultyStore, nursery: TestNursery) -> None:
    kept = KeptEphemeral(store, PATH)
    kept.start(nursery)
    await let_run()
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        await kept.publish(b"a")
    store.resume()
    await let_run()
    assert await held(store) == (b"a", True)


async def test_node_of_another_session_does_not_count_as_own(store: FaultyStore, other: MemoryStore) -> None:
    await KeptEphemeral(other, PATH).publish(b"a")
    with pytest.raises(NodeExists):
        await KeptEphemeral(store, PATH).publish(b"a")
    assert await held(other) == (b"a", True)


async def test_node_of_another_session_is_waited_for(
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


async def test_node_of_an_earlier_own_session_is_replaced(store: FaultyStore, other: MemoryStore) -> None:
    await KeptEphemeral(other, PATH).publish(b"mine")
    await KeptEphemeral(store, PATH, is_our_former=b"mine".__eq__).publish(b"mine")
    assert await held(store) == (b"mine", True)
    other.expire()
    assert await held(store) == (b"mine", True)


async def test_node_of_others_is_not_removed(store: FaultyStore, other: MemoryStore) -> None:
    await KeptEphemeral(other, PATH).publish(b"theirs")
    await KeptEphemeral(store, PATH).publish(None)
    assert await held(other) == (b"theirs", True)


async def test_node_is_checked_periodically_without_a_hint(
    store: FaultyStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ephemeral, "CHECK_S", 0)

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


async def test_on_placed_is_called_for_a_create_whose_answer_was_lost(store: FaultyStore, nursery: TestNursery) -> None:
    placed: list[int] = []
    kept = KeptEphemeral(store, PATH, on_placed=lambda: placed.append(1))
    kept.start(nursery)
    await let_run()
    store.faults = [("create", "done")]
    with pytest.raises(MetadataUnknown):
        await kept.publish(b"a")
    await let_run()
    assert (await held(store), placed) == ((b"a", True), [1])
    store.faults = [("set", "done")]
    with pytest.raises(MetadataUnknown):
        await kept.publish(b"b")
    await let_run()
    assert (await held(store), placed) == ((b"b", True), [1, 1])


async def test_processes_with_one_name_do_not_replace_each_other_all_the_time(
    store: FaultyStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines with the same server id: each of them sees at once that its node is gone."""

    async def rest(_seconds: float) -> None:
        await asyncio.Event().wait()  # however long the turns below take

    monkeypatch.setattr(ephemeral, "pause", rest)
    twin = FaultyStore(store.tree)
    for each in (store, twin):
        kept = KeptEphemeral(each, PATH, is_our_former=lambda _: True)
        kept.start(nursery)
        await kept.publish(b"%d" % each.session)
    for _ in range(200):
        await let_run()
    replaced = [*store.calls, *twin.calls].count("multi")
    assert 1 <= replaced <= 3, f"replaced {replaced} times within a moment"


async def test_repeatedly_replaced_node_is_put_back_ever_more_rarely(
    store: FaultyStore, nursery: TestNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(ephemeral, "pause", rest)
    kept = KeptEphemeral(store, PATH, is_our_former=lambda _: True)
    kept.start(nursery)
    await kept.publish(b"mine")
    for _ in range(4):
        await be_replaced(store)
        await let_run()
        assert await held(store) == (b"mine", True)
    assert rests == [0.2, 0.4, 0.8, 1.6]
    monkeypatch.setattr(ephemeral, "CHECK_S", 0.01)
    await kept.publish(b"still mine")  # a hint; from then on nobody touches the node for that long
    await wait_until(lambda: has_calmed(kept))
    await be_replaced(store)
    await wait_until(lambda: is_mine(store))
    assert rests[4] == 0.2


async def be_replaced(store: FaultyStore) -> None:
    await store.delete(PATH, -1)
    await MemoryStore(store.tree).create(PATH, b"other", ephemeral=True)


async def is_mine(store: FaultyStore) -> bool:
    return await held(store) == (b"still mine", True)


async def has_calmed(kept: KeptEphemeral) -> bool:
    return kept._pause_s == ephemeral.RETRY_S
