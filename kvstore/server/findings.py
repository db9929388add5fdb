"""What a check of the whole cluster found. Decides only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstore.errors import Corrupted
from kvstore.partition import entry as entries
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId
from kvstore.wal.ledger_list import LedgerList


class Severity(StrEnum):
    WARNING = "warning"
    """Nothing is lost, something lacks a copy or is left over."""
    ERROR = "error"
    """An invariant is broken, or one more failure can lose data."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    subject: str
    """For example `p1 ledger=7 entry=41`."""
    message: str

    def document(self) -> dict[str, str]:
        return {"severity": self.severity.value, "subject": self.subject, "message": self.message}


@dataclass(slots=True)
class Report:
    """Findings in the order in which they were made, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    partitions: int = 0
    ledgers: int = 0
    entries: int = 0
    copies: int = 0

    def warn(self, subject: str, message: str) -> None:
        self.findings.append(Finding(Severity.WARNING, subject, message))

    def error(self, subject: str, message: str) -> None:
        self.findings.append(Finding(Severity.ERROR, subject, message))

    @property
    def errors(self) -> int:
        return sum(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def warnings(self) -> int:
        return len(self.findings) - self.errors

    def document(self) -> dict[str, Any]:
        return {
            "errors": self.errors,
            "warnings": self.warnings,
            "partitions": self.partitions,
            "ledgers": self.ledgers,
            "entries": self.entries,
            "copies": self.copies,
            "findings": [finding.document() for finding in self.findings],
        }


def check_list(
    report: Report, partition: PartitionId, listed: LedgerList, found: Mapping[LedgerId, LedgerMetadata]
) -> None:
    """A partition's list and the metadata of its ledgers (docs/protocol.md G1, G3)."""
    ledgers = listed.ledgers
    ids = [each.id for each in ledgers]
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


def check_copies(
    report: Report, subject: str, metadata: LedgerMetadata, entry: EntryId, payloads: Mapping[BookieId, bytes | None]
) -> None:
    """The copies of one entry, by bookie of its write set; None where there is no good one (L11, L15)."""
    good = [payload for payload in payloads.values() if payload is not None]
    report.entries += 1
    report.copies += len(good)
    where = f"{subject} entry={entry}"
    if len(set(good)) > 1:
        report.error(where, f"{len(set(good))} different payloads are stored for it")
    missing = ", ".join(bookie for bookie, payload in payloads.items() if payload is None)
    quorum = metadata.quorum
    if len(good) < quorum.ack:
        report.error(where, f"{len(good)} good copies, want {quorum.ack} at least; none at {missing}")
    elif len(good) < quorum.write:
        report.warn(where, f"{len(good)} good copies of {quorum.write}; none at {missing}")


class Sequences:
    """Follows a partition's log entry by entry: sequences without a gap, epochs that never fall (G4)."""

    def __init__(self, report: Report, partition: PartitionId) -> None:
        self._report, self._partition = report, partition
        self._next: int | None = None
        self._epoch = 0

    def begin(self, first_seq: int, *, exact: bool) -> None:
        """The next entry is the first of a ledger that the list says begins with `first_seq`."""
        if exact and self._next is not None and self._next != first_seq:
            self._report.error(str(self._partition), f"a ledger is listed from {first_seq}, the log is at {self._next}")

    def add(self, subject: str, payload: bytes) -> None:
        """The log's next entry."""
        try:
            entry = entries.decode(payload)
        except Corrupted as error:
            self._report.error(subject, str(error))
            return
        if entry.partition != self._partition:
            self._report.error(subject, f"belongs to partition {entry.partition}")
        if self._next is not None and entry.first_seq != self._next:
            self._report.error(subject, f"begins at sequence {entry.first_seq}, the log is at {self._next}")
        if entry.epoch < self._epoch:
            self._report.error(subject, f"has epoch {entry.epoch} after epoch {self._epoch}")
        self._next, self._epoch = entry.last_seq + 1, entry.epoch


def orphans(
    listed: Sequence[LedgerId], all_ids: Sequence[LedgerId], owners: Mapping[LedgerId, str]
) -> list[tuple[LedgerId, str]]:
    """Ledgers that a partition made (`owners`) and no list names."""
    known = set(listed)
    return [(ledger, owners[ledger]) for ledger in all_ids if ledger not in known and ledger in owners]
