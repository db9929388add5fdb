"""The findings of a check of the whole cluster, and the rules that make them. Decides only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstore.errors import Corrupted
from kvstore.partition.state import entry as entries
from kvstore.partition.state import move_records
from kvstore.proto import admin_pb2
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, Quorum
from kvstore.wal.ledger_list import GROW_FROM, LedgerList
from kvstore.wal.placement import Zones


class Severity(StrEnum):
    NOTE = "note"
    """Expected and worth knowing."""
    WARNING = "warning"
    """No data is lost, but something is down, under-replicated or left over."""
    ERROR = "error"
    """An invariant is broken, or one more failure can lose data."""


RUNS_SHOWN_MAX = 8

ASK_STATUS = "Run `kvstore status` to see each finding with its next step."
START_SERVERS = "Start the servers that are down (`kvstore up` for a local cluster) and undrain drained servers."
WAIT_FOR_LEADER = (
    "A takeover takes about a second: check again. If a partition stays without a leader, start nodes until two "
    "bookies and one of its replicas are up; the nodes' logs say what they are waiting for."
)
START_BOOKIES = (
    "Start the nodes of the bookies that are not up (`kvstore up` for a local cluster); they get the missing copies "
    "within a minute. If a disk is lost, run `kvstore bookie decommission ID`."
)
WAIT_FOR_COPIES = (
    "Leaders recreate missing copies in the background, a few seconds after a bookie is back: check again in a minute. "
    "If copies stay missing, `kvstore bookie scrub ID` finds damage and the leader's log says why it cannot copy."
)
TOO_FEW_COPIES = (
    "First start every bookie named here (`kvstore up` for a local cluster), even one with an old disk: with too few "
    "copies the next failure can lose data. If a named bookie is up, its copy is damaged: run `kvstore bookie scrub ID "
    "--repair`. Do not delete or decommission anything."
)
REPORT_IT = (
    "This should never happen. Keep the data directories and the logs of all nodes as they are, and report it with the "
    "output of `kvstore fsck --json`."
)
WAIT_FOR_ZONES = (
    "Leaders move copies that share a zone to bookies in other zones in the background, at the repair rate: check "
    "again in a few minutes. If copies still share a zone, the leader's log says why."
)
LONG_LIST = (
    "Something prevents trimming, or leaders change all the time: `kvstore partition show` shows absent replicas, "
    "`kvstore partition pins` shows pins, and the leaders' logs say why leaderships end."
)
CLOSED_BY_ANOTHER = (
    "Apache's recovery writes such a length if a writer died with entries in flight: nothing is lost, and kvstore does "
    "not use it. If no Apache software is in use, report it with the output of `kvstore fsck --json`."
)
SWEPT = (
    "Leaders remove orphans every few minutes. If it stays for an hour, use `kvstore ledger show` and `ledger delete`."
)


@dataclass(slots=True)
class FsckFinding:
    severity: Severity
    subject: str
    """The subject, for example `p1 ledger=7`."""
    message: str
    advice: str = ""
    """Advice for the operator; empty if there is none."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of affected entries as (first, last), rising; empty if the finding is not about entries."""
    is_of_service: bool = False
    """True if the servers report the finding, so that the stored data is not affected."""

    @property
    def where(self) -> str:
        """The subject with its entries, for example `p1 ledger=7 entries 0-99 (100)`."""
        if not self.runs:
            return self.subject
        count = sum(last - first + 1 for first, last in self.runs)
        shown = ",".join(
            f"{first}-{last}" if last > first else str(first) for first, last in self.runs[:RUNS_SHOWN_MAX]
        )
        more = ",…" if len(self.runs) > RUNS_SHOWN_MAX else ""
        return f"{self.subject} entry {shown}" if count == 1 else f"{self.subject} entries {shown}{more} ({count})"

    def add_entries(self, first: int, last: int) -> None:
        """Add entries to which the finding applies too."""
        if self.runs and self.runs[-1][1] == first - 1:
            self.runs[-1] = (self.runs[-1][0], last)
        else:
            self.runs.append((first, last))

    def document(self) -> dict[str, Any]:
        plain = {"severity": self.severity.value, "subject": self.subject, "message": self.message}
        return plain | {"entries": [list(run) for run in self.runs], "advice": self.advice}


@dataclass(slots=True)
class FsckReport:
    """The findings of a check and how much was checked. The same finding for many entries counts once."""

    partitions: int = 0
    ledgers: int = 0
    entries: int = 0
    copies: int = 0
    others: int = 0
    """Number of ledgers that no partition lists. Their copies were located but not read."""
    not_asked: str = ""
    """Why the servers did not report on the cluster; empty if they did or were not asked."""
    _findings: dict[tuple[Severity, str, str], FsckFinding] = field(default_factory=dict)

    def note(self, subject: str, message: str, *, entry: EntryId | range | None = None) -> None:
        self._add(Severity.NOTE, subject, message, "", entry)

    def warn(self, subject: str, message: str, advice: str = "", *, entry: EntryId | range | None = None) -> None:
        self._add(Severity.WARNING, subject, message, advice, entry)

    def error(
        self, subject: str, message: str, advice: str = REPORT_IT, *, entry: EntryId | range | None = None
    ) -> None:
        self._add(Severity.ERROR, subject, message, advice, entry)

    def _add(self, severity: Severity, subject: str, message: str, advice: str, entry: EntryId | range | None) -> None:
        found = self._findings.setdefault((severity, subject, message), FsckFinding(severity, subject, message, advice))
        if isinstance(entry, range):
            found.add_entries(entry[0], entry[-1])
        elif entry is not None:
            found.add_entries(entry, entry)

    @property
    def findings(self) -> list[FsckFinding]:
        """The findings: errors first, then warnings, then notes, each kind in the order of discovery."""
        worst_first = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        return sorted(self._findings.values(), key=lambda finding: worst_first.index(finding.severity))

    def advice(self) -> list[str]:
        """Return the advice without duplicates, most urgent first."""
        return list(dict.fromkeys(finding.advice for finding in self.findings if finding.advice))

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self._findings.values())

    def add_health(self, findings: Iterable[admin_pb2.Finding]) -> None:
        """Add the findings of `kvstore status`: an error if something is not served, otherwise a warning."""
        for each in findings:
            severity = Severity.ERROR if each.grade == admin_pb2.DOWN else Severity.WARNING
            key = (severity, each.subject, each.reason)
            advice = f"{each.subject}: {each.next_step}" if each.next_step else ASK_STATUS
            self._findings[key] = FsckFinding(severity, each.subject, each.reason, advice, is_of_service=True)

    @property
    def errors(self) -> int:
        return self.count(Severity.ERROR)

    @property
    def warnings(self) -> int:
        return self.count(Severity.WARNING)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        errors = [finding for finding in self.findings if finding.severity is Severity.ERROR]
        stored = [finding for finding in errors if not finding.is_of_service]
        if any(finding.advice != TOO_FEW_COPIES for finding in stored):
            return "INCONSISTENT: an invariant is broken"
        if stored:
            return "AT RISK: some data has so few copies that one more failure can lose it"
        if errors:
            return "NOT ALL IS SERVED: the stored data is consistent"
        if self.warnings:
            return "No data is lost, but something needs attention"
        if self.not_asked:
            return f"The stored data is consistent; the servers did not report their health: {self.not_asked}"
        return "Healthy"

    def document(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "errors": self.errors,
            "warnings": self.warnings,
            "notes": self.count(Severity.NOTE),
            "partitions": self.partitions,
            "ledgers": self.ledgers,
            "entries": self.entries,
            "copies": self.copies,
            "ledgers_of_others": self.others,
            "servers_not_asked": self.not_asked or None,
            "findings": [finding.document() for finding in self.findings],
            "advice": self.advice(),
        }


def check_list(
    report: FsckReport, partition: PartitionId, listed: LedgerList, found: Mapping[LedgerId, LedgerMetadata]
) -> None:
    """Check a partition's list and the metadata of its ledgers (docs/protocol.md G1, G3)."""
    ledgers = listed.ledgers
    ids = [each.id for each in ledgers]
    if len(ids) > GROW_FROM:
        report.warn(str(partition), f"its list has {len(ids)} ledgers, far more than it should need", LONG_LIST)
    if len(set(ids)) != len(ids):
        report.error(str(partition), f"its list contains a ledger twice: {ids}")
    for before, after in itertools.pairwise(ledgers):
        if after.first_seq < before.first_seq or after.epoch < before.epoch:
            report.error(
                str(partition), f"ledger {after.id} has a lower sequence or epoch than ledger {before.id} before it"
            )
    for place, each in enumerate(ledgers):
        metadata = found.get(each.id)
        subject = f"{partition} ledger={each.id}"
        if metadata is None:
            report.error(subject, "is listed but has no metadata")
        elif metadata.state is not LedgerState.CLOSED and place < len(ledgers) - 2:
            report.error(subject, f"is {metadata.state.name}; only the last two ledgers of a list may be")


def check_quorum(report: FsckReport, subject: str, metadata: LedgerMetadata, wanted: int) -> None:
    """Note a closed ledger with fewer copies than `wanted`. It was written while a bookie was down, and keeps that
    number of copies."""
    if metadata.state is LedgerState.CLOSED and metadata.quorum.write < wanted:
        report.note(
            subject, f"was written while bookies were down: it has {metadata.quorum.write} copies until it is trimmed"
        )


def check_zones(
    report: FsckReport, subject: str, metadata: LedgerMetadata, better: LedgerMetadata | None, zones: Zones
) -> None:
    """Check for copies that share a zone although a writable bookie in another zone could have one. `better` is the
    ledger with such copies moved; None if there are none (docs/protocol.md, W10)."""
    if better is None:
        return
    for number, (before, after) in enumerate(zip(metadata.fragments, better.fragments, strict=True)):
        if before == after or (metadata.state is LedgerState.CLOSED and metadata.last_entry < before.first):
            continue
        placed = ", ".join(f"{bookie} in {zones.get(bookie) or 'no zone'}" for bookie in before.ensemble)
        what = f"copies share a zone from entry {before.first} on: {placed}"
        if metadata.state is LedgerState.CLOSED:
            report.warn(subject, what, WAIT_FOR_ZONES)
        elif number == len(metadata.fragments) - 1:
            report.note(subject, f"{what}; they are moved once the ledger is closed")


def check_copies(
    report: FsckReport,
    subject: str,
    metadata: LedgerMetadata,
    entry: EntryId,
    payloads: Mapping[BookieId, bytes | None],
    is_up: Callable[[BookieId], bool] = lambda _: True,
    *,
    is_given_up: bool = False,
) -> None:
    """Check the copies of one entry. `payloads` has the payload of each bookie of its write set; None if it has no good
    copy (L11, L15). Copies of an entry that is marked as lost are no longer repaired (A14)."""
    good = [payload for payload in payloads.values() if payload is not None]
    report.entries += 1
    report.copies += len(good)
    if len(set(good)) > 1:
        report.error(subject, f"bookies have {len(set(good))} different payloads for the same entry", entry=entry)
    if is_given_up:
        report.note(subject, "is marked as lost: its copies are no longer searched for", entry=entry)
        return
    lacking = [bookie for bookie, payload in payloads.items() if payload is None]
    check_missing(report, subject, metadata.quorum, range(entry, entry + 1), lacking, is_up)


def check_missing(
    report: FsckReport,
    subject: str,
    quorum: Quorum,
    entries: range,
    lacking: Collection[BookieId],
    is_up: Callable[[BookieId], bool],
) -> None:
    """Report entries of which the same bookies lack a good copy."""
    missing = ", ".join(bookie if is_up(bookie) else f"{bookie} (not up)" for bookie in lacking)
    good = quorum.write - len(lacking)
    what = f"{good} of {quorum.write} copies; none on {missing}"
    if good < quorum.ack:
        report.error(subject, f"{what}; {quorum.ack} are needed", TOO_FEW_COPIES, entry=entries)
    elif lacking:
        advice = WAIT_FOR_COPIES if all(map(is_up, lacking)) else START_BOOKIES
        report.warn(subject, what, advice, entry=entries)


def check_written(
    report: FsckReport,
    subject: str,
    metadata: LedgerMetadata,
    lacking: Collection[BookieId],
    is_up: Callable[[BookieId], bool],
) -> None:
    """Report a ledger that is not closed and whose last entries only the bookies in `lacking` may know."""
    names = ", ".join(bookie if is_up(bookie) else f"{bookie} (not up)" for bookie in lacking)
    what = f"is {metadata.state.name}, and its last entries are unknown, because they are written to {names}"
    report.error(subject, f"{what}; {metadata.quorum.ack} copies of each entry are needed", TOO_FEW_COPIES)


def check_length(report: FsckReport, subject: str, metadata: LedgerMetadata, found_bytes: int) -> None:
    """Check a closed ledger's length against `found_bytes`, the bytes of all its entries. Apache's recovery may count
    an entry beyond the end that a bookie has of a writer that died, if it closes the ledger before that entry."""
    message = f"its metadata says {metadata.length} bytes, its entries hold {found_bytes}"
    if metadata.state is not LedgerState.CLOSED or metadata.length == found_bytes:
        return
    if metadata.length < found_bytes:
        report.error(subject, message)
    else:
        report.warn(subject, message, CLOSED_BY_ANOTHER)


class Sequences:
    """Follows a partition's log entry by entry: sequences have no gaps and epochs never fall (G4)."""

    def __init__(self, report: FsckReport, partition: PartitionId) -> None:
        self._report, self._partition = report, partition
        self._next: int | None = None
        self._epoch = 0

    def begin(self, first_seq: int, *, exact: bool) -> None:
        """Begin a ledger. According to the list, its first entry has the sequence `first_seq`."""
        if exact and self._next is not None and self._next != first_seq:
            self._report.error(
                str(self._partition), f"expected a ledger from sequence {self._next} on, the list has {first_seq}"
            )

    def skip(self) -> None:
        """Accept any next sequence, because the next entry could not be read."""
        self._next = None

    def add(self, subject: str, number: EntryId, payload: bytes) -> None:
        """Check the log's next entry."""
        try:
            entry = entries.decode(payload)
            raised_to = _raised_to(entry)
        except Corrupted as error:
            self._report.error(subject, str(error), entry=number)
            self.skip()
            return
        if entry.partition != self._partition:
            self._report.error(subject, f"belongs to partition {entry.partition}", entry=number)
        if self._next is not None and entry.first_seq != self._next:
            message = f"expected sequence {self._next}, the entry begins at {entry.first_seq}"
            self._report.error(subject, message, entry=number)
        if entry.epoch < self._epoch:
            self._report.error(subject, f"has epoch {entry.epoch} after epoch {self._epoch}", entry=number)
        self._next, self._epoch = max(entry.last_seq, raised_to) + 1, entry.epoch


def _raised_to(entry: entries.Entry) -> int:
    """Return the sequence after which the log continues if the entry sets one: the target of a move continues after its
    source's sequence. Otherwise 0. Raises Corrupted."""
    if entry.kinds != bytes((entries.EntryKind.OWN,)):
        return 0
    record = move_records.decode(entries.EntryKind.OWN, entry.control)
    return record.seq if isinstance(record, move_records.Own) else 0


def orphans(
    listed: Sequence[LedgerId], all_ids: Sequence[LedgerId], owners: Mapping[LedgerId, PartitionId]
) -> list[tuple[LedgerId, PartitionId]]:
    """Return the ledgers that a partition created (`owners`) but no list contains."""
    known = set(listed)
    return [(ledger, owners[ledger]) for ledger in all_ids if ledger not in known and ledger in owners]
