"""The settings of a partition."""

from __future__ import annotations

from dataclasses import dataclass

ENTRY_BYTES_LIMIT = 1 << 20
"""With one large operation beyond it an entry is still one that bookies take: less than 5 MiB."""
WRITE_BUFFER_BYTES_MIN, MEMORY_BYTES_MIN = 1 << 20, 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """One value for all partitions of a node."""

    lease_ms: int = 400
    """How long an acknowledged entry lets its leader answer reads, from its first send. 0 turns leases off: every read
    then waits for an append of its own time."""
    hidden_pause_ms: int = 250
    """For how long, within one lease, a leader's machine may stand still without its clock's seeing that: so much later
    a new leader serves. Only leases need it."""
    entries_in_flight_max: int = 4
    """Entries that a leader has sent and not yet seen acknowledged."""
    entry_bytes_max: int = 256 << 10
    """Keys and values gathered into one entry, and effects decided into it. One operation may still go beyond."""
    queue_items_max: int = 32_768
    """Operations that wait at a leader; 1,000 connections with 16 each fit twice. What goes beyond is refused."""
    queue_bytes_max: int = 32 << 20
    """Keys and values of what waits."""
    queue_wait_max_s: float = 5.0
    """What has waited longer is refused, not appended."""
    retry_window_ms: int = 600_000
    """How long, in record time, a client without requests is remembered; older retries are refused."""
    retry_bytes_max: int = 64 << 20
    """Memory for remembered results. Beyond it new clients are refused, retryably."""
    retry_results_max: int = 1024
    """Results that one client may leave unacknowledged."""
    check_every: int = 1000
    """Entries between two comparisons of the replicas' states."""
    expiry_sweep_s: float = 1.0
    """How often a leader deletes keys past their expiry that nobody asks for. 0: never."""
    flush_s: float = 30.0
    """How often the state is synced to disk: each time after 0.5 to 1.5 times as long."""
    trim_s: float = 10.0
    """How often a leader looks whether the log can be trimmed."""
    retention_ms: int = 3_600_000
    """How long the log is kept for feeds, whatever the replicas have synced."""
    lead_back_s: float = 8.0
    """How long the replica that the ring prefers must have been up before it gets the lead back."""
    write_buffer_bytes: int = 16 << 20
    """Of each engine: what gathers in memory before it becomes a file, within `memory_bytes` of them all."""
    memory_bytes: int = 256 << 20
    """Of the engines of all partitions together: what gathers in memory, blocks of files, and the files' indexes
    (kvstore/partition/state/rocks_memory.py)."""

    @property
    def listed_lease_ms(self) -> int:
        """The lease that the log's list tells a successor to wait out: by its clock a leader's lease may have lasted so
        long (docs/protocol.md, P32)."""
        return self.lease_ms + self.hidden_pause_ms if self.lease_ms else 0

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least {least}, got {value}"
            for name, least, value in (
                ("lease_ms", 0, self.lease_ms),
                ("hidden_pause_ms", 0, self.hidden_pause_ms),
                ("entries_in_flight_max", 1, self.entries_in_flight_max),
                ("entry_bytes_max", 1 << 10, self.entry_bytes_max),
                ("queue_items_max", 1, self.queue_items_max),
                ("queue_bytes_max", 4 << 20, self.queue_bytes_max),
                ("retry_window_ms", 1, self.retry_window_ms),
                ("retry_results_max", 1, self.retry_results_max),
                ("check_every", 1, self.check_every),
                ("write_buffer_bytes", WRITE_BUFFER_BYTES_MIN, self.write_buffer_bytes),
                ("memory_bytes", MEMORY_BYTES_MIN, self.memory_bytes),
            )
            if value < least
        ]
        if self.entry_bytes_max > ENTRY_BYTES_LIMIT:
            faults.append(f"entry_bytes_max must be at most {ENTRY_BYTES_LIMIT}, got {self.entry_bytes_max}")
        if faults:
            raise ValueError("; ".join(faults))
