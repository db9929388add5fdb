"""A bookie keeps the payload that it has stored of an entry, whoever sends another one (docs/protocol.md, L15, B36)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from errno import EMFILE

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.bookie.index.index_files import IndexFiles
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.stored_copies import Copy, StoredCopies
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import DigestType, EntryId, LedgerId
from tests.bookie.index.index_support import damaged_block, filled, index_files, payload_of
from tests.bookie.support import FAST, Metadata, Shelf, crash, in_world, metadata, packet, run, segments, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L, OTHER = 7, 8
FIRST, SECOND, LONGER = b"first", b"other", b"another one"


@contextmanager
def patched(owner: type, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


async def opened(world: SimWorld, meta: Metadata | None = None) -> Shelf:
    return await Shelf(world.env("b1"), tiny(), meta).start()


def refused(shelf: Shelf) -> int:
    return shelf.storage.statistics.refused_other_entry


async def refuses(shelf: Shelf, entry: int, payload: bytes) -> None:
    """Assert that no add replaces the payload of a stored entry."""
    for other in {FIRST, SECOND, LONGER} - {payload}:
        for recovery in (False, True):
            assert await shelf.add(L, entry, other, recovery=recovery) is Status.FENCED
            assert await shelf.payload(L, entry) == payload


# docs/protocol.md B36
def test_stored_entry_keeps_its_payload_in_memory_on_disk_and_after_starts(world: SimWorld) -> None:
    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 0, FIRST) is Status.OK
        await refuses(shelf, 0, FIRST)
        assert (refused(shelf), shelf.storage.statistics.refused_fenced) == (4, 0)
        await filled(shelf, 30, OTHER)  # the entry is in a full segment now
        await refuses(shelf, 0, FIRST)

    async def again() -> None:
        shelf = await opened(world)
        await refuses(shelf, 0, FIRST)
        assert await shelf.add(L, 1, SECOND) is Status.OK, "the ledger takes its next entry"

    run(world, write())
    crash(world)
    run(world, again())


@in_world
async def test_entries_that_wait_for_the_same_sync_are_compared(world: SimWorld) -> None:
    shelf = await opened(world)
    assert await shelf.add(L, 0) is Status.OK
    answers = [
        shelf.submit(L, 1, FIRST),
        shelf.submit(L, 1, SECOND),
        shelf.submit(L, 1, LONGER, recovery=True),
        shelf.submit(L, 1, FIRST),
    ]
    assert answers[1].done(), "a refusal waits for nothing"
    assert not answers[3].done(), "a repetition is answered after the sync"
    assert [await each for each in answers] == [Status.OK, Status.FENCED, Status.FENCED, Status.OK]
    assert await shelf.payload(L, 1) == FIRST
    assert shelf.storage.statistics.adds == 2


@in_world
async def test_entry_whose_group_is_being_shown_is_compared(world: SimWorld) -> None:
    """A client that is notified of a stored packet may send an add before the group's other packets are in the
    index."""
    shelf = await opened(world)
    assert await shelf.add(L, 0) is Status.OK
    late = []

    class Teller:
        def entry_stored(self, entry: int, packet: bytes) -> None:
            if entry == 1:
                late.append(shelf.submit(L, 2, SECOND, recovery=True))

        def lac_raised(self, lac: int) -> None: ...

    assert shelf.storage.listen(L, Teller()) is not None
    both = [shelf.submit(L, 1), shelf.submit(L, 2, FIRST)]
    assert [await each for each in both] == [Status.OK, Status.OK]
    assert [await each for each in late] == [Status.FENCED]
    assert await shelf.payload(L, 2) == FIRST


# docs/protocol.md R4
@in_world
async def test_recovery_add_is_stored_with_its_own_lac_but_not_another_payload(world: SimWorld) -> None:
    shelf = await opened(world)
    assert await shelf.add(L, 5, FIRST, lac=4) is Status.OK
    assert await shelf.status(L, fence=True) is Status.OK
    assert await shelf.add(L, 5, FIRST, lac=3, recovery=True) is Status.OK
    assert (await shelf.read(L, 5))[1] == packet(L, 5, FIRST, 3)
    await_other = [shelf.submit(L, 5, FIRST, lac=2, recovery=True), shelf.submit(L, 5, SECOND, recovery=True)]
    assert [await each for each in await_other] == [Status.OK, Status.FENCED]
    assert (await shelf.read(L, 5))[1] == packet(L, 5, FIRST, 2)


@pytest.mark.parametrize("kind", list(DigestType))
@in_world
async def test_same_entry_is_recognized_for_every_digest(world: SimWorld, kind: DigestType) -> None:
    """Payloads that differ only at the position of the largest digest, and other last-add-confirmed."""
    digest = EntryDigest(kind, b"secret")
    meta = Metadata()
    meta.known[L] = replaced(metadata(L), digest=kind, password=b"secret")
    key = master_key(b"secret")

    def made(payload: bytes, lac: int, length: int = 60) -> bytes:
        return digest.packet(LedgerId(L), EntryId(3), EntryId(lac), length, payload)

    shelf = await opened(world, meta)

    async def add(body: bytes) -> Status:
        told: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        shelf.storage.add(L, 3, body, key, recovery=True, done=told.set_result)
        return await told

    first, other = b"a" * 60, b"b" * 16 + b"a" * 44
    assert await add(made(first, 2)) is Status.OK
    assert await add(made(first, 1)) is Status.OK
    assert (await shelf.read(L, 3))[1] == made(first, 1)
    for lac in (0, 1):
        assert await add(made(other, lac)) is Status.FENCED
        assert await add(made(first, lac, length=61)) is Status.FENCED
    assert (await shelf.read(L, 3))[1] == made(first, 1)


# docs/protocol.md B14
def test_damaged_copy_is_replaced_only_by_a_recovery_add_of_its_size(world: SimWorld) -> None:
    async def write() -> None:
        await filled(await opened(world), 30, L)

    async def scenario() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 0) is Status.IO_ERROR
        assert await shelf.add(L, 0, payload_of(L, 0)) is Status.IO_ERROR, "an ordinary add replaces nothing"
        assert await shelf.add(L, 0, LONGER, recovery=True) is Status.FENCED, "another size is another payload"
        assert await shelf.add(L, 0, payload_of(L, 0), recovery=True) is Status.OK
        assert await shelf.payload(L, 0) == payload_of(L, 0)

    run(world, write())
    crash(world, power=False)
    disk = world.node("b1").disk
    path = segments(disk)[0]
    disk.flip_bit(path, 8 * (bytes(disk.names.now.files[path].cache.data).index(payload_of(L, 0)) + 2))
    run(world, scenario())


@in_world
async def test_copy_that_cannot_be_read_now_is_neither_replaced_nor_denied(world: SimWorld) -> None:
    """Too many open files say nothing about the bytes on disk."""

    def fails(self: Segment, *_: object) -> bytes:
        raise OSError(EMFILE, "too many open files")

    shelf = await opened(world)
    await filled(shelf, 30, L)
    with patched(Segment, "_read_body", fails):
        for recovery in (False, True):
            for payload in (payload_of(L, 0), bytes(len(payload_of(L, 0)))):
                assert await shelf.add(L, 0, payload, recovery=recovery) is Status.IO_ERROR
    assert refused(shelf) == 0, "nobody knows what the copy is"
    assert await shelf.payload(L, 0) == payload_of(L, 0)


# docs/protocol.md B40
@in_world
async def test_synced_group_is_shown_although_an_older_copy_cannot_be_looked_up(world: SimWorld) -> None:
    """Its entries are on disk. An error in the middle of the group would leave the rest of it unanswered for good."""

    def fails(self: IndexFiles, *_: object) -> None:
        raise OSError(EMFILE, "too many open files")

    shelf = await opened(world)
    await filled(shelf, 30, L)
    files = shelf.storage.inventory.index_files
    again = shelf.submit(L, 0, payload_of(L, 0), lac=29, recovery=True)
    following = shelf.submit(L, 30, payload_of(L, 30))
    with patched(IndexFiles, "block", fails):
        files._blocks.clear()  # other reads have displaced the block that the add has just looked at
        async with asyncio.timeout(5):
            assert (await again, await following) == (Status.OK, Status.OK)
    assert (await shelf.read(L, 0))[1] == packet(L, 0, payload_of(L, 0), 29)
    assert await shelf.entries(L) == (Status.OK, [(0, 31)])
    assert await shelf.add(L, 31) is Status.OK
    assert shelf.storage.adds.pending_bytes == 0


@in_world
async def test_reclaim_writes_no_older_copy_over_one_that_waits_for_a_sync(world: SimWorld) -> None:
    shelf = await opened(world)
    assert await shelf.add(L, 0, FIRST, lac=-1) is Status.OK
    newer = shelf.submit(L, 0, FIRST, lac=0, recovery=True)
    shelf.storage.adds.store_copy(shelf.storage.inventory.ledgers[L], 0, packet(L, 0, FIRST, -1))
    assert await newer is Status.OK
    await shelf.storage.synced()
    assert (await shelf.read(L, 0))[1] == packet(L, 0, FIRST, 0)


def overwritten(world: SimWorld, *, certified: bool) -> None:
    """Write a journal of a version without the rule: its last segment has a later record that replaces the entry's
    first one."""

    async def write() -> None:
        shelf = await opened(world)
        with patched(StoredCopies, "compare", lambda *_: Copy.NONE):
            assert await shelf.add(L, 0, FIRST) is Status.OK
            assert await shelf.add(L, 0, SECOND, recovery=True) is Status.OK
        if certified:
            await pause(1)

    run(world, write())
    crash(world, power=not certified)


@pytest.mark.parametrize("certified", [True, False])
def test_start_keeps_the_first_payload_of_an_entry(world: SimWorld, certified: bool) -> None:
    async def scenario() -> None:
        shelf = await opened(world)
        await refuses(shelf, 0, FIRST)

    overwritten(world, certified=certified)
    run(world, scenario())
    crash(world)
    run(world, scenario())


def test_rebuilt_index_file_keeps_the_first_payload_of_an_entry(world: SimWorld) -> None:
    async def fill() -> None:
        shelf = await opened(world)
        await filled(shelf, 60, OTHER)
        await pause(1)

    async def scenario() -> None:
        shelf = await opened(world)
        assert await shelf.payload(L, 0) == FIRST
        assert shelf.storage.refresh_statistics().index_files_rebuilt == 1

    overwritten(world, certified=True)
    with patched(Inventory, "_may_replace", lambda *_, **__: True):
        run(world, fill())
    crash(world, power=False)
    disk = world.node("b1").disk
    damaged_block(disk, index_files(disk)[0])
    run(world, scenario())


def test_start_ends_if_an_entrys_first_record_cannot_be_read_now(world: SimWorld) -> None:
    overwritten(world, certified=True)

    def fails(self: Inventory, *_: object, **__: object) -> bool:
        raise OSError(EMFILE, "too many open files")

    async def scenario() -> None:
        with patched(Inventory, "_may_replace", fails), pytest.raises(OSError, match="too many"):
            await opened(world)
        assert await (await opened(world)).payload(L, 0) == FIRST

    run(world, scenario())


@dataclass
class Story:
    """The steps of a bookie, and the payload of each entry that it has acknowledged."""

    steps: list[tuple[str, int, int]]
    stored: dict[tuple[int, int], int] = field(default_factory=dict)


STEP = st.one_of(
    st.tuples(st.sampled_from(["add", "copy", "both"]), st.integers(0, 5), st.integers(0, 2)),
    st.tuples(st.sampled_from(["fence", "fill", "kill", "cut", "reclaim", "sync"]), st.just(0), st.just(0)),
)


# docs/protocol.md L15
@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=30))
def test_no_story_changes_the_payload_of_an_acknowledged_entry(steps: list[tuple[str, int, int]]) -> None:
    meta = Metadata()
    meta.known = {L: metadata(L), OTHER: metadata(OTHER)}
    story = Story(list(steps))
    with SimWorld(1, disk=FAST) as world:
        while story.steps:
            run(world, tell(world, meta, story))
            if story.steps:
                crash(world, power=story.steps.pop(0)[0] == "cut")


async def tell(world: SimWorld, meta: Metadata, story: Story) -> None:
    """Run one life of the bookie; it ends before a step that is a crash."""
    shelf = await opened(world, meta)
    filler = shelf.storage.inventory.ledgers[OTHER].index.last + 1 if OTHER in shelf.storage.inventory.ledgers else 0
    await judge(shelf, story)
    while story.steps and story.steps[0][0] not in ("kill", "cut"):
        what, entry, which = story.steps.pop(0)
        if what in ("add", "copy", "both"):
            payloads = [which, (which + 1) % 3] if what == "both" else [which]
            answers = [shelf.submit(L, entry, body_of(each), recovery=what == "copy") for each in payloads]
            for each, answer in zip(payloads, answers, strict=True):
                if await answer is Status.OK:
                    assert story.stored.setdefault((L, entry), each) == each
        elif what == "fence":
            await shelf.status(L, fence=True)
        elif what == "fill":
            for each in range(filler, filler + 12):
                assert await shelf.add(OTHER, each, b"x" * 300) is Status.OK
            filler += 12
        elif what == "reclaim":
            await Reclaimer(shelf.env, replaced(tiny(), sparse_share=0.99), shelf.storage, meta).free_segments()
        else:
            await pause(0.2)
        await judge(shelf, story)


async def judge(shelf: Shelf, story: Story) -> None:
    for (ledger, entry), which in story.stored.items():
        assert await shelf.payload(ledger, entry) == body_of(which)


def body_of(which: int) -> bytes:
    return [FIRST, SECOND, LONGER][which] * 20
