"""Which bookie a set of directories belongs to, and which it must not be taken for."""

from __future__ import annotations

from copy import deepcopy

import pytest

from kvstore.bookie.config import StorageConfig
from kvstore.bookie.identity import (
    BookieIdentity,
    establish,
    refuse_beside_another,
    refuse_orphaned_directories,
    remember_start,
)
from kvstore.bookie.opening import make_directory
from kvstore.errors import ConfigError, MetadataUnknown, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie, decode_cookie
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.service_info import encode_service_info
from kvstore.meta.store import Delete, SetData, ensure_path
from tests.bookie.directories.support import A, B, Naming, open_spread
from tests.bookie.support import crash, run, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog, crash_images

CLUSTER = "8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47"


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


def start(
    world: SimWorld, tree: MemoryTree, node: str = "b1", *, cluster: str = CLUSTER, **config: str
) -> BookieIdentity:
    """Run one start of a bookie on the node as far as its identity; then cut the power."""

    async def work() -> BookieIdentity:
        cookies = CookieStore(MemoryStore(tree))
        return await establish(world.env(node), tiny(**config), cookies, cluster)

    identity = run(world, work(), node)
    crash(world, node)
    return identity


def disk_of(world: SimWorld, node: str = "b1") -> SimDisk:
    return world.node(node).disk


def empty(disk: SimDisk, directory: str) -> None:
    for name in disk.list(directory):
        disk.remove(f"{directory}/{name}")
    disk.sync_dir(directory)


def test_empty_directories_become_a_new_lasting_incarnation(world: SimWorld, tree: MemoryTree) -> None:
    first = start(world, tree)
    assert first.is_new
    assert first.bookie.startswith("b1-")
    for _ in range(3):
        assert start(world, tree) == BookieIdentity(first.bookie, False, ())


def test_cookie_is_in_every_directory_and_in_the_metadata_store(world: SimWorld, tree: MemoryTree) -> None:
    bookie = start(world, tree).bookie
    expected = Cookie(
        bookie=bookie, journal_dirs=("bookie/journal",), ledger_dirs=("bookie/journal",), instance_id=CLUSTER,
        index_dirs=("bookie/index",),
    )  # fmt: skip
    disk = disk_of(world)
    for directory in ("bookie/journal", "bookie/index"):
        file = disk.open(f"{directory}/VERSION")
        assert decode_cookie(file.read(0, file.size()), what=directory) == expected
    assert decode_cookie(tree.get(f"/ledgers/cookies/{bookie}")[0], what="") == expected


# docs/protocol.md L13
def test_bookie_that_lost_all_disks_gets_another_id(world: SimWorld, tree: MemoryTree) -> None:
    first = start(world, tree)
    for directory in ("bookie/journal", "bookie/index"):
        empty(disk_of(world), directory)
    second = start(world, tree)
    assert second.is_new
    assert second.bookie != first.bookie
    assert tree.get(f"/ledgers/cookies/{first.bookie}"), "the old one stays known, as lost"


# docs/protocol.md B8
@pytest.mark.parametrize("directory", ["bookie/journal", "bookie/index"])
def test_empty_directory_among_full_ones_is_refused_by_name(world: SimWorld, tree: MemoryTree, directory: str) -> None:
    start(world, tree)
    empty(disk_of(world), directory)
    with pytest.raises(ConfigError, match=f"{directory} is empty while the others are not"):
        start(world, tree)


@pytest.mark.parametrize("directory", ["bookie/journal", "bookie/index"])
def test_directory_with_files_and_no_cookie_is_refused_by_name(
    world: SimWorld, tree: MemoryTree, directory: str
) -> None:
    start(world, tree)
    disk = disk_of(world)
    disk.remove(f"{directory}/VERSION")
    file = disk.open(f"{directory}/00000001.journal", create=True)
    file.pwrite(0, b"x")
    with pytest.raises(ConfigError, match=f"{directory} has files but no cookie"):
        start(world, tree)


def test_refusal_after_a_lost_index_says_how_to_continue(world: SimWorld, tree: MemoryTree) -> None:
    first = start(world, tree)
    disk = disk_of(world)
    disk.remove("bookie/index/VERSION")
    with pytest.raises(ConfigError, match="copy bookie/journal/VERSION to it and start again"):
        start(world, tree)
    cookie = disk.open("bookie/journal/VERSION").read(0, 4096)
    copy = disk.open("bookie/index/VERSION", create=True)
    copy.pwrite(0, cookie)
    copy.sync()
    disk.sync_dir("bookie/index")
    assert start(world, tree) == BookieIdentity(first.bookie, False, ())


@pytest.mark.parametrize("directory", ["bookie/journal", "bookie/index"])
def test_disk_swapped_with_another_bookies_is_refused(world: SimWorld, tree: MemoryTree, directory: str) -> None:
    start(world, tree)
    other = start(world, tree, "b2", name="b2")
    data = disk_of(world, "b2").names.now.files[f"{directory}/VERSION"].cache.read(0, 4096)
    file = disk_of(world).open(f"{directory}/VERSION")
    file.truncate(0)
    file.pwrite(0, data)
    with pytest.raises(ConfigError, match=rf"belongs to bookie (b1-.*{other.bookie}|{other.bookie}.*b1-)"):
        start(world, tree)


def test_all_disks_of_another_bookie_are_refused(world: SimWorld, tree: MemoryTree) -> None:
    start(world, tree)
    start(world, tree, "b2", name="b2")
    world.node("b1").disk = disk_of(world, "b2")
    with pytest.raises(ConfigError, match=r"belongs to bookie b2-.*expected b1"):
        start(world, tree)


def test_disks_of_another_cluster_are_refused(world: SimWorld, tree: MemoryTree) -> None:
    start(world, tree)
    with pytest.raises(ConfigError, match=f"belongs to the cluster {CLUSTER}, the metadata store to other"):
        start(world, tree, cluster="other")


def test_cookie_unknown_to_the_metadata_store_is_refused(world: SimWorld, tree: MemoryTree) -> None:
    start(world, tree)
    with pytest.raises(ConfigError, match="does not know"):
        start(world, MemoryTree())


def test_directories_other_than_the_formatted_ones_are_refused(world: SimWorld, tree: MemoryTree) -> None:
    start(world, tree)
    disk_of(world).rename("bookie/index", "bookie/moved")
    with pytest.raises(ConfigError, match="formatted together with other directories"):
        start(world, tree, index_dir="bookie/moved")


@pytest.mark.parametrize(("damaged", "intact"), [("index", "journal"), ("journal", "index")])
def test_damaged_cookie_is_refused_with_the_way_to_repair_it(
    world: SimWorld, tree: MemoryTree, damaged: str, intact: str
) -> None:
    first, disk = start(world, tree), disk_of(world)
    disk.flip_bit(f"bookie/{damaged}/VERSION", 8 * 3 + 5)
    with pytest.raises(ConfigError, match=f"Copy bookie/{intact}/VERSION to bookie/{damaged}/VERSION"):
        start(world, tree)
    disk.overwrite(f"bookie/{damaged}/VERSION", 0, disk.open(f"bookie/{intact}/VERSION").read(0, 4096))
    assert start(world, tree) == BookieIdentity(first.bookie, False, ())


def test_bookie_whose_cookies_are_all_damaged_is_refused_with_the_way_out(world: SimWorld, tree: MemoryTree) -> None:
    start(world, tree)
    for directory in ("bookie/journal", "bookie/index"):
        disk_of(world).flip_bit(f"{directory}/VERSION", 8 * 3 + 5)
    with pytest.raises(ConfigError, match="empty all of: bookie/journal, bookie/index"):
        start(world, tree)


def test_damaged_cookie_of_an_interrupted_format_names_the_way_out(world: SimWorld, tree: MemoryTree) -> None:
    disk = disk_of(world)
    for directory in ("bookie/journal", "bookie/index"):
        make_directory(disk, directory)
    file = disk.open("bookie/index/FORMATTING", create=True)
    file.pwrite(0, b"no cookie")
    file.sync()
    with pytest.raises(ConfigError, match="Nothing is stored yet: empty all of: bookie/journal, bookie/index"):
        start(world, tree)
    empty(disk, "bookie/index")
    assert start(world, tree).is_new


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("since", [1, 2])
def test_restored_copy_of_the_directories_is_doubted(
    world: SimWorld, tree: MemoryTree, before: int, since: int
) -> None:
    for _ in range(before):
        start(world, tree)
    backup = disk_of(world).copy(world.random)
    for _ in range(since):
        assert start(world, tree).doubts == ()
    world.node("b1").disk = backup
    for _ in range(2):
        identity = start(world, tree)
        assert "it is a copy" in identity.doubts[0], "until it is noted in the journal"
    remember_start(disk_of(world), ["bookie/journal"], identity)
    assert start(world, tree).doubts == ()


# docs/protocol.md B34
@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("tries", [1, 2, 5])
def test_starts_with_older_metadata_raise_no_doubt_then_or_later(
    world: SimWorld, tree: MemoryTree, before: int, since: int, tries: int
) -> None:
    for _ in range(before):
        start(world, tree)
    older = deepcopy(tree)
    for _ in range(since):
        start(world, tree)
    for _ in range(tries):
        assert start(world, older).doubts == ()
    assert start(world, tree).doubts == ()
    assert start(world, tree).doubts == ()


def test_crash_while_formatting_ends_in_one_bookie(world: SimWorld, seed: int) -> None:
    tree = MemoryTree()
    oplog = OpLog(disk_of(world))
    start(world, tree)
    for number, image in enumerate(crash_images(oplog, 300, world.random)):
        node = f"image{number}"
        world.node(node).disk = image.disk
        first = start(world, tree, node)
        remember_start(disk_of(world, node), ["bookie/journal"], first)  # the tree may know of later ones by now
        assert start(world, tree, node) == BookieIdentity(first.bookie, False, ())


def test_crash_during_a_start_raises_no_doubt(world: SimWorld) -> None:
    tree = MemoryTree()
    bookie = start(world, tree).bookie
    oplog = OpLog(disk_of(world))
    start(world, tree)
    version = tree.get(f"/ledgers/cookies/{bookie}")[1].version
    for number, image in enumerate(crash_images(oplog, 100, world.random)):
        node = f"image{number}"
        world.node(node).disk = image.disk
        disk = image.disk
        file = disk.open("bookie/journal/STARTS")
        if str(version) in file.read(0, 100).decode().split():
            assert start(world, tree, node).doubts == ()
            data = tree.get(f"/ledgers/cookies/{bookie}")
            version = data[1].version


def test_full_disk_does_not_prevent_a_start(world: SimWorld, tree: MemoryTree) -> None:
    first = start(world, tree)
    disk = disk_of(world)
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes())
    for _ in range(12):
        assert start(world, tree) == BookieIdentity(first.bookie, False, ())


def test_second_process_starting_as_the_same_bookie_is_refused(world: SimWorld, tree: MemoryTree) -> None:
    bookie = start(world, tree).bookie

    class Racing(MemoryStore):
        async def set(self, path: str, data: bytes, version: int) -> int:
            await super().set(path, data, version)
            return await super().set(path, data, version)

    async def work() -> None:
        await establish(world.env("b1"), tiny(), CookieStore(Racing(tree)), CLUSTER)

    with pytest.raises(ConfigError, match=f"another process is starting as bookie {bookie}"):
        run(world, work())


@pytest.mark.parametrize("was_done", [True, False])
def test_start_continues_when_a_metadata_answer_was_lost(world: SimWorld, tree: MemoryTree, was_done: bool) -> None:
    bookie = start(world, tree).bookie

    class Breaking(MemoryStore):
        broken = False

        async def set(self, path: str, data: bytes, version: int) -> int:
            if self.broken:
                return await super().set(path, data, version)
            self.broken = True
            if was_done:
                await super().set(path, data, version)
            raise MetadataUnknown(path)

    async def work() -> BookieIdentity:
        return await establish(world.env("b1"), tiny(), CookieStore(Breaking(tree)), CLUSTER)

    assert run(world, work()) == BookieIdentity(bookie, False, ())
    crash(world)
    assert start(world, tree) == BookieIdentity(bookie, False, ())


def test_bookie_cannot_start_after_a_decommission(world: SimWorld, tree: MemoryTree) -> None:
    bookie = start(world, tree).bookie

    async def decommission() -> None:
        cookies = CookieStore(MemoryStore(tree))
        _, version = await cookies.read(bookie)
        await cookies.delete(bookie, version)
        with pytest.raises(NoSuchNode):
            await cookies.read(bookie)

    run(world, decommission())
    with pytest.raises(ConfigError, match="does not know"):
        start(world, tree)


def test_node_without_bookie_starts_only_if_nobody_counts_on_one(world: SimWorld, tree: MemoryTree) -> None:
    cookies = CookieStore(MemoryStore(tree))

    def look() -> None:
        run(world, refuse_orphaned_directories(world.env("b1"), tiny(), cookies), "b1")

    look()
    bookie = start(world, tree).bookie
    with pytest.raises(ConfigError, match=f"has the entries of bookie {bookie}.*decommission {bookie}"):
        look()
    path = paths.cookie(bookie)
    tree.apply(1, [SetData(path, b"?", -1)])
    with pytest.raises(ConfigError, match=path):
        look()
    tree.apply(1, [Delete(path, -1)])
    look()


@pytest.mark.parametrize("left", [A, B])
def test_node_without_bookie_is_refused_for_each_of_several_directories(
    world: SimWorld, tree: MemoryTree, left: str
) -> None:
    """Also if the first disk is not mounted."""

    async def work() -> str:
        shelf = await open_spread(world, MemoryStore(tree), Naming())
        return str(shelf.storage.bookie)

    bookie = run(world, work())
    crash(world)
    disk_of(world).exchange(B if left == A else A)
    config = StorageConfig(journal_dirs=(A, B), index_dir="disk0/index")
    with pytest.raises(ConfigError, match=f"{left} has the entries of bookie {bookie}"):
        run(world, refuse_orphaned_directories(world.env("b1"), config, CookieStore(MemoryStore(tree))))


@pytest.mark.parametrize("lost", [A, B])
def test_copy_without_one_directory_is_refused_before_its_start_counts(
    world: SimWorld, tree: MemoryTree, lost: str
) -> None:
    """Otherwise the bookie that runs on the original takes its own directories for the copy (docs/protocol.md, B34)."""
    store = MemoryStore(tree)

    async def work() -> str:
        shelf = await open_spread(world, store, Naming())
        await ensure_path(store, paths.AVAILABLE)
        await store.create(paths.available(shelf.storage.bookie), encode_service_info("elsewhere:3181"))
        return str(shelf.storage.bookie)

    async def copy() -> None:
        config = tiny(journal_dirs=(A, B), index_dir="disk0/index", lost_dirs=(lost,), listen="here:3181")
        await refuse_beside_another(world.env("b1"), config, RegistrationClient(store))

    bookie = run(world, work())
    crash(world)
    disk_of(world).exchange(lost)
    with pytest.raises(ConfigError, match=f"one process of bookie {bookie}.*elsewhere:3181"):
        run(world, copy())
