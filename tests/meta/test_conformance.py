"""The promises of every driver of the metadata store about nodes, versions and transactions."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import MetadataError, NodeExists, NoSuchNode, NotEmpty, VersionConflict
from kvstore.meta.store import Check, Create, Delete, MetadataStore, SetData, ensure_path


async def test_created_node_holds_its_bytes_at_version_zero(store: MetadataStore) -> None:
    data = bytes(range(256))
    assert await store.create("/a", data) == "/a"
    found, stat = await store.get("/a")
    assert (found, stat.version, stat.owner) == (data, 0, 0)


async def test_node_may_be_empty(store: MetadataStore) -> None:
    await store.create("/a")
    assert (await store.get("/a"))[0] == b""


async def test_absent_node_is_reported_as_absent(store: MetadataStore) -> None:
    for call in (store.get("/a"), store.children("/a"), store.set("/a", b"", 0), store.delete("/a", 0)):
        with pytest.raises(NoSuchNode):
            await call


async def test_path_is_created_once(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a", b"first")
    with pytest.raises(NodeExists):
        await other.create("/a", b"second")
    await other.sync("/a")
    assert (await other.get("/a"))[0] == b"first"


async def test_child_needs_its_parent(store: MetadataStore) -> None:
    with pytest.raises(NoSuchNode):
        await store.create("/a/b")


async def test_second_of_two_writers_at_one_version_loses(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a", b"0")
    assert await store.set("/a", b"1", 0) == 1
    with pytest.raises(VersionConflict):
        await other.set("/a", b"2", 0)
    assert await other.set("/a", b"2", 1) == 2
    await store.sync("/a")
    assert (await store.get("/a"))[0] == b"2"


async def test_delete_compares_the_version(store: MetadataStore) -> None:
    await store.create("/a")
    await store.set("/a", b"1", 0)
    with pytest.raises(VersionConflict):
        await store.delete("/a", 0)
    await store.delete("/a", 1)
    with pytest.raises(NoSuchNode):
        await store.get("/a")


async def test_version_minus_one_is_any_version(store: MetadataStore) -> None:
    await store.create("/a")
    await store.set("/a", b"1", 0)
    await store.set("/a", b"2", -1)
    await store.delete("/a", -1)


async def test_node_with_children_is_not_deleted(store: MetadataStore) -> None:
    await ensure_path(store, "/a/b")
    with pytest.raises(NotEmpty):
        await store.delete("/a", -1)


async def test_children_are_sorted_names(store: MetadataStore) -> None:
    for path in ("/d", "/d/b", "/d/a", "/d/c", "/d/a/below"):
        await store.create(path)
    assert await store.children("/d") == ["a", "b", "c"]
    assert await store.children("/d/b") == []
    assert "d" in await store.children("/")


async def test_recreated_path_differs_from_the_old_one(store: MetadataStore) -> None:
    await store.create("/a")
    _, before = await store.get("/a")
    await store.delete("/a", 0)
    await store.create("/a")
    _, after = await store.get("/a")
    assert after.version == before.version == 0
    assert after.created > before.created


async def test_children_leave_their_parents_version_unchanged(store: MetadataStore) -> None:
    await store.create("/d")
    await store.create("/d/a")
    await store.delete("/d/a", 0)
    assert (await store.get("/d"))[1].version == 0


async def test_ephemeral_names_its_session(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/e", b"mine", ephemeral=True)
    await other.sync("/e")
    assert (await other.get("/e"))[1].owner == store.session != other.session
    assert store.session != 0


async def test_ephemeral_has_no_children(store: MetadataStore) -> None:
    await store.create("/e", ephemeral=True)
    with pytest.raises(MetadataError):
        await store.create("/e/below")


async def test_sequential_nodes_get_rising_numbers_that_are_not_reused(store: MetadataStore) -> None:
    await store.create("/d")
    assert await store.create("/d/n-", sequential=True) == "/d/n-0000000000"
    assert await store.create("/d/n-", b"x", sequential=True, ephemeral=True) == "/d/n-0000000001"
    await store.delete("/d/n-0000000001", 0)
    await store.create("/d/other")
    assert await store.create("/d/n-", sequential=True) == "/d/n-0000000003"


async def test_transaction_makes_all_changes_in_order(store: MetadataStore) -> None:
    await store.create("/term")
    await store.create("/list", b"old")
    await store.multi(
        [
            Check("/term", 0),
            SetData("/term", b"", 0),
            SetData("/list", b"new", 0),
            Create("/d", b"parent"),
            Create("/d/e", b"child", ephemeral=True),
            Create("/gone"),
            Delete("/gone", 0),
        ]
    )
    assert (await store.get("/term"))[1].version == 1
    assert (await store.get("/list"))[0] == b"new"
    data, stat = await store.get("/d/e")
    assert (data, stat.owner) == (b"child", store.session)
    assert "gone" not in await store.children("/")


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (Check("/a", 7), VersionConflict),
        (Check("/absent", -1), NoSuchNode),
        (Create("/a"), NodeExists),
        (Create("/absent/b"), NoSuchNode),
        (SetData("/a", b"x", 1), VersionConflict),
        (Delete("/a", 0), NotEmpty),
        (Delete("/absent", -1), NoSuchNode),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_transaction_with_a_failing_change_does_nothing_and_raises_it(
    store: MetadataStore, failing: Check | Create | SetData | Delete, error: type[MetadataError], place: int
) -> None:
    await ensure_path(store, "/a/b")
    changes = [Create("/new"), SetData("/a/b", b"x", 0)]
    changes.insert(place, failing)
    with pytest.raises(error):
        await store.multi(changes)
    assert "new" not in await store.children("/")
    assert (await store.get("/a/b"))[0] == b""


async def test_check_of_a_directory_version_detects_a_recreated_one(store: MetadataStore) -> None:
    """The recreated directory has the version of the former one."""
    await store.create("/d")
    for _ in range(2):
        read = (await store.get("/d"))[1].version
        await store.multi([Create("/d/child"), SetData("/d", b"", -1)])
        with pytest.raises(VersionConflict):
            await store.multi([Check("/d", read), Delete("/d/child", 0)])
        await store.multi([Check("/d", read + 1), Delete("/d/child", 0)])


async def test_check_of_version_minus_one_requires_presence_only(store: MetadataStore) -> None:
    await store.create("/a")
    await store.set("/a", b"1", 0)
    await store.multi([Check("/a", -1), Create("/b")])
    assert "b" in await store.children("/")


async def test_stale_ephemeral_is_replaced_in_one_step(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/leader", b"old", ephemeral=True)
    await other.multi([Delete("/leader", 0), Create("/leader", b"new", ephemeral=True)])
    await store.sync("/leader")
    data, stat = await store.get("/leader")
    assert (data, stat.owner) == (b"new", other.session)


@pytest.mark.parametrize("path", ["relative", "/a/", "//a", "/a//b", "/a/../b", ""])
async def test_malformed_path_raises_a_value_error(store: MetadataStore, path: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        await store.get(path)
    with pytest.raises(ValueError, match="absolute path"):
        store.watch(path, lambda: None)


async def test_oversized_call_is_refused_and_breaks_nothing(store: MetadataStore) -> None:
    await store.create("/a", bytes(900_000))
    session = store.session
    with pytest.raises(MetadataError, match="at most"):
        await store.create("/b", bytes(1_100_000))
    with pytest.raises(MetadataError, match="at most"):
        await store.set("/a", bytes(1_100_000), 0)
    with pytest.raises(MetadataError, match="at most"):
        await store.multi([Create("/b", bytes(600_000)), Create("/c", bytes(600_000))])
    assert len((await store.get("/a"))[0]) == 900_000
    assert store.session == session


async def test_sync_makes_a_session_read_what_others_had_committed(store: MetadataStore, other: MetadataStore) -> None:
    for number in range(20):
        await store.create(f"/n{number}")
        await other.sync("/")
        assert f"n{number}" in await other.children("/")


async def test_ensuring_a_path_twice_changes_nothing(store: MetadataStore) -> None:
    await ensure_path(store, "/a/b/c")
    await store.set("/a/b", b"kept", 0)
    await ensure_path(store, "/a/b/c")
    assert (await store.get("/a/b"))[0] == b"kept"


async def test_hundred_concurrent_calls_all_return(store: MetadataStore) -> None:
    await store.create("/d")
    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(store.create(f"/d/{number:03d}"))
    assert len(await store.children("/d")) == 100
