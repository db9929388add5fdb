import pytest

from kvstore.errors import ConfigError, Corrupted, MetadataUnknown, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.meta.underreplication import Mark, RepairMarks, decode_mark, encode_mark
from kvstore.types import BookieId, LedgerId
from tests.meta.drivers import FaultyStore, Hint

B1, B2, B3 = BookieId("b1-1"), BookieId("b2-1"), BookieId("b3-1")
L7 = LedgerId(7)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
async def marks(store: FaultyStore) -> RepairMarks:
    marks = RepairMarks(store, "host-1")
    await marks.initialise()
    return marks


@pytest.fixture
def rival(store: FaultyStore, marks: RepairMarks) -> RepairMarks:
    """A worker in another session."""
    return RepairMarks(MemoryStore(store.tree), "host-2")


def test_a_mark_is_apaches_text() -> None:
    mark = Mark(L7, (B1, B2), 1_790_000_000_000)
    assert encode_mark(mark) == b'replica: "b1-1"\nreplica: "b2-1"\nctime: 1790000000000\n'
    assert decode_mark(L7, encode_mark(mark)) == mark
    assert decode_mark(L7, b'replica: "b1-1"\n') == Mark(L7, (B1,), 0)


def test_a_malformed_mark_is_reported_with_its_ledger() -> None:
    for data in (b"replica", b"\xff"):
        with pytest.raises(Corrupted, match="ledger 7"):
            decode_mark(L7, data)


async def test_the_nodes_are_apaches(store: FaultyStore, marks: RepairMarks) -> None:
    await marks.initialise()
    await marks.mark(LedgerId(123456789), [B1], 5)
    lock = await marks.acquire(LedgerId(123456789))
    assert lock is not None
    assert (await store.get("/ledgers/underreplication/LAYOUT"))[0] == b'type: "BASIC"\nversion: 1\n'
    data, _ = await store.get("/ledgers/underreplication/ledgers/0000/0000/075b/cd15/urL0123456789")
    assert data == b'replica: "b1-1"\nctime: 5\n'
    data, stat = await store.get("/ledgers/underreplication/locks/urL0123456789")
    assert (data, stat.owner) == (b'bookieId: "host-1"\n', store.session)


@pytest.mark.parametrize("layout", [b'type: "OTHER"\nversion: 1\n', b'type: "BASIC"\nversion: 2\n', b"?"])
async def test_another_layout_is_refused(store: FaultyStore, layout: bytes) -> None:
    await ensure_path(store, paths.UNDERREPLICATION)
    await store.create(paths.UNDERREPLICATION_LAYOUT, layout)
    with pytest.raises(ConfigError, match="LAYOUT"):
        await RepairMarks(store, "host").initialise()


async def test_marks_of_one_ledger_add_up(marks: RepairMarks, rival: RepairMarks) -> None:
    await marks.mark(L7, [B1], 5)
    await rival.mark(L7, [B2, B1], 9)
    assert await marks.read(L7) == (Mark(L7, (B1, B2), 5), 1)


@pytest.mark.parametrize("fault", [("create", "lost"), ("create", "done"), ("set", "lost"), ("set", "done")])
async def test_a_mark_of_unknown_outcome_is_made(
    marks: RepairMarks, store: FaultyStore, fault: tuple[str, str]
) -> None:
    await marks.mark(LedgerId(6), [B3], 5)
    if fault[0] == "set":
        await marks.mark(L7, [B1], 5)
    store.faults = [fault]
    await marks.mark(L7, [B1, B2], 5)
    assert (await marks.read(L7))[0].missing == (B1, B2)
    assert not store.faults


async def test_marked_ledgers_are_listed_in_order(marks: RepairMarks) -> None:
    ids = [0, 7, 65536, 2**31, 2**40]
    for ledger in reversed(ids):
        await marks.mark(LedgerId(ledger), [B1], 5)
    assert await marks.list_marked() == ids


async def test_a_listing_that_breaks_raises(marks: RepairMarks, store: FaultyStore) -> None:
    await marks.mark(L7, [B1], 5)
    store.faults = [("children", "lost")]
    with pytest.raises(MetadataUnknown):
        await marks.list_marked()


async def test_only_one_worker_repairs_a_ledger(marks: RepairMarks, rival: RepairMarks) -> None:
    await marks.mark(L7, [B1], 5)
    lock = await marks.acquire(L7)
    assert lock is not None
    assert lock.mark == Mark(L7, (B1,), 5)
    assert await rival.acquire(L7) is None
    assert await marks.acquire(L7) is None, "two workers of one process"
    assert await rival.locked() == [L7]
    await marks.release(lock)
    assert await rival.acquire(L7) is not None


async def test_what_is_not_marked_is_not_locked(marks: RepairMarks) -> None:
    assert await marks.acquire(L7) is None
    assert await marks.locked() == []


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_a_lock_of_unknown_outcome_is_recognised(marks: RepairMarks, store: FaultyStore, kind: str) -> None:
    await marks.mark(L7, [B1], 5)
    store.faults = [("create", kind)]
    assert await marks.acquire(L7) is not None


async def test_a_repaired_ledger_is_neither_marked_nor_locked(marks: RepairMarks, store: FaultyStore) -> None:
    await marks.mark(L7, [B1], 5)
    lock = await marks.acquire(L7)
    assert lock is not None
    assert await marks.replicated(lock)
    assert await marks.list_marked() == await marks.locked() == []
    assert await store.children(paths.UNDERREPLICATED) == []
    await marks.mark(L7, [B1], 5)
    assert await marks.acquire(L7) is not None


async def test_a_ledger_marked_again_during_its_repair_stays_marked(marks: RepairMarks, rival: RepairMarks) -> None:
    for missing in ([B2], [B1]):  # also when the same bookie is lost again
        await marks.mark(L7, [B1], 5)
        lock = await marks.acquire(L7)
        assert lock is not None
        await rival.mark(L7, missing, 9)
        assert not await marks.replicated(lock)
        assert await marks.list_marked() == [L7]
        assert await marks.locked() == []


async def test_a_lock_that_went_with_its_session_is_left_to_the_next(
    marks: RepairMarks, rival: RepairMarks, store: FaultyStore
) -> None:
    await marks.mark(L7, [B1], 5)
    lock = await marks.acquire(L7)
    assert lock is not None
    store.expire()
    store.resume()
    taken = await rival.acquire(L7)
    assert taken is not None
    await marks.release(lock)
    assert await rival.locked() == [L7]
    await rival.release(taken)
    assert await marks.acquire(L7) is not None


async def test_a_lock_that_went_with_its_session_may_be_taken_again(marks: RepairMarks, store: FaultyStore) -> None:
    await marks.mark(L7, [B1], 5)
    lock = await marks.acquire(L7)
    assert lock is not None
    store.expire()
    store.resume()
    await marks.release(lock)
    assert await marks.acquire(L7) is not None


async def test_repair_can_be_switched_off_for_all(marks: RepairMarks, rival: RepairMarks, store: FaultyStore) -> None:
    hint = Hint()
    rival.watch_enabled(hint)
    assert await rival.is_enabled()
    await marks.disable()
    await marks.disable()
    await hint.wait()
    assert not await rival.is_enabled()
    assert (await store.get("/ledgers/underreplication/disable"))[0] == b""
    await rival.enable()
    await rival.enable()
    assert await marks.is_enabled()


async def test_the_delay_before_a_bookie_counts_as_lost_is_kept_as_text(marks: RepairMarks, store: FaultyStore) -> None:
    assert await marks.lost_bookie_delay_s() == 0
    await marks.set_lost_bookie_delay_s(60)
    await marks.set_lost_bookie_delay_s(90)
    assert await marks.lost_bookie_delay_s() == 90
    assert (await store.get(paths.LOST_BOOKIE_RECOVERY_DELAY))[0] == b"90"
    await store.set(paths.LOST_BOOKIE_RECOVERY_DELAY, b"soon", -1)
    with pytest.raises(Corrupted, match="soon"):
        await marks.lost_bookie_delay_s()


async def test_reading_a_mark_that_is_not_there_says_so(marks: RepairMarks) -> None:
    with pytest.raises(NoSuchNode):
        await marks.read(L7)
