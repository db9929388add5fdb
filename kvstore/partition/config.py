"""The settings of a partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore.ranges import (
    BYTES_MAX,
    COUNT_MAX,
    MS_MAX,
    PERIOD_MIN_S,
    SECONDS_MAX,
    WrongSettings,
    between,
    range_faults,
    zero_or,
)

ENTRY_BYTES_LIMIT = 1 << 20
"""Even with one large operation beyond this limit, an entry is small enough for bookies: less than 5 MiB."""
IN_FLIGHT_LIMIT = 128
"""Half of a leader's maximum of entries in flight. The other half is for control records, which do not wait for a free
slot."""
IN_FLIGHT_BYTES_LIMIT = 32 << 20
"""Bytes that a leader may gather into entries in flight. A bookie stops reading a connection on which 32 MiB wait for a
sync, and the leader replaces a bookie to which it could not send 64 MiB."""
LEASE_MS_MAX = 120_000
"""A new leader waits this long before it serves."""
QUEUE_WAIT_S_MIN, QUEUE_WAIT_S_MAX = 0.1, 60.0
"""A stopping leader drains its queue for twice this long. Clients and other servers wait for 5 s."""
RETRY_WINDOW_MS_MIN = 1_000
"""Requests carry a leader's time that is some hundred milliseconds old; with a shorter window every request would be
too old."""
UPKEEP_S_MAX = 3_600.0
"""Logs grow until the state is synced and the log is trimmed."""
WRITE_BUFFER_BYTES_MIN, MEMORY_BYTES_MIN = 1 << 20, 16 << 20
WRITE_BUFFER_BYTES_MAX = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """The settings of all partitions of a node."""

    lease_ms: Annotated[int, between(0, LEASE_MS_MAX)] = 400
    """Milliseconds for which an acknowledged entry lets its leader answer reads, from the entry's first send. 0 turns
    leases off: every read then waits for an append of its own."""
    hidden_pause_ms: Annotated[int, between(0, LEASE_MS_MAX)] = 250
    """Milliseconds within one lease for which a leader's machine may pause unnoticed by its clock. A new leader serves
    this much later. Only leases need it."""
    entries_in_flight_max: Annotated[int, between(1, IN_FLIGHT_LIMIT)] = 4
    """Entries that a leader has sent and that are not acknowledged yet. Times `entry_bytes_max` it is at most 32
    MiB."""
    entry_bytes_max: Annotated[int, between(1 << 10, ENTRY_BYTES_LIMIT)] = 256 << 10
    """Bytes of keys and values gathered into one entry, and of effects evaluated into it. One operation may exceed
    it."""
    queue_items_max: Annotated[int, between(1, COUNT_MAX)] = 32_768
    """Operations that wait at a leader; further ones are refused. The default fits 1,000 connections with 16 operations
    each twice."""
    queue_bytes_max: Annotated[int, between(4 << 20, BYTES_MAX)] = 32 << 20
    """Bytes of keys and values of the waiting operations."""
    queue_wait_max_s: Annotated[float, between(QUEUE_WAIT_S_MIN, QUEUE_WAIT_S_MAX)] = 5.0
    """Operations that have waited longer are refused, not appended."""
    retry_window_ms: Annotated[int, between(RETRY_WINDOW_MS_MIN, MS_MAX)] = 600_000
    """Milliseconds of record time for which a client without requests is remembered. Older retries are refused."""
    retry_bytes_max: Annotated[int, between(1_000, BYTES_MAX)] = 64 << 20
    """Memory for remembered results. Beyond it new clients are refused and may retry."""
    retry_results_max: Annotated[int, between(1, COUNT_MAX)] = 1024
    """Results that one client may leave unacknowledged."""
    check_every: Annotated[int, between(1, COUNT_MAX)] = 1000
    """Entries between two comparisons of the replicas' states."""
    expiry_sweep_s: Annotated[float, zero_or(PERIOD_MIN_S, SECONDS_MAX)] = 1.0
    """Seconds between two sweeps that delete expired keys which no client reads. 0: never."""
    flush_s: Annotated[float, between(PERIOD_MIN_S, UPKEEP_S_MAX)] = 30.0
    """Average number of seconds between two syncs of the state to disk. Each interval is 0.5 to 1.5 times as long."""
    trim_s: Annotated[float, between(PERIOD_MIN_S, UPKEEP_S_MAX)] = 10.0
    """Seconds between two checks whether a leader can trim the log."""
    retention_ms: Annotated[int, between(0, MS_MAX)] = 3_600_000
    """Milliseconds for which the log is kept for change feeds, whatever the replicas have synced."""
    lead_back_s: Annotated[float, between(0, SECONDS_MAX)] = 8.0
    """Seconds for which the replica that the ring prefers must have been up before the lead is handed back to it. 1e9:
    never."""
    write_buffer_bytes: Annotated[int, between(WRITE_BUFFER_BYTES_MIN, WRITE_BUFFER_BYTES_MAX)] = 16 << 20
    """Bytes that one engine gathers in memory before it writes a file, within the `memory_bytes` of all engines."""
    memory_bytes: Annotated[int, between(MEMORY_BYTES_MIN, BYTES_MAX)] = 256 << 20
    """Memory for the engines of all partitions: write buffers, blocks of files, and the files' indexes
    (kvstore/partition/state/rocks_memory.py)."""

    @property
    def listed_lease_ms(self) -> int:
        """The lease that the log's list tells a successor to wait out: by the successor's clock a leader's lease may
        have lasted this long (docs/protocol.md, P32)."""
        return self.lease_ms + self.hidden_pause_ms if self.lease_ms else 0

    def __post_init__(self) -> None:
        if faults := range_faults(self) or self._faults_together():
            raise WrongSettings(*faults)

    def _faults_together(self) -> list[str]:
        """Return contradictions between settings that are each in range."""
        faults = []
        if (in_flight := self.entries_in_flight_max * self.entry_bytes_max) > IN_FLIGHT_BYTES_LIMIT:
            faults.append(
                f"entries_in_flight_max: expected at most {IN_FLIGHT_BYTES_LIMIT} bytes with entry_bytes_max, got "
                f"{self.entries_in_flight_max} entries of {self.entry_bytes_max} bytes, {in_flight} in all"
            )
        if self.write_buffer_bytes > self.memory_bytes:
            faults.append(
                f"write_buffer_bytes: expected at most memory_bytes, {self.memory_bytes}, got {self.write_buffer_bytes}"
            )
        return faults
