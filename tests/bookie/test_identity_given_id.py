"""A bookie whose id the operator gives as `host:port`. There is no incarnation in it, so no other bookie gets the id
while anything is known of its former owner (docs/protocol.md, B27)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.autorecovery.repair_machine import is_incarnation
from kvstore.bookie import Bookie
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.identity import BookieIdentity, establish
from kvstore.errors import ConfigError, MetadataUnavailable, MetadataUnknown
from kvstore.meta import paths
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.layout import ClusterIdentity, LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import Status
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.bookies import BookieClients
from tests.bookie.support import KEY, crash, packet, run, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog, crash_images

CLUSTER = "8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47"
GIVEN = BookieId("n1.example:3181")
L = LedgerId(7)


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


async def established(
    world: SimWorld, tree: MemoryTree, node: str, given: str, store: MemoryStore | None = None
) -> BookieIdentity:
    store = store or MemoryStore(tree)
    await LayoutStore(store).ensure(CLUSTER)
    authority = MetadataAuthority(store, ClusterIdentity(store, CLUSTER))
    return await establish(world.env(node), tiny(id=given), CookieStore(store), CLUSTER, authority=authority)


def start(world: SimWorld, tree: MemoryTree, node: str = "b1", *, given: str = GIVEN) -> BookieIdentity:
    """Run one start as far as the identity; then cut the power."""
    identity = run(world, established(world, tree, node, given), node)
    crash(world, node)
    return identity


def wipe(world: SimWorld, node: str = "b1") -> None:
    disk = world.node(node).disk
    for directory in ("bookie/journal", "bookie/index"):
        for name in disk.list(directory):
            disk.remove(f"{directory}/{name}")
        disk.sync_dir(directory)


async def name_it(tree: MemoryTree) -> None:
    fragment = Fragment(EntryId(0), (GIVEN,))
    await LedgerStore(MemoryStore(tree)).create(LedgerMetadata(L, Quorum(1, 1, 1), (fragment,), token=1))


async def forget_its_ledger(tree: MemoryTree) -> None:
    await LedgerStore(MemoryStore(tree)).remove(L, -1)


async def forget_its_cookie(tree: MemoryTree) -> None:
    cookies = CookieStore(MemoryStore(tree))
    _, version = await cookies.read(GIVEN)
    await cookies.delete(GIVEN, version)


def test_bookie_keeps_its_given_id(world: SimWorld, tree: MemoryTree) -> None:
    assert start(world, tree) == BookieIdentity(GIVEN, True, ())
    for _ in range(3):
        assert start(world, tree) == BookieIdentity(GIVEN, False, ())
    assert tree.get(f"/ledgers/cookies/{GIVEN}")


def test_empty_directories_do_not_become_a_known_bookie(world: SimWorld, tree: MemoryTree) -> None:
    """Its cookie would be the same as before; only its presence reveals the former bookie."""
    start(world, tree)
    wipe(world)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{GIVEN} is not a new bookie: it has a cookie"):
            start(world, tree)


def test_empty_directories_do_not_become_a_bookie_that_a_ledger_names(world: SimWorld, tree: MemoryTree) -> None:
    """Somebody has removed the cookie, as Apache's shell can, and the ledger's entries are not here."""
    start(world, tree)
    run(world, name_it(tree), "b1")
    run(world, forget_its_cookie(tree), "b1")
    wipe(world)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{GIVEN} is not a new bookie: ledger {L} names it"):
            start(world, tree)
    run(world, forget_its_ledger(tree), "b1")
    assert start(world, tree) == BookieIdentity(GIVEN, True, ())


def test_given_id_goes_to_one_of_two_concurrent_processes(world: SimWorld, tree: MemoryTree) -> None:
    async def both() -> list[BookieIdentity | BaseException]:
        starts = [established(world, tree, node, GIVEN) for node in ("b1", "b2")]
        return await asyncio.gather(*starts, return_exceptions=True)

    found = run(world, both(), "b1")
    won = [node for node, each in zip(("b1", "b2"), found, strict=True) if isinstance(each, BookieIdentity)]
    assert len(won) == 1
    assert any(isinstance(each, ConfigError) for each in found)
    for node in ("b1", "b2"):
        crash(world, node)
        if node in won:
            assert start(world, tree, node) == BookieIdentity(GIVEN, False, ())
        else:
            with pytest.raises(ConfigError):
                start(world, tree, node)


def test_crash_while_formatting_ends_in_one_bookie_or_a_refusal(world: SimWorld) -> None:
    tree = MemoryTree()
    oplog = OpLog(world.node("b1").disk)
    start(world, tree)
    for number, image in enumerate(crash_images(oplog, 300, world.random)):
        node = f"image{number}"
        world.node(node).disk = image.disk
        try:
            assert start(world, tree, node).bookie == GIVEN
        except ConfigError as error:
            assert "is not a new bookie" in str(error)  # noqa: PT017 - either outcome is right


def begin(world: SimWorld, tree: MemoryTree, given: str, node: str = "b1") -> None:
    """Cut off a format before its cookie is in the metadata store."""

    class Away(MemoryStore):
        async def create(self, path: str, data: bytes = b"", **how: bool) -> str:
            if path.startswith(f"{paths.COOKIES}/"):
                raise MetadataUnavailable("the power goes")
            return await super().create(path, data, **how)

    with pytest.raises(MetadataUnavailable):
        run(world, established(world, tree, node, given, Away(tree)), node)
    crash(world, node)
    assert world.node(node).disk.list("bookie/journal") == ["FORMATTING"]


@pytest.mark.parametrize(("first", "then"), [("", GIVEN), (GIVEN, ""), ("n2.example:3181", GIVEN)])
def test_format_begun_under_another_id_is_restarted(world: SimWorld, tree: MemoryTree, first: str, then: str) -> None:
    """The check for a taken id concerns the present id only, because no bookie has the other id."""
    begin(world, tree, first)
    found = start(world, tree, given=then).bookie
    assert found == then if then else found.startswith("b1-")
    assert start(world, tree, given=then) == BookieIdentity(found, False, ())


def test_given_id_goes_to_one_of_two_when_an_answer_is_lost(world: SimWorld, tree: MemoryTree) -> None:
    """Both cookies are equal byte by byte. A process that cannot tell whose write has succeeded does not get the id."""

    class Lossy(MemoryStore):
        async def set(self, path: str, data: bytes, version: int) -> int:
            if tree.get(path)[1].version == version:
                await other_claims()
                raise MetadataUnknown("the connection broke before the write was sent")
            return await super().set(path, data, version)

    async def other_claims() -> None:
        cookies = CookieStore(MemoryStore(tree))
        cookie, version = await cookies.read(GIVEN)
        await cookies.write(cookie, version)

    with pytest.raises(MetadataUnknown):
        run(world, established(world, tree, "b1", GIVEN, Lossy(tree)), "b1")
    crash(world, "b1")
    with pytest.raises(ConfigError, match=f"{GIVEN} is not a new bookie"):
        start(world, tree)


def test_id_other_than_the_formatted_one_is_refused(world: SimWorld, tree: MemoryTree) -> None:
    start(world, tree)
    for other in ("n2.example:3181", ""):
        with pytest.raises(ConfigError, match=f"belongs to bookie {GIVEN}, expected"):
            start(world, tree, given=other)
    start(world, tree, "b2", given="")
    with pytest.raises(ConfigError, match=rf"belongs to bookie b1-.*, expected {GIVEN}"):
        start(world, tree, "b2")


def test_given_id_must_be_host_and_port() -> None:
    for wrong in ("n1", "n1:", ":3181", "a/b:3181", "n1:port", "n1:0", "n1:65536", "n1:99999"):
        with pytest.raises(ConfigError, match=r"id: expected host:port"):
            tiny(id=wrong)


def test_given_id_is_no_incarnation() -> None:
    """So workers read its copies, and doubt it if it is younger than a ledger (docs/protocol.md, A12)."""
    assert not is_incarnation(GIVEN)


@asynccontextmanager
async def started(world: SimWorld, tree: MemoryTree, address: str) -> AsyncIterator[Bookie]:
    store = MemoryStore(tree)
    await LayoutStore(store).ensure(CLUSTER)
    async with Bookie(world.env("b1"), tiny(listen=address, id=GIVEN), store) as bookie:
        yield bookie


def test_given_id_identifies_the_bookie_at_any_address(world: SimWorld, tree: MemoryTree) -> None:
    async def scenario() -> None:
        async with started(world, tree, "b1:3181") as bookie:
            assert bookie.id == GIVEN
            await name_it(tree)
            answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            bookie.storage.add(L, 0, packet(L, 0), KEY, recovery=False, done=answered.set_result)
            assert await answered is Status.OK
        async with started(world, tree, "b1:9999"):
            assert await one_entry(world, tree) == packet(L, 0)

    run(world, scenario(), "b1")


async def one_entry(world: SimWorld, tree: MemoryTree) -> bytes | None:
    env = world.env("client")
    view = BookieView(MemoryStore(tree))
    await view.refresh()
    assert dict(view.current.writable) == {GIVEN: "b1:9999"}
    bookies = BookieClients(env, view.address)
    try:
        return (await bookies.read(GIVEN, L, EntryId(0))).packet
    finally:
        bookies.close()
