"""A bookie's counters: plain numbers, read by the publishers of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from kvstore.env.histogram import Histogram


@dataclass(slots=True)
class Statistics:
    """Counts since the process started, unless the field says "now"."""

    adds: int = 0
    add_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    fences: int = 0
    refused_fenced: int = 0
    refused_key: int = 0
    refused_digest: int = 0
    """Adds and explicit LACs with a wrong digest."""
    refused_plain: int = 0
    refused_user: int = 0
    """Clients refused because of their certificate."""
    refused_cluster: int = 0
    """Connections of clients that said they were of another cluster."""
    refused_other_entry: int = 0
    """Adds refused because the ledger has another payload of the entry."""
    refused_readonly: int = 0
    refused_overload: int = 0
    refused_unknown: int = 0
    """Requests without a definite answer: limbo, an unreadable entry, a ledger that does not name this bookie."""
    syncs: int = 0
    synced_bytes: int = 0
    filled_bytes: int = 0
    """Bytes of zeros written ahead into the next segment."""
    group_records: Histogram = field(default_factory=lambda: Histogram(1))
    sync_s: Histogram = field(default_factory=lambda: Histogram(1e-6))
    asked_metadata: int = 0
    tombstones: int = 0
    """Now."""
    ledgers: int = 0
    """Now."""
    segments: int = 0
    """Now."""
    disk_bytes: int = 0
    """Now: size of the segments."""
    live_bytes: int = 0
    """Now: size of entries in the segments that are still needed."""
    index_blocks_read: int = 0
    """Blocks read from index files, to find entries in full segments."""
    index_files_rebuilt: int = 0
    """Damaged or missing index files that were rebuilt from their segments while the bookie ran."""
    index_segments_in_memory: int = 0
    """Now: full segments whose entries are in memory because their index files are not on disk yet."""
    free_bytes: int = 0
    """Now: free space of the disk, or of all disks."""
    readonly: bool = False
    """Now."""
    limbo_ledgers: int = 0
    """Now."""
    scrubbed_bytes: int = 0
    damaged_records: int = 0
    """Bad checksums found by reads, the scrub and the start."""
    reclaimed_bytes: int = 0
    rewritten_bytes: int = 0
    dropped_ledgers: int = 0
    unassigned_ledgers: int = 0
    new_incarnations: int = 0
    """1 if this process formatted its directories."""
    bad_requests: int = 0
    connections: int = 0
    """Now."""
    directories: int = 1
    """Now: the journal directories, including failed ones."""
    directories_failed: int = 0
    """Now: the journal directories that have failed since the start."""

    def numbers(self) -> dict[str, int | float]:
        """Return everything as plain numbers; for a histogram, the count, the sum and three quantiles."""
        found: dict[str, int | float] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Histogram):
                found |= {f"{each.name}_count": value.count, f"{each.name}_sum": value.total}
                found |= {f"{each.name}_p{share}": value.quantile(share / 100) for share in (50, 95, 99)}
            else:
                found[each.name] = int(value)
        return found

    def histograms(self) -> dict[str, Histogram]:
        return {each.name: value for each in fields(self) if isinstance(value := getattr(self, each.name), Histogram)}


def added_up(several: Sequence[Statistics]) -> Statistics:
    """Return the sum of several directories' counters. The caller sets the values that are not sums."""
    total = Statistics()
    for each in fields(Statistics):
        values = [getattr(one, each.name) for one in several]
        if isinstance(values[0], Histogram):
            for value in values:
                getattr(total, each.name).include(value)
        elif isinstance(values[0], bool):
            setattr(total, each.name, all(values))
        else:
            setattr(total, each.name, sum(values))
    return total
