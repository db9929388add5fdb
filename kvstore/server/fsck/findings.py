"""The findings of a check of the whole cluster. Decides only."""

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
    """As it should be, and worth knowing."""
    WARNING = "warning"
    """Nothing is lost; something is down, lacks a copy or is left over."""
    ERROR = "error"
    """An invariant is broken, or one more failure can lose data."""


RUNS_SHOWN_MAX = 8

ASK_STATUS = "`kvstore status` shows each finding with its next step."
START_SERVERS = "Start the servers that are down (`kvstore up` for a local cluster), undrain those that are drained."
WAIT_FOR_LEADER = (
    "A takeover lasts about a second: check again. If a partition stays without a leader, start nodes until two "
    "bookies and one of its replicas are up; the nodes' logs say what they wait for."
)
START_BOOKIES = (
    "Start the nodes of the bookies that are not up (`kvstore up` for a local cluster); what they missed is copied to "
    "them within a minute. If a disk is gone for good: `kvstore bookie decommission ID`."
)
WAIT_FOR_COPIES = (
    "Leaders make missing copies again in the background, a few seconds after a bookie is back: check again in a "
    "minute. If it stays: `kvstore bookie scrub ID` finds damage, the leader's log says why it cannot copy."
)
TOO_FEW_COPIES = (
    "Start every bookie that is named here (`kvstore up` for a local cluster) before anything else, also one with an "
    "old disk: with too few copies the next failure can lose data. One that is up has a damaged copy: `kvstore bookie "
    "scrub ID --repair`. Delete and decommission nothing."
)
REPORT_IT = (
    "This must not happen: keep the data directories and the logs of all nodes as they are, and report it with the "
    "output of `kvstore fsck --json`."
)
WAIT_FOR_ZONES = (
    "Leaders move copies that share a zone to bookies of other zones in the background, at the rate of repair: check "
    "again in a few minutes. If it stays: the leader's log says why it cannot."
)
LONG_LIST = (
    "Something keeps the log from being trimmed, or its leaders change all the time: `kvstore partition show` says "
    "which replica is away, `kvstore partition pins` what holds the log, the leaders' logs why they end."
)
CLOSED_BY_ANOTHER = (
    "Apache's recovery writes such a length where a writer died with entries under way: nothing is lost, and nothing "
    "here goes by it. If no software of Apache's is in use, report it with the output of `kvstore fsck --json`."
)
SWEPT = (
    "Leaders sweep left-overs every few minutes. If it stays for an hour: `kvstore ledger show` and `ledger delete`."
)


@dataclass(slots=True)
class FsckFinding:
    severity: Severity
    subject: str
    """For example `p1 ledger=7`."""
    message: str
    advice: str = ""
    """What an operator does about it; empty: nothing."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """The entries that it is about, as (first, last), rising; empty: not about entries."""
    is_of_service: bool = False
    """True if the servers report it: what is stored is not wrong for it."""

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
        """It is about these entries as well."""
        if self.runs and self.runs[-1][1] == first - 1:
            self.runs[-1] = (self.runs[-1][0], last)
        else:
            self.runs.append((first, last))

    def document(self) -> dict[str, Any]:
        plain = {"severity": self.severity.value, "subject": self.subject, "message": self.message}
        return plain | {"entries": [list(run) for run in self.runs], "advice": self.advice}


@dataclass(slots=True)
class FsckReport:
    """The findings of a check, the same thing about many entries as one finding, and how much was looked at."""

    partitions: int = 0
    ledgers: int = 0
    entries: int = 0
    copies: int = 0
    others: int = 0
    """Ledgers that no partition's list names, whose copies were found and not read."""
    not_asked: str = ""
    """Why the servers did not say how the cluster is; empty: they did, or were not to be asked."""
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
        """Errors first, then warnings, then notes; each kind in the order in which it was found."""
        worst_first = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        return sorted(self._findings.values(), key=lambda finding: worst_first.index(finding.severity))

    def advice(self) -> list[str]:
        """List the advice, the most urgent first, each once."""
        return list(dict.fromkeys(finding.advice for finding in self.findings if finding.advice))

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self._findings.values())

    def add_health(self, findings: Iterable[admin_pb2.Finding]) -> None:
        """Take in what `kvstore status` finds: an error where something is not served, a warning otherwise. Copies that
        are too few, fsck finds itself, entry by entry."""
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
        """All of it in one sentence."""
        errors = [finding for finding in self.findings if finding.severity is Severity.ERROR]
        stored = [finding for finding in errors if not finding.is_of_service]
        if any(finding.advice != TOO_FEW_COPIES for finding in stored):
            return "NOT SOUND: an invariant is broken"
        if stored:
            return "AT RISK: some data has fewer copies now than one more failure allows"
        if errors:
            return "NOT ALL IS SERVED: what is stored is sound"
        if self.warnings:
            return "Nothing is lost, but something wants attention"
        if self.not_asked:
            return f"What is stored is sound; the servers did not say how they are: {self.not_asked}"
        return "All is well"

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
    """A partition's list and the metadata of its ledgers (docs/protocol.md G1, G3)."""
    ledgers = listed.ledgers
    ids = [each.id for each in ledgers]
    if len(ids) > GROW_FROM:
        report.warn(str(partition), f"its list names {len(ids)} ledgers, far more than it should need", LONG_LIST)
    if len(set(ids)) != len(ids):
        report.error(str(partition), f"its list names a ledger twice: {ids}")
    for before, after in itertools.pairwise(ledgers):
        if after.first_seq < before.first_seq or after.epoch < before.epoch:
            report.error(str(partition), f"ledger {after.id} goes back from ledger {before.id} in sequence or epoch")
    for place, each in enumerate(ledgers):
        metadata = found.get(each.id)
        subject = f"{partition} ledger={each.id}"
        if metadata is None:
            report.error(subject, "is listed and has no metadata")
        elif metadata.state is not LedgerState.CLOSED and place < len(ledgers) - 2:
            report.error(subject, f"is {metadata.state.name}; only the last two of a list may be")


def check_quorum(report: FsckReport, subject: str, metadata: LedgerMetadata, wanted: int) -> None:
    """A closed ledger of fewer copies than `wanted` was written while a bookie was away, and keeps as many."""
    if metadata.state is LedgerState.CLOSED and metadata.quorum.write < wanted:
        report.note(subject, f"was written while bookies were away: {metadata.quorum.write} copies until it is trimmed")


def check_zones(
    report: FsckReport, subject: str, metadata: LedgerMetadata, better: LedgerMetadata | None, zones: Zones
) -> None:
    """Copies that share a zone though a writable bookie of another could have one: `better` is the ledger with such
    copies moved, None if there are none (docs/protocol.md, W10)."""
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
            report.note(subject, f"{what}; they are moved when the ledger is closed")


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
    """The copies of one entry, by bookie of its write set; None where there is no good one (L11, L15). Of an entry that
    was given up nobody makes copies any more (A14)."""
    good = [payload for payload in payloads.values() if payload is not None]
    report.entries += 1
    report.copies += len(good)
    if len(set(good)) > 1:
        report.error(subject, f"bookies hold {len(set(good))} different payloads of the same entry", entry=entry)
    if is_given_up:
        report.note(subject, "was given up: nobody looks for copies of it any more", entry=entry)
        return
    lacking = [bookie for bookie, payload in payloads.items() if payload is None]
    check_lacking(report, subject, metadata.quorum, range(entry, entry + 1), lacking, is_up)


def check_lacking(
    report: FsckReport,
    subject: str,
    quorum: Quorum,
    entries: range,
    lacking: Collection[BookieId],
    is_up: Callable[[BookieId], bool],
) -> None:
    """Entries of which the same bookies have no good copy."""
    missing = ", ".join(bookie if is_up(bookie) else f"{bookie} (not up)" for bookie in lacking)
    good = quorum.write - len(lacking)
    what = f"{good} of {quorum.write} copies; none at {missing}"
    if good < quorum.ack:
        report.error(subject, f"{what}; {quorum.ack} are needed", TOO_FEW_COPIES, entry=entries)
    elif lacking:
        advice = WAIT_FOR_COPIES if all(map(is_up, lacking)) else START_BOOKIES
        report.warn(subject, what, advice, entry=entries)


def check_length(report: FsckReport, subject: str, metadata: LedgerMetadata, found_bytes: int) -> None:
    """A closed ledger's length is what its entries hold; `found_bytes` counts all of them. Apache's recovery counts
    what an entry beyond the end says that a bookie has of a writer that died, if it closes the ledger before that."""
    said = f"its metadata says {metadata.length} bytes, its entries hold {found_bytes}"
    if metadata.state is not LedgerState.CLOSED or metadata.length == found_bytes:
        return
    if metadata.length < found_bytes:
        report.error(subject, said)
    else:
        report.warn(subject, said, CLOSED_BY_ANOTHER)


class Sequences:
    """Follows a partition's log entry by entry: sequences without a gap, epochs that never fall (G4)."""

    def __init__(self, report: FsckReport, partition: PartitionId) -> None:
        self._report, self._partition = report, partition
        self._next: int | None = None
        self._epoch = 0

    def begin(self, first_seq: int, *, exact: bool) -> None:
        """The next entry is the first of a ledger that the list says begins with `first_seq`."""
        if exact and self._next is not None and self._next != first_seq:
            self._report.error(str(self._partition), f"a ledger is listed from {first_seq}, the log is at {self._next}")

    def skip(self) -> None:
        """Let the log go on at any sequence, because what comes next could not be read."""
        self._next = None

    def add(self, subject: str, number: EntryId, payload: bytes) -> None:
        """The log's next entry."""
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
            message = f"begins at sequence {entry.first_seq}, the log is at {self._next}"
            self._report.error(subject, message, entry=number)
        if entry.epoch < self._epoch:
            self._report.error(subject, f"has epoch {entry.epoch} after epoch {self._epoch}", entry=number)
        self._next, self._epoch = max(entry.last_seq, raised_to) + 1, entry.epoch


def _raised_to(entry: entries.Entry) -> int:
    """The sequence behind which the log goes on, if the entry says one: who gets a range goes on behind its source.
    Raises Corrupted."""
    if entry.kinds != bytes((entries.Kind.OWN,)):
        return 0
    record = move_records.decode(entries.Kind.OWN, entry.control)
    return record.seq if isinstance(record, move_records.Own) else 0


def orphans(
    listed: Sequence[LedgerId], all_ids: Sequence[LedgerId], owners: Mapping[LedgerId, PartitionId]
) -> list[tuple[LedgerId, PartitionId]]:
    """Ledgers that a partition made (`owners`) and no list names."""
    known = set(listed)
    return [(ledger, owners[ledger]) for ledger in all_ids if ledger not in known and ledger in owners]
