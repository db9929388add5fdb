"""Locates the copies of ledgers whose entries are not read: ledgers of other clients of the bookies, and logs that are
kept for readers. Bookies report which entries they hold, which needs no ledger password."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from kvstore.autorecovery.verdicts import last_to_check
from kvstore.errors import LedgerError, NoSuchLedger
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.lost import given_up
from kvstore.proto.availability import HeldEntries
from kvstore.server.fsck.findings import START_BOOKIES, TOO_FEW_COPIES, FsckReport, check_missing
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerMetadata, LedgerState
from kvstore.wal.bookies import BookieClients
from kvstore.wal.coverage import is_somewhere_short
from kvstore.wal.creator import owner_of
from kvstore.wal.repair import SLICE, bookies_of

AGAIN_S, AGAIN_MAX = 0.5, 6
"""Interval and number of attempts to ask a running bookie for entries that it lacks, because a repair may be
running."""
Run = tuple[range, tuple[BookieId, ...]]
"""Entries, and the bookies that lack all of them."""


class Presence:
    """Locates the copies of one ledger at a time. `is_up` returns True if a bookie is registered and answers.
    `silent` is called with a bookie that does not answer."""

    def __init__(
        self,
        bookies: BookieClients,
        ledgers: LedgerStore,
        report: FsckReport,
        is_up: Callable[[BookieId], bool],
        silent: Callable[[BookieId], None],
    ) -> None:
        self._bookies, self._ledgers, self._report = bookies, ledgers, report
        self._is_up, self._silent = is_up, silent

    async def check(self, metadata: LedgerMetadata) -> None:
        """Report the missing copies of a ledger. Raises MetadataError."""
        for attempt in range(AGAIN_MAX):
            if attempt:
                await asyncio.sleep(AGAIN_S)
                try:
                    metadata, _ = await self._ledgers.read(metadata.ledger)
                except NoSuchLedger:
                    return  # deleted during the check
            last = last_to_check(metadata)
            held = await self._held(metadata) if last > NO_ENTRY else {}
            runs = await _collected(missing_runs(metadata, last, held))
            if not any(self._is_up(bookie) for _, lacking in runs for bookie in lacking):
                break
        self._report_missing(metadata, last, runs)

    async def _held(self, metadata: LedgerMetadata) -> dict[BookieId, HeldEntries]:
        found = {}
        for bookie in bookies_of(metadata):
            if self._is_up(bookie):
                try:
                    found[bookie] = await self._bookies.entries(bookie, metadata.ledger)
                except LedgerError:
                    self._silent(bookie)
        return found

    def _report_missing(self, metadata: LedgerMetadata, last: EntryId, runs: Sequence[Run]) -> None:
        report, subject, quorum = self._report, subject_of(metadata), metadata.quorum
        report.others += 1
        for entries, lacking in runs:
            check_missing(report, subject, quorum, entries, lacking, self._is_up)
        if metadata.state is LedgerState.CLOSED:
            return
        written = metadata.fragments[-1].ensemble
        away = [bookie for bookie in written if not self._is_up(bookie)]
        what = f"is {metadata.state.name} and is being written to {', '.join(away)} (not up)"
        if is_somewhere_short({written.index(bookie) for bookie in away}, quorum):
            report.error(subject, f"{what}; {quorum.ack} copies of each entry are needed", TOO_FEW_COPIES)
        elif away:
            report.warn(subject, what, START_BOOKIES)
        else:
            report.note(subject, f"is {metadata.state.name}: only its writer knows the copies from entry {last + 1} on")


def subject_of(metadata: LedgerMetadata) -> str:
    """Return the subject of a ledger that no partition lists: the partition or application that wrote it."""
    owner = owner_of(metadata)
    application = dict(metadata.custom).get("application", b"").decode("utf-8", "replace")
    writer = owner or (application if application.isprintable() else "") or "another client"
    return f"{writer} ledger={metadata.ledger}"


def missing_runs(metadata: LedgerMetadata, last: EntryId, held: Mapping[BookieId, HeldEntries]) -> Iterator[list[Run]]:
    """Yield the entries up to `last` that lack copies, one slice at a time, so that the caller can yield to the event
    loop. A bookie missing in `held` lacks every entry that the metadata assigns to it. An entry that is marked as lost
    lacks no copy."""
    is_given_up = given_up(metadata)
    for fragment, following in zip(metadata.fragments, (*metadata.fragments[1:], None), strict=True):
        end = min(last, following.first - 1) if following else last
        for first in range(fragment.first, end + 1, SLICE):
            entries = range(first, min(first + SLICE, end + 1))
            yield _runs_in(metadata, entries, fragment.ensemble, held, is_given_up)


def _runs_in(
    metadata: LedgerMetadata,
    entries: range,
    ensemble: Collection[BookieId],
    held: Mapping[BookieId, HeldEntries],
    is_given_up: Callable[[EntryId], bool],
) -> list[Run]:
    there = {bookie: held[bookie].between(entries[0], entries[-1]) for bookie in ensemble if bookie in held}
    if metadata.quorum.write == metadata.quorum.ensemble and len(there) == len(ensemble):
        whole = len(entries)
        if all(len(each) == whole for each in there.values()):
            return []  # the common case
    runs: list[Run] = []
    for entry in entries:
        if is_given_up(EntryId(entry)):
            continue
        write_set = metadata.write_set(EntryId(entry))
        lacking = tuple(bookie for bookie in write_set if bookie not in there or entry not in there[bookie])
        if not lacking:
            continue
        if runs and runs[-1][0].stop == entry and runs[-1][1] == lacking:
            runs[-1] = (range(runs[-1][0].start, entry + 1), lacking)
        else:
            runs.append((range(entry, entry + 1), lacking))
    return runs


async def _collected(slices: Iterator[list[Run]]) -> list[Run]:
    found: list[Run] = []
    for runs in slices:
        found += runs
        await asyncio.sleep(0)  # lets the event loop serve the connections
    return found
