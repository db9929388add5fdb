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
"""Upper limit of `entry_bytes_max`. With this limit, an entry stays below the 5 MiB that bookies accept, even if one
large operation exceeds the limit."""
IN_FLIGHT_LIMIT = 128
"""Upper limit of `entries_in_flight_max`: half of the entries that a leader's log may have in flight. The other half is
for control records, which do not wait for a free slot."""
IN_FLIGHT_BYTES_LIMIT = 32 << 20
"""Bytes that a leader may gather into entries in flight. A bookie stops reading a connection on which 32 MiB wait for a
sync, and the leader replaces a bookie to which it could not send 64 MiB."""
LEASE_MS_MAX = 120_000
"""Upper limit of a lease in ms. A new leader waits this long before it serves."""
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
    """The settings that all partitions of a node share. Raises WrongSettings if a value is out of range or if settings
    contradict each other."""

    lease_ms: Annotated[int, between(0, LEASE_MS_MAX)] = 400
    """Duration of the read lease in milliseconds: how long the leader may answer reads after it first sent an entry
    that was acknowledged. 0 disables leases, so that every read waits for its own append."""
    hidden_pause_ms: Annotated[int, between(0, LEASE_MS_MAX)] = 250
    """Longest pause of a leader's machine, in milliseconds within one lease, that its clock may fail to show. A new
    leader waits this much longer before it serves. Has no effect without leases."""
    entries_in_flight_max: Annotated[int, between(1, IN_FLIGHT_LIMIT)] = 4
    """Maximum number of entries that a leader has sent and that are not acknowledged yet. This number times
    `entry_bytes_max` must not exceed 32 MiB."""
    entry_bytes_max: Annotated[int, between(1 << 10, ENTRY_BYTES_LIMIT)] = 256 << 10
    """Maximum number of bytes of keys and values in one entry, and of the effects evaluated into it. A single larger
    operation has its own entry and may exceed this limit."""
    queue_items_max: Annotated[int, between(1, COUNT_MAX)] = 32_768
    """Maximum number of operations that wait at a leader; further operations are refused. The default holds twice the
    operations of 1,000 connections with 16 operations each."""
    queue_bytes_max: Annotated[int, between(4 << 20, BYTES_MAX)] = 32 << 20
    """Maximum number of bytes of keys and values in the waiting operations; further operations are refused."""
    queue_wait_max_s: Annotated[float, between(QUEUE_WAIT_S_MIN, QUEUE_WAIT_S_MAX)] = 5.0
    """Maximum number of seconds that an operation waits. The leader refuses an operation that has waited longer, and
    does not append it."""
    retry_window_ms: Annotated[int, between(RETRY_WINDOW_MS_MIN, MS_MAX)] = 600_000
    """Milliseconds of record time for which the partition remembers a client that sends no requests. Retries that are
    older are refused. Set the same value on all servers: if keys move to a server with a larger value, a retry of a
    request that was forgotten before can be applied again."""
    retry_bytes_max: Annotated[int, between(1_000, BYTES_MAX)] = 64 << 20
    """Bytes of memory for the results that the partition remembers. At this limit, new clients are refused and may
    retry."""
    retry_results_max: Annotated[int, between(1, COUNT_MAX)] = 1024
    """Maximum number of results that one client may leave unacknowledged."""
    check_every: Annotated[int, between(1, COUNT_MAX)] = 1000
    """Number of entries between two comparisons of the replicas' states."""
    expiry_sweep_s: Annotated[float, zero_or(PERIOD_MIN_S, SECONDS_MAX)] = 1.0
    """Seconds between two sweeps that delete expired keys that no client reads. 0 disables the sweeps."""
    flush_s: Annotated[float, between(PERIOD_MIN_S, UPKEEP_S_MAX)] = 30.0
    """Average number of seconds between two syncs of the state to disk. Each interval is 0.5 to 1.5 times as long as
    the average."""
    trim_s: Annotated[float, between(PERIOD_MIN_S, UPKEEP_S_MAX)] = 10.0
    """Seconds between two checks by a leader of whether it can trim the log."""
    retention_ms: Annotated[int, between(0, MS_MAX)] = 3_600_000
    """Minimum number of milliseconds for which the log is kept for change feeds, even if all replicas have synced
    it."""
    lead_back_s: Annotated[float, between(0, SECONDS_MAX)] = 8.0
    """Seconds for which the ring's preferred replica must have been up before the leader hands the lead back to it. 1e9
    means never."""
    write_buffer_bytes: Annotated[int, between(WRITE_BUFFER_BYTES_MIN, WRITE_BUFFER_BYTES_MAX)] = 16 << 20
    """Bytes that one engine collects in memory before it writes a file. They count towards `memory_bytes`, which all
    engines share."""
    memory_bytes: Annotated[int, between(MEMORY_BYTES_MIN, BYTES_MAX)] = 256 << 20
    """Bytes of memory for the engines of all partitions together: write buffers, cached blocks of files, and the
    indexes of files (kvstore/partition/state/rocks_memory.py)."""

    @property
    def listed_lease_ms(self) -> int:
        """The lease, in milliseconds, that the leader records in the log's list for its successor to wait out: as
        measured by the successor's clock, the leader's lease may last this long (docs/protocol.md, P32)."""
        return self.lease_ms + self.hidden_pause_ms if self.lease_ms else 0

    def __post_init__(self) -> None:
        if faults := range_faults(self) or self._contradictions():
            raise WrongSettings(*faults)

    def _contradictions(self) -> list[str]:
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
