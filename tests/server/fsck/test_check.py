"""A check of an invented cluster: metadata in memory, copies from a table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvstore.env.ports import Env
from kvstore.env.real import real_env
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.lost import with_lost
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.partition.state.entry import Entry
from kvstore.ring import encode as encode_ring
from kvstore.server.fsck import check
from kvstore.server.fsck.check import Fsck, LedgerCopies
from kvstore.server.fsck.findings import TOO_FEW_COPIES, FsckFinding, FsckReport, Severity
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId, Quorum, Seq, ServerId
from kvstore.wal.creator import OWNER_KEY
from kvstore.wal.ledger_list import LedgerList, Listed
from kvstore.wal.list_codec import encode
from tests.ring.rings import new_ring

P, P2 = PartitionId("p1"), PartitionId("p2")
BOOKIES = (BookieId("b1"), BookieId("b2"), BookieId("b3"))
ENTRIES = 3
LEDGERS = (LedgerId(7), LedgerId(8), LedgerId(9))


def put(seq: int) -> bytes:
    entry = Entry(P, 1, seq, 1, bytes([1]))
    entry.keys, entry.values = [b"k"], [b"v"]
    return entry.encode()


def ledger(number: LedgerId, owner: PartitionId = P) -> LedgerMetadata:
    fragment = Fragment(EntryId(0), BOOKIES)
    return LedgerMetadata(number, Quorum(3, 3, 2), (fragment,), token=1, custom=((OWNER_KEY, owner.encode()),))


class Made:
    """A partition whose log has three ledgers of three entries, with all copies."""

    def __init__(self, env: Env) -> None:
        self.env, self.store = env, MemoryStore()
        self.lost: set[tuple[LedgerId, int]] = set()
        """Entries without a copy on any bookie."""
        self.confirmed: dict[LedgerId, int] = {}
        """The last entry that is known to be confirmed, for ledgers that are not closed."""

    async def set_up(self) -> None:
        await self.put(paths.INSTANCE_ID, b"00000000-0000-4000-8000-000000000000")
        await self.put(paths.RING, encode_ring(new_ring((P,), {ServerId("n1"): ""}, 1)))
        for place, number in enumerate(LEDGERS):
            size = sum(len(self.payload(number, entry)) for entry in range(ENTRIES))
            made = ledger(number) if place == len(LEDGERS) - 1 else ledger(number).closed(EntryId(ENTRIES - 1), size)
            await LedgerStore(self.store).create(made)
        await self.list(P, LEDGERS)

    async def put(self, path: str, data: bytes) -> None:
        await ensure_path(self.store, path)
        await self.store.set(path, data, -1)

    async def list(self, partition: PartitionId, ledgers: Sequence[LedgerId]) -> None:
        rows = tuple(Listed(each, Seq(self.first(each)), exact=True, epoch=1, lease_ms=0) for each in ledgers)
        await self.put(paths.partition_log(partition), encode(LedgerList(1, rows)))

    @staticmethod
    def first(number: LedgerId) -> int:
        return 1 + ENTRIES * (number - LEDGERS[0])

    def payload(self, number: LedgerId, entry: int) -> bytes:
        return put(self.first(number) + entry)

    async def read(self, copies: LedgerCopies, _: BookieId, entry: EntryId) -> bytes | None:
        number = copies.metadata.ledger
        return None if (number, entry) in self.lost else self.payload(number, entry)

    async def last_entry(self, copies: LedgerCopies) -> EntryId:
        if copies.metadata.ledger in self.confirmed:
            return EntryId(self.confirmed[copies.metadata.ledger])
        return EntryId(ENTRIES - 1)

    async def checked(self) -> FsckReport:
        return await Fsck(self.env, self.store).run()


@pytest.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    env = real_env(tmp_path, name="fsck")
    made = Made(env)

    async def read(copies: LedgerCopies, bookie: BookieId, entry: EntryId) -> bytes | None:
        return await made.read(copies, bookie, entry)

    async def last_entry(copies: LedgerCopies) -> EntryId:
        return await made.last_entry(copies)

    monkeypatch.setattr(LedgerCopies, "read", read)
    monkeypatch.setattr(LedgerCopies, "last_entry", last_entry)
    yield made
    await env.nursery.close()


def about_ledgers(report: FsckReport, least: Severity = Severity.ERROR) -> list[tuple[str, str]]:
    worse = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
    kept = worse[: worse.index(least) + 1]
    return [(each.where, _short(each)) for each in report.findings if "ledger" in each.where and each.severity in kept]


def _short(finding: FsckFinding) -> str:
    return finding.message.partition(";")[0]


async def test_consistent_log_has_no_errors(made: Made) -> None:
    await made.set_up()
    report = await made.checked()
    assert (report.errors, report.entries, report.copies) == (0, 9, 27)


async def test_bookies_that_are_down_break_no_invariant(made: Made) -> None:
    """The sequence continues after the unreadable entries, in the same ledger or the next."""
    await made.set_up()
    made.lost = {(LEDGERS[0], 1), (LEDGERS[1], 0), (LEDGERS[1], 1), (LEDGERS[1], 2)}
    report = await made.checked()
    assert {each.advice for each in report.findings if each.severity is Severity.ERROR} == {TOO_FEW_COPIES}
    assert report.verdict.startswith("AT RISK")


# docs/protocol.md A14
async def test_lost_entry_is_a_note(made: Made) -> None:
    await made.set_up()
    made.lost = {(LEDGERS[0], 1), (LEDGERS[1], 0)}
    for number, entry in made.lost:
        await LedgerStore(made.store).update(number, lambda found, entry=entry: with_lost(found, [entry]))
    report = await made.checked()
    assert report.errors == 0
    assert about_ledgers(report, Severity.NOTE) == [
        ("p1 ledger=7 entry 1", "is marked as lost: its copies are no longer searched for"),
        ("p1 ledger=8 entry 0", "is marked as lost: its copies are no longer searched for"),
    ]
    made.lost.add((LEDGERS[0], 2))
    report = await made.checked()
    assert [where for where, _ in about_ledgers(report)] == ["p1 ledger=7 entry 2"], "a loss beside it is seen"


async def test_open_ledger_may_have_unconfirmed_entries(made: Made) -> None:
    """During a roll the next ledger already has entries."""
    await made.set_up()
    await LedgerStore(made.store).remove(LEDGERS[1], -1)
    await LedgerStore(made.store).create(ledger(LEDGERS[1]))
    made.confirmed[LEDGERS[1]] = ENTRIES - 2
    assert (await made.checked()).errors == 0


async def test_ledgers_of_partition_joining_during_check_are_not_orphans(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made.set_up()
    read, others = made.read, LedgerId(11)

    async def joins(copies: LedgerCopies, bookie: BookieId, entry: EntryId) -> bytes | None:
        if (copies.metadata.ledger, entry, bookie) == (LEDGERS[2], 0, BOOKIES[0]):
            await made.put(paths.RING, encode_ring(new_ring((P, P2), {ServerId("n1"): ""}, 1)))
            await LedgerStore(made.store).create(ledger(others, P2))
            await made.list(P2, [others])
        return await read(copies, bookie, entry)

    monkeypatch.setattr(made, "read", joins)
    assert about_ledgers(await made.checked(), Severity.NOTE) == []
    monkeypatch.setattr(made, "read", read)
    await made.list(P2, [])
    found = about_ledgers(await made.checked(), Severity.WARNING)
    assert found == [("p2 ledger=11", "was created for this partition but is not in its list")]


async def test_open_ledger_whose_bookies_are_down_is_at_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its bookies know its entries. Nothing else of the log is left: it was trimmed."""
    monkeypatch.setattr(check, "AGAIN_S", 0)
    env = real_env(tmp_path, name="fsck")
    made = Made(env)
    await made.set_up()
    await made.list(P, LEDGERS[2:])
    report = await made.checked()
    await env.nursery.close()
    assert report.verdict.startswith("AT RISK")
    [(where, message)] = about_ledgers(report)
    assert where == "p1 ledger=9"
    assert message.endswith("because they are written to b1 (not up), b2 (not up), b3 (not up)")
