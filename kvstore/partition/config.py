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
"""With one large operation beyond it an entry is still one that bookies take: less than 5 MiB."""
IN_FLIGHT_LIMIT = 128
"""Half of what a leader has in flight at most: the other half is for records, which do not wait for a free slot."""
IN_FLIGHT_BYTES_LIMIT = 32 << 20
"""Bytes that a leader may gather into entries in flight. A bookie stops reading a connection on which 32 MiB wait for a
sync. The leader gives up a bookie to which it could not send 64 MiB."""
LEASE_MS_MAX = 120_000
"""A new leader waits for so long before it serves."""
QUEUE_WAIT_S_MIN, QUEUE_WAIT_S_MAX = 0.1, 60.0
"""A leader that stops drains its queue for twice as long; clients and other servers wait for 5 s."""
RETRY_WINDOW_MS_MIN = 1_000
"""Clients carry a leader's time of some hundred milliseconds ago: every request would be too old."""
UPKEEP_S_MAX = 3_600.0
"""Logs grow until the state is synced and the log is trimmed."""
WRITE_BUFFER_BYTES_MIN, MEMORY_BYTES_MIN = 1 << 20, 16 << 20
WRITE_BUFFER_BYTES_MAX = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """One value for all partitions of a node."""

    lease_ms: Annotated[int, between(0, LEASE_MS_MAX)] = 400
    """How long an acknowledged entry lets its leader answer reads, from its first send. 0 turns leases off: every read
    then waits for an append of its own time."""
    hidden_pause_ms: Annotated[int, between(0, LEASE_MS_MAX)] = 250
    """For how long, within one lease, a leader's machine may stand still without its clock's seeing that: so much later
    a new leader serves. Only leases need it."""
    entries_in_flight_max: Annotated[int, between(1, IN_FLIGHT_LIMIT)] = 4
    """Entries that a leader has sent and not yet seen acknowledged. Times `entry_bytes_max` it is at most 32 MiB."""
    entry_bytes_max: Annotated[int, between(1 << 10, ENTRY_BYTES_LIMIT)] = 256 << 10
    """Keys and values gathered into one entry, and effects decided into it. One operation may still go beyond."""
    queue_items_max: Annotated[int, between(1, COUNT_MAX)] = 32_768
    """Operations that wait at a leader; 1,000 connections with 16 each fit twice. What goes beyond is refused."""
    queue_bytes_max: Annotated[int, between(4 << 20, BYTES_MAX)] = 32 << 20
    """Keys and values of what waits."""
    queue_wait_max_s: Annotated[float, between(QUEUE_WAIT_S_MIN, QUEUE_WAIT_S_MAX)] = 5.0
    """What has waited longer is refused, not appended."""
    retry_window_ms: Annotated[int, between(RETRY_WINDOW_MS_MIN, MS_MAX)] = 600_000
    """How long, in record time, a client without requests is remembered; older retries are refused."""
    retry_bytes_max: Annotated[int, between(1_000, BYTES_MAX)] = 64 << 20
    """Memory for remembered results. Beyond it new clients are refused, retryably."""
    retry_results_max: Annotated[int, between(1, COUNT_MAX)] = 1024
    """Results that one client may leave unacknowledged."""
    check_every: Annotated[int, between(1, COUNT_MAX)] = 1000
    """Entries between two comparisons of the replicas' states."""
    expiry_sweep_s: Annotated[float, zero_or(PERIOD_MIN_S, SECONDS_MAX)] = 1.0
    """How often a leader deletes keys past their expiry that nobody asks for. 0: never."""
    flush_s: Annotated[float, between(PERIOD_MIN_S, UPKEEP_S_MAX)] = 30.0
    """How often the state is synced to disk: each time after 0.5 to 1.5 times as long."""
    trim_s: Annotated[float, between(PERIOD_MIN_S, UPKEEP_S_MAX)] = 10.0
    """How often a leader looks whether the log can be trimmed."""
    retention_ms: Annotated[int, between(0, MS_MAX)] = 3_600_000
    """How long the log is kept for feeds, whatever the replicas have synced."""
    lead_back_s: Annotated[float, between(0, SECONDS_MAX)] = 8.0
    """How long the replica that the ring prefers must have been up before it gets the lead back. 1e9: it never does."""
    write_buffer_bytes: Annotated[int, between(WRITE_BUFFER_BYTES_MIN, WRITE_BUFFER_BYTES_MAX)] = 16 << 20
    """Of each engine: what gathers in memory before it becomes a file, within `memory_bytes` of them all."""
    memory_bytes: Annotated[int, between(MEMORY_BYTES_MIN, BYTES_MAX)] = 256 << 20
    """Of the engines of all partitions together: what gathers in memory, blocks of files, and the files' indexes
    (kvstore/partition/state/rocks_memory.py)."""

    @property
    def listed_lease_ms(self) -> int:
        """The lease that the log's list tells a successor to wait out: by its clock a leader's lease may have lasted so
        long (docs/protocol.md, P32)."""
        return self.lease_ms + self.hidden_pause_ms if self.lease_ms else 0

    def __post_init__(self) -> None:
        if faults := range_faults(self) or self._faults_together():
            raise WrongSettings(*faults)

    def _faults_together(self) -> list[str]:
        """Return the faults of settings that are each in their range."""
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
