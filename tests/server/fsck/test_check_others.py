"""The check of ledgers that no partition writes: Apache Pulsar's, for example, and logs that are kept for readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvstore.errors import BookieError
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.service_info import encode_service_info
from kvstore.proto.admin_pb2 import DEGRADED, DOWN, Finding
from kvstore.proto.availability import HeldEntries
from kvstore.ring import PartitionState
from kvstore.ring import encode as encode_ring
from kvstore.server.fsck import presence
from kvstore.server.fsck.check import Fsck
from kvstore.server.fsck.findings import TOO_FEW_COPIES, FsckReport, Severity
from kvstore.server.fsck.presence import missing_runs
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum, ServerId
from kvstore.wal.bookies import BookieClients
from tests.ring.rings import new_ring
from tests.server.fsck.test_check import BOOKIES, Made, P
from tests.server.fsck.test_check import made as made  # the fixture

B1, B2, B3 = BOOKIES
PULSAR = (("application", b"pulsar"), ("component", b"managed-ledger"))


def pulsars(number: int, last: int | None = 9) -> LedgerMetadata:
    """A ledger of ten entries on three bookies that another client wrote."""
    fragment = Fragment(EntryId(0), BOOKIES)
    found = LedgerMetadata(LedgerId(number), Quorum(3, 3, 2), (fragment,), token=1, custom=PULSAR, password=b"secret")
    return found if last is None else found.closed(EntryId(last), 100)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[BookieId, range | None]:
    """The entries that each bookie holds of every ledger; None: the bookie does not answer."""
    table: dict[BookieId, range | None] = dict.fromkeys(BOOKIES, range(10))

    async def entries(_: BookieClients, bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        if (has := table[bookie]) is None:
            raise BookieError(f"{bookie} refuses connections")
        return HeldEntries.of_runs([(has.start, len(has))] if has else [])

    monkeypatch.setattr(BookieClients, "entries", entries)
    monkeypatch.setattr(presence, "AGAIN_S", 0.0)
    return table


async def set_up(made: Made, *ledgers: LedgerMetadata) -> None:
    await made.set_up()
    for bookie in BOOKIES:
        await made.put(paths.available(bookie), encode_service_info(f"{bookie}:3181"))
    for each in ledgers:
        await LedgerStore(made.store).create(each)


def shown(report: FsckReport, severity: Severity = Severity.ERROR) -> list[tuple[str, str]]:
    return [
        (each.where, each.message) for each in report.findings if each.severity is severity and "pulsar" in each.subject
    ]


async def test_foreign_ledgers_are_checked_without_password(made: Made, held: Mapping[BookieId, range | None]) -> None:
    await set_up(made, pulsars(70), pulsars(71))
    report = await made.checked()
    assert (report.others, report.verdict) == (2, "No data is lost, but something needs attention"), report.findings
    assert not shown(report), "replicas of the partition are not up, and nothing else is amiss"


async def test_foreign_ledgers_with_too_few_copies_are_named(made: Made, held: dict[BookieId, range | None]) -> None:
    await set_up(made, pulsars(70), pulsars(71))
    held[B2] = held[B3] = None
    report = await made.checked()
    message = "1 of 3 copies; none on b2 (not up), b3 (not up); 2 are needed"
    assert shown(report) == [(f"pulsar ledger={number} entries 0-9 (10)", message) for number in (70, 71)]
    assert report.verdict.startswith("AT RISK")
    assert TOO_FEW_COPIES in report.advice()


async def test_entries_lost_by_a_bookie_are_named(made: Made, held: dict[BookieId, range | None]) -> None:
    await set_up(made, pulsars(70))
    held[B3] = range(4)
    report = await made.checked()
    assert shown(report, Severity.WARNING) == [("pulsar ledger=70 entries 4-9 (6)", "2 of 3 copies; none on b3")]


async def test_open_foreign_ledger_names_what_is_unknown(made: Made, held: dict[BookieId, range | None]) -> None:
    await set_up(made, pulsars(70, last=None))
    report = await made.checked()
    [(where, message)] = shown(report, Severity.NOTE)
    assert (where, message) == (
        "pulsar ledger=70",
        "is OPEN: only its writer knows the copies from entry 0 on",
    )


async def test_open_ledger_with_absent_bookies_is_at_risk(made: Made, held: dict[BookieId, range | None]) -> None:
    await set_up(made, pulsars(70, last=None))
    for bookie in (B2, B3):
        await made.store.delete(paths.available(bookie), -1)
    report = await made.checked()
    [(_, message)] = shown(report)
    assert message == "is OPEN and is being written to b2, b3 (not up); 2 copies of each entry are needed"


async def test_ledger_with_unreadable_metadata_is_named_as_unchecked(
    made: Made, held: dict[BookieId, range | None]
) -> None:
    await set_up(made)
    await made.put(paths.ledger(LedgerId(70)), b"BookieMetadataFormatVersion\t9\n")
    report = await made.checked()
    [found] = [each for each in report.findings if each.subject == "ledger=70"]
    assert (found.severity, found.message[:27]) == (Severity.WARNING, "its copies are not checked,")


async def test_ledgers_are_checked_without_a_ring(made: Made, held: dict[BookieId, range | None]) -> None:
    """Bookies without servers serve other clients."""
    await set_up(made, pulsars(70))
    await made.store.delete(paths.RING, -1)
    held[B2] = held[B3] = None
    assert shown(await Fsck(made.env, made.store).run())


async def test_retired_partition_is_a_note(made: Made, held: dict[BookieId, range | None]) -> None:
    await set_up(made)
    ring = new_ring((P,), {ServerId("n1"): ""}, 1)
    gone = replace(ring.partitions[P], state=PartitionState.RETIRED)
    await made.put(paths.RING, encode_ring(replace(ring, partitions={P: gone})))
    report = await made.checked()
    assert report.warnings == 0, report.findings
    assert any("is retired and needs no replica" in each.message for each in report.findings)


def test_runs_of_missing_entries_are_found() -> None:
    metadata = LedgerMetadata(LedgerId(7), Quorum(3, 2, 2), (Fragment(EntryId(0), BOOKIES),), password=b"").closed(
        EntryId(5), 10
    )
    held = {B1: HeldEntries.of_runs([(0, 6)]), B2: HeldEntries.of_runs([(0, 2), (4, 2)])}
    found = [run for runs in missing_runs(metadata, EntryId(5), held) for run in runs]
    assert found == [
        (range(1, 3), (B3,)),  # entry 1 is on b2 and b3, entry 2 on b3 and b1
        (range(3, 4), (B2,)),
        (range(4, 6), (B3,)),
    ]


def test_status_findings_affect_the_verdict_of_fsck() -> None:
    def verdict(*findings: Finding) -> str:
        report = FsckReport()
        report.add_health(findings)
        return report.verdict

    lame = Finding(
        grade=DEGRADED, code="node_silent", subject="node n3", reason="refuses connections", next_step="start"
    )
    down = Finding(grade=DOWN, code="no_leader", subject="partition p1", reason="no leader")
    assert verdict() == "Healthy"
    assert verdict(lame) == "No data is lost, but something needs attention"
    assert verdict(lame, down) == "NOT ALL IS SERVED: the stored data is consistent"
    report = FsckReport(not_asked="no server can be reached")
    assert "Healthy" not in report.verdict
