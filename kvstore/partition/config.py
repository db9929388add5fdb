"""The settings of a partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore.ranges import WrongSettings, above, at_least, between, range_faults

ENTRY_BYTES_LIMIT = 1 << 20
"""With one large operation beyond it an entry is still one that bookies take: less than 5 MiB."""
WRITE_BUFFER_BYTES_MIN, MEMORY_BYTES_MIN = 1 << 20, 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """One value for all partitions of a node."""

    lease_ms: Annotated[int, at_least(0)] = 400
    """How long an acknowledged entry lets its leader answer reads, from its first send. 0 turns leases off: every read
    then waits for an append of its own time."""
    hidden_pause_ms: Annotated[int, at_least(0)] = 250
    """For how long, within one lease, a leader's machine may stand still without its clock's seeing that: so much later
    a new leader serves. Only leases need it."""
    entries_in_flight_max: Annotated[int, at_least(1)] = 4
    """Entries that a leader has sent and not yet seen acknowledged."""
    entry_bytes_max: Annotated[int, between(1 << 10, ENTRY_BYTES_LIMIT)] = 256 << 10
    """Keys and values gathered into one entry, and effects decided into it. One operation may still go beyond."""
    queue_items_max: Annotated[int, at_least(1)] = 32_768
    """Operations that wait at a leader; 1,000 connections with 16 each fit twice. What goes beyond is refused."""
    queue_bytes_max: Annotated[int, at_least(4 << 20)] = 32 << 20
    """Keys and values of what waits."""
    queue_wait_max_s: Annotated[float, above(0)] = 5.0
    """What has waited longer is refused, not appended."""
    retry_window_ms: Annotated[int, at_least(1)] = 600_000
    """How long, in record time, a client without requests is remembered; older retries are refused."""
    retry_bytes_max: Annotated[int, at_least(1)] = 64 << 20
    """Memory for remembered results. Beyond it new clients are refused, retryably."""
    retry_results_max: Annotated[int, at_least(1)] = 1024
    """Results that one client may leave unacknowledged."""
    check_every: Annotated[int, at_least(1)] = 1000
    """Entries between two comparisons of the replicas' states."""
    expiry_sweep_s: Annotated[float, at_least(0)] = 1.0
    """How often a leader deletes keys past their expiry that nobody asks for. 0: never."""
    flush_s: Annotated[float, above(0)] = 30.0
    """How often the state is synced to disk: each time after 0.5 to 1.5 times as long."""
    trim_s: Annotated[float, above(0)] = 10.0
    """How often a leader looks whether the log can be trimmed."""
    retention_ms: Annotated[int, at_least(0)] = 3_600_000
    """How long the log is kept for feeds, whatever the replicas have synced."""
    lead_back_s: Annotated[float, at_least(0)] = 8.0
    """How long the replica that the ring prefers must have been up before it gets the lead back. 1e9: it never does."""
    write_buffer_bytes: Annotated[int, at_least(WRITE_BUFFER_BYTES_MIN)] = 16 << 20
    """Of each engine: what gathers in memory before it becomes a file, within `memory_bytes` of them all."""
    memory_bytes: Annotated[int, at_least(MEMORY_BYTES_MIN)] = 256 << 20
    """Of the engines of all partitions together: what gathers in memory, blocks of files, and the files' indexes
    (kvstore/partition/state/rocks_memory.py)."""

    @property
    def listed_lease_ms(self) -> int:
        """The lease that the log's list tells a successor to wait out: by its clock a leader's lease may have lasted so
        long (docs/protocol.md, P32)."""
        return self.lease_ms + self.hidden_pause_ms if self.lease_ms else 0

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)
