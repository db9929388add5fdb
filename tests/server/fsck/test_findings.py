"""What a check of the whole cluster must notice."""

from kvstore.partition.state.entry import Entry, EntryKind, control
from kvstore.partition.state.move_records import Own, encode
from kvstore.server.fsck.findings import (
    START_BOOKIES,
    TOO_FEW_COPIES,
    WAIT_FOR_COPIES,
    FsckReport,
    Sequences,
    Severity,
    check_copies,
    check_length,
    check_list,
    check_quorum,
    check_zones,
    orphans,
)
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId, Position, Quorum, Seq
from kvstore.wal.ledger_list import LedgerList

P = PartitionId("p1")
B1, B2, B3 = BookieId("b1"), BookieId("b2"), BookieId("b3")


def ledger(number: int) -> LedgerMetadata:
    return LedgerMetadata(LedgerId(number), Quorum(3, 3, 2), (Fragment(EntryId(0), (B1, B2, B3)),))


def closed(number: int) -> LedgerMetadata:
    return ledger(number).closed(EntryId(4), 100)


def list_of(*numbers: int) -> LedgerList:
    listed = LedgerList()
    for number in numbers:
        listed = listed.with_ledger(LedgerId(number), Seq(number * 10), epoch=number, lease_ms=500)
    return listed


def findings(report: FsckReport) -> list[tuple[Severity, str]]:
    return [(finding.severity, finding.where) for finding in report.findings]


def test_list_with_two_open_ledgers_at_its_end_is_valid() -> None:
    report = FsckReport()
    found = {LedgerId(1): closed(1), LedgerId(2): ledger(2), LedgerId(3): ledger(3)}
    check_list(report, P, list_of(1, 2, 3), found)
    assert report.findings == []


def test_open_ledger_before_the_last_two_is_an_error() -> None:
    report = FsckReport()
    found = {LedgerId(1): ledger(1), LedgerId(2): closed(2), LedgerId(3): ledger(3)}
    check_list(report, P, list_of(1, 2, 3), found)
    assert findings(report) == [(Severity.ERROR, "p1 ledger=1")]


def test_listed_ledger_without_metadata_is_an_error() -> None:
    report = FsckReport()
    check_list(report, P, list_of(1, 2), {LedgerId(2): ledger(2)})
    assert findings(report) == [(Severity.ERROR, "p1 ledger=1")]


def test_missing_copies_are_warnings_and_below_ack_quorum_errors() -> None:
    report = FsckReport()
    check_copies(report, "p1", ledger(1), EntryId(0), {B1: b"x", B2: b"x", B3: b"x"})
    check_copies(report, "p1", ledger(1), EntryId(1), {B1: b"x", B2: None, B3: b"x"})
    check_copies(report, "p1", ledger(1), EntryId(2), {B1: b"x", B2: None, B3: None})
    assert findings(report) == [(Severity.ERROR, "p1 entry 2"), (Severity.WARNING, "p1 entry 1")]
    assert (report.entries, report.copies) == (3, 6)


def test_two_payloads_of_one_entry_are_an_error() -> None:
    report = FsckReport()
    check_copies(report, "p1", ledger(1), EntryId(0), {B1: b"x", B2: b"y", B3: b"x"})
    assert findings(report) == [(Severity.ERROR, "p1 entry 0")]


def test_same_finding_for_many_entries_is_one() -> None:
    report = FsckReport()
    for entry in (0, 1, 2, 5, 6, 9):
        check_copies(report, "p1 ledger=1", ledger(1), EntryId(entry), {B1: b"x", B2: None, B3: b"x"})
    assert findings(report) == [(Severity.WARNING, "p1 ledger=1 entries 0-2,5-6,9 (6)")]
    assert report.document()["findings"][0]["entries"] == [[0, 2], [5, 6], [9, 9]]


def test_missing_copy_states_bookie_and_advice() -> None:
    report = FsckReport()
    payloads = {B1: b"x", B2: None, B3: b"x"}
    check_copies(report, "p1", ledger(1), EntryId(0), payloads, lambda bookie: bookie != B2)
    check_copies(report, "p1", ledger(1), EntryId(1), payloads)
    check_copies(report, "p1", ledger(1), EntryId(2), {B1: b"x", B2: None, B3: None})
    assert [finding.message for finding in report.findings] == [
        "1 of 3 copies; none on b2, b3; 2 are needed",
        "2 of 3 copies; none on b2 (not up)",
        "2 of 3 copies; none on b2",
    ]
    assert report.verdict.startswith("AT RISK")
    assert report.advice() == [TOO_FEW_COPIES, START_BOOKIES, WAIT_FOR_COPIES]


def test_ledger_written_with_fewer_copies_is_a_note() -> None:
    report = FsckReport()
    two = LedgerMetadata(LedgerId(1), Quorum(2, 2, 2), (Fragment(EntryId(0), (B1, B2)),))
    check_quorum(report, "p1 ledger=1", two, 3)
    assert report.findings == []
    check_quorum(report, "p1 ledger=1", two.closed(EntryId(4), 100), 3)
    check_quorum(report, "p1 ledger=2", closed(2), 3)
    assert findings(report) == [(Severity.NOTE, "p1 ledger=1")]
    assert (report.errors, report.warnings, report.verdict) == (0, 0, "Healthy")


def test_wrong_length_of_closed_ledger_is_error_or_warning() -> None:
    for found_bytes, errors, warnings in ((100, 0, 0), (99, 0, 1), (101, 1, 0)):
        report = FsckReport()
        check_length(report, "p1 ledger=1", closed(1), found_bytes)
        check_length(report, "p1 ledger=2", ledger(2), found_bytes)
        assert (report.errors, report.warnings) == (errors, warnings)


def puts(first: int, count: int, *, epoch: int = 1, partition: PartitionId = P) -> bytes:
    entry = Entry(partition, epoch, first, 1, bytes([1]) * count)
    entry.keys = [b"k%d" % number for number in range(count)]
    entry.values = [b"v"] * count
    return entry.encode()


def test_log_without_gaps_is_valid_with_control_records() -> None:
    report = FsckReport()
    log = Sequences(report, P)
    log.begin(1, exact=True)
    for payload in (control(P, 1, 1, 1, EntryKind.EPOCH_START).encode(), puts(1, 3), puts(4, 1)):
        log.add("ledger", EntryId(0), payload)
    log.begin(5, exact=True)
    log.add("ledger", EntryId(3), puts(5, 2, epoch=2))
    assert report.findings == []


def test_sequences_jump_only_at_owned_ranges() -> None:
    own = encode(Own(7, Position(LedgerId(1), EntryId(4)), Position(LedgerId(1), EntryId(6)), seq=900, time_ms=5))
    for said, after, errors in ((own, 901, 0), (own, 902, 1), (own, 3, 1), (b"garbage", 901, 1)):
        report = FsckReport()
        log = Sequences(report, P)
        log.add("ledger", EntryId(0), puts(1, 2))
        log.add("ledger", EntryId(1), control(P, 1, 3, 1, EntryKind.OWN, said).encode())
        log.add("ledger", EntryId(2), puts(after, 1))
        assert report.errors == errors, (said, after)


def test_gaps_and_foreign_entries_are_errors() -> None:
    for bad in (puts(3, 1), puts(2, 1, epoch=0), puts(2, 1, partition=PartitionId("p2")), b"\xff"):
        report = FsckReport()
        log = Sequences(report, P)
        log.add("ledger", EntryId(0), puts(1, 1))
        log.add("ledger", EntryId(1), bad)
        assert report.errors == 1, bad


def test_wrong_first_sequence_in_list_is_an_error_when_exact() -> None:
    report = FsckReport()
    log = Sequences(report, P)
    log.add("ledger", EntryId(0), puts(1, 3))
    log.begin(3, exact=False)
    assert report.errors == 0
    log.begin(3, exact=True)
    assert report.errors == 1


def test_orphans_are_unlisted_ledgers_of_a_partition() -> None:
    ids = [LedgerId(1), LedgerId(2), LedgerId(3)]
    owners = {LedgerId(1): P, LedgerId(2): P}
    assert orphans([LedgerId(1)], ids, owners) == [(LedgerId(2), P)]


def test_copies_sharing_a_zone_are_warned_of_after_close() -> None:
    """docs/protocol.md, W10."""
    b4, zones = BookieId("b4"), {B1: "a", B2: "a", B3: "b"}
    better = LedgerMetadata(LedgerId(1), Quorum(3, 3, 2), (Fragment(EntryId(0), (B1, b4, B3)),))
    report = FsckReport()
    check_zones(report, "p1 ledger=1", closed(1), None, zones)
    assert report.findings == []
    check_zones(report, "p1 ledger=1", closed(1), better, zones)
    check_zones(report, "p1 ledger=2", ledger(2), better, zones)
    assert findings(report) == [(Severity.WARNING, "p1 ledger=1"), (Severity.NOTE, "p1 ledger=2")]
    assert "b1 in a, b2 in a, b3 in b" in report.findings[0].message
