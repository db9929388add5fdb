"""Every state that a partition ever had according to its log."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable

from kvstore.partition.state.commands import Record
from kvstore.partition.state.entry import CREATE, DELETE, NOTE, OF_TRANSACTIONS, Entry, Mutation
from kvstore.types import PartitionId, Position

ABSENT = Record(b"", 0, 0, 0, 0)


class Wrong(AssertionError):
    """A correct store could not have produced the history."""


class LogStates:
    """Every state that a partition ever had according to its log, by sequence."""

    def __init__(self, partition: PartitionId, log: Iterable[tuple[Position, Entry]]) -> None:
        """Raises Wrong if a request was applied twice or if the log contradicts itself."""
        self.partition = partition
        self.mutations: list[Mutation] = []
        self.requests: dict[tuple[bytes, int], int] = {}
        """(client, request number) -> the last sequence of the request."""
        self.written: dict[tuple[bytes, bytes], int] = {}
        """(key, value) -> the sequence that first wrote the value."""
        self.appended: dict[tuple[bytes, bytes], int] = {}
        """(key, appended bytes) -> the sequence."""
        self._history: dict[bytes, tuple[list[int], list[Record]]] = defaultdict(lambda: ([0], [ABSENT]))
        self._counts = [0]
        self._times: list[tuple[int, int]] = [(0, 0)]
        """By sequence: the record time when it was applied and just before the next sequence."""
        self.entry_ends = [0]
        """The sequences at which entries end."""
        self._entry_of = [0]
        """By sequence: the number of its entry."""
        for _, entry in log:
            self._take(entry)
        self._keys = sorted(self._history)

    @property
    def end(self) -> int:
        """The last sequence."""
        return len(self.mutations)

    def all_keys(self) -> list[bytes]:
        return self._keys

    def keys_between(self, start: bytes, end: bytes) -> list[bytes]:
        """Return all keys in [start, end) that ever existed. An empty `end` means no upper bound."""
        first = bisect_left(self._keys, start)
        return self._keys[first : bisect_left(self._keys, end) if end else None]

    def time_ms(self, seq: int) -> int:
        """Return the record time of the entry that contains this sequence."""
        return self._times[seq][0]

    def times_ms(self, seq: int) -> tuple[int, int]:
        """Return the record time when this sequence was applied and just before the next sequence."""
        return self._times[seq]

    def are_together(self, first: int, last: int) -> bool:
        """Return True if one entry contains both sequences."""
        return self._entry_of[first] == self._entry_of[last]

    def record(self, key: bytes, seq: int) -> Record:
        """Return the record of the key at `seq`, regardless of its expiry, or ABSENT."""
        if key not in self._history:
            return ABSENT
        seqs, records = self._history[key]
        return records[bisect_right(seqs, seq) - 1]

    def may_be(self, key: bytes, seq: int, found: Record | None) -> bool:
        """Return True if a read at `seq` could have found this record."""
        record = self.record(key, seq)
        applied_ms, last_ms = self._times[seq]
        if found is None:
            return not record.version or 0 < record.expires_ms <= last_ms
        return record == found and not 0 < record.expires_ms <= applied_ms

    def count(self, seq: int) -> int:
        """Return the number of keys, including expired keys."""
        return self._counts[seq]

    def _take(self, entry: Entry) -> None:
        self._times[-1] = (self._times[-1][0], max(self._times[-1][1], entry.time_ms))
        for mutation in () if entry.is_control else entry.mutations():
            if mutation.seq != self.end + 1:
                raise Wrong(f"{self.partition}: sequence {mutation.seq} comes after {self.end}")
            self.mutations.append(mutation)
            self._entry_of.append(len(self.entry_ends))
            self._times.append((entry.time_ms, entry.time_ms))
            self._counts.append(self._counts[-1] + self._change(mutation, entry.time_ms))
        if entry.keys:
            self.entry_ends.append(self.end)
        if entry.requests is not None:
            ends = zip(entry.requests.client, entry.requests.sequences, entry.requests.mutations, strict=True)
            for client, sequence, index in ends:
                self._ended((entry.requests.clients[client], sequence), entry.first_seq + index)

    def _change(self, mutation: Mutation, time_ms: int) -> int:
        """Apply the mutation and return the change in the number of keys."""
        kind, seq, key, value, created, expires_ms, _ = mutation
        if kind == NOTE or kind in OF_TRANSACTIONS:
            return 0
        before = self.record(key, seq)
        seqs, records = self._history[key]
        seqs.append(seq)
        if kind == DELETE:
            if not before.version:
                raise Wrong(f"{self.partition}: {seq} deletes {key!r}, which does not exist")
            records.append(ABSENT)
            return -1
        if (kind == CREATE) != (not before.version) or created != (before.created or seq):
            raise Wrong(f"{self.partition}: {seq} puts {key!r} as created at {created} over {before}")
        records.append(Record(value, seq, created, time_ms, expires_ms))
        self.written.setdefault((key, value), seq)
        if len(value) > len(before.value) and value.startswith(before.value):
            self.appended.setdefault((key, value[len(before.value) :]), seq)
        return int(kind == CREATE)

    def _ended(self, request: tuple[bytes, int], seq: int) -> None:
        if request in self.requests:
            raise Wrong(
                f"P4 {self.partition}: request {request[1]} of {request[0].hex()} is applied at "
                f"{self.requests[request]} and at {seq}"
            )
        self.requests[request] = seq
