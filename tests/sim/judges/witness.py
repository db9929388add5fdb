"""Is a partition's history linearizable? Its log is the witness.

The log gives every mutation its place: the sequence. A read belongs to some place between two mutations where the
state was what it found. What remains to be shown is that places respect real time: an operation that began after
another had ended has no lower place. For each operation in order of its beginning the least place that fits is taken,
so that if this fails, every choice fails.

Operations of unknown outcome are looked up: in the log they have a place and never end, otherwise they did nothing.
Nothing refused may be in the log, and nothing twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from kvstore.errors import ConditionFailed
from kvstore.partition.state.commands import Code, Flag, Level, Op, Record
from kvstore.partition.state.entry import CREATE, DELETE, NOTE, Entry, Mutation
from kvstore.types import PartitionId, Position
from tests.sim.judges.operations import Operation, Status

ABSENT = Record(b"", 0, 0, 0, 0)


class Wrong(AssertionError):
    """The history is not one that a correct store could have made."""


class LogStates:
    """Every state that a partition was ever in, by sequence, as its log says."""

    def __init__(self, partition: PartitionId, log: Iterable[tuple[Position, Entry]]) -> None:
        """Raises Wrong if a request was applied twice, or if the log contradicts itself."""
        self.partition = partition
        self.mutations: list[Mutation] = []
        self.requests: dict[tuple[bytes, int], int] = {}
        """(client, sequence) -> the sequence at which the request ends."""
        self.values: dict[bytes, int] = {}
        """A put's value -> its sequence."""
        self._history: dict[bytes, tuple[list[int], list[Record]]] = defaultdict(lambda: ([0], [ABSENT]))
        self._counts = [0]
        self._times: list[tuple[int, int]] = [(0, 0)]
        """By sequence: record time when it was applied, and when the next one was about to be."""
        self.entry_ends = [0]
        """The sequences between entries."""
        for _, entry in log:
            self._take(entry)

    @property
    def end(self) -> int:
        """The last sequence."""
        return len(self.mutations)

    def all_keys(self) -> list[bytes]:
        return sorted(self._history)

    def record(self, key: bytes, seq: int) -> Record:
        """What the key had at `seq`, its expiry aside; ABSENT."""
        if key not in self._history:
            return ABSENT
        seqs, records = self._history[key]
        return records[bisect_right(seqs, seq) - 1]

    def may_be(self, key: bytes, seq: int, found: Record | None) -> bool:
        """Could a read at `seq` have found this?"""
        record = self.record(key, seq)
        applied_ms, last_ms = self._times[seq]
        if found is None:
            return not record.version or 0 < record.expires_ms <= last_ms
        return record == found and not 0 < record.expires_ms <= applied_ms

    def count(self, seq: int) -> int:
        """How many keys there were, those past their expiry included."""
        return self._counts[seq]

    def _take(self, entry: Entry) -> None:
        self._times[-1] = (self._times[-1][0], max(self._times[-1][1], entry.time_ms))
        for mutation in () if entry.is_control else entry.mutations():
            if mutation.seq != self.end + 1:
                raise Wrong(f"{self.partition}: sequence {mutation.seq} comes after {self.end}")
            self.mutations.append(mutation)
            self._times.append((entry.time_ms, entry.time_ms))
            self._counts.append(self._counts[-1] + self._change(mutation, entry.time_ms))
        if entry.keys:
            self.entry_ends.append(self.end)
        if entry.requests is not None:
            ends = zip(entry.requests.client, entry.requests.sequences, entry.requests.mutations, strict=True)
            for client, sequence, index in ends:
                self._ended((entry.requests.clients[client], sequence), entry.first_seq + index)

    def _change(self, mutation: Mutation, time_ms: int) -> int:
        """Apply it; by how much it changes the number of keys."""
        kind, seq, key, value, created, expires_ms, _ = mutation
        if kind == NOTE:
            return 0
        before = self.record(key, seq)
        seqs, records = self._history[key]
        seqs.append(seq)
        if kind == DELETE:
            if not before.version:
                raise Wrong(f"{self.partition}: {seq} deletes {key!r}, which is not there")
            records.append(ABSENT)
            return -1
        if (kind == CREATE) != (not before.version) or created != (before.created or seq):
            raise Wrong(f"{self.partition}: {seq} puts {key!r} as created at {created} over {before}")
        records.append(Record(value, seq, created, time_ms, expires_ms))
        self.values[value] = seq
        return int(kind == CREATE)

    def _ended(self, request: tuple[bytes, int], seq: int) -> None:
        if request in self.requests:
            raise Wrong(
                f"P4 {self.partition}: request {request[1]} of {request[0].hex()} is applied at "
                f"{self.requests[request]} and at {seq}"
            )
        self.requests[request] = seq


class Witness:
    """Checks one partition's history against its log."""

    def __init__(self, states: LogStates) -> None:
        self._states = states
        self.placed = 0
        """Operations that were found to have a place."""

    def check(self, operations: Iterable[Operation]) -> None:
        """Raises Wrong."""
        floor = 0
        ended: list[tuple[float, int, int]] = []
        for operation in sorted(operations, key=lambda each: (each.began, each.number)):
            while ended and ended[0][0] < operation.began:
                floor = max(floor, heappop(ended)[2])
            place = self._place(operation, floor)
            if place is None:
                continue
            self.placed += 1
            if operation.level in (None, Level.LINEARIZABLE, Level.STRICT):
                heappush(ended, (operation.ended, operation.number, place))

    def _place(self, operation: Operation, floor: int) -> int | None:
        """The least place that fits at or above `floor`; None for what has none."""
        if operation.status is not Status.OK:
            return self._place_of_unanswered(operation, floor)
        if operation.is_write and not _is_read_only(operation):
            return self._place_of_write(operation, floor)
        if operation.level is Level.SESSION:
            floor = operation.op[3] if operation.code in (Code.GET, Code.META) else 0
        elif operation.level is Level.STALE:
            floor = 0
        return self._place_of_read(operation, floor)

    def _place_of_unanswered(self, operation: Operation, floor: int) -> int | None:
        seq = self._find(operation)
        if seq is None or not operation.is_write:
            return None
        if operation.status is Status.FAIL:
            raise Wrong(f"P7 was refused and is in the log at {seq}: {operation}")
        self._expect_above(operation, seq, floor)
        return seq

    def _find(self, operation: Operation) -> int | None:
        """Where the log has it."""
        if operation.request is not None:
            return self._states.requests.get((operation.request.client, operation.request.sequence))
        if operation.code is Code.PUT:
            return self._states.values.get(operation.op[2])
        return None

    def _place_of_write(self, operation: Operation, floor: int) -> int:
        seq = self._seq_in_result(operation)
        if not 0 < seq <= self._states.end:
            raise Wrong(f"an acknowledged write is not in the log, which ends at {self._states.end}: {operation}")
        found = self._find(operation)
        if found != seq and (operation.request is not None or operation.code is Code.PUT):
            raise Wrong(f"an acknowledged write is in the log at {found}: {operation}")
        self._expect_above(operation, seq, floor)
        _check_effect(operation, self._states, seq)
        return seq

    def _seq_in_result(self, operation: Operation) -> int:
        result = operation.result
        if operation.code in (Code.INCREMENT, Code.APPEND):
            return int(result[1])
        if operation.code is Code.BATCH:
            return max(int(each) for each in result if isinstance(each, int))
        if operation.code is Code.EXPIRE:
            found = self._find(operation)
            return found or 0
        return int(result)

    def _expect_above(self, operation: Operation, seq: int, floor: int) -> None:
        if seq <= floor:
            raise Wrong(
                f"{self._states.partition}: took effect at {seq}, although what showed or wrote {floor} had ended "
                f"before it began: {operation}"
            )

    def _place_of_read(self, operation: Operation, floor: int) -> int:
        fits = _predicate(operation, self._states)
        # What is read is the state between two entries; a condition may be judged in the middle of one.
        ends = range(self._states.end + 1) if operation.is_write else self._states.entry_ends
        for seq in ends[bisect_left(ends, floor) :]:
            if fits(seq):
                return seq
        raise Wrong(
            f"{self._states.partition}: no state from {floor} to {self._states.end} answers so (what showed or wrote "
            f"{floor} had ended before): {operation}"
        )


def _is_read_only(operation: Operation) -> bool:
    """Has this write changed nothing, so that its answer is about a state only?"""
    result = operation.result
    if isinstance(result, ConditionFailed):
        return True
    if operation.code is Code.BATCH:
        return not any(isinstance(each, int) and each for each in result)
    return result in (0, False) and operation.code in (Code.DELETE, Code.EXPIRE)


def _check_effect(operation: Operation, states: LogStates, seq: int) -> None:
    """Raise Wrong unless the log has at `seq` what was asked for."""
    code, op = operation.code, operation.op
    record, before = states.record(op[1], seq), states.record(op[1], seq - 1)
    fits = True
    if code is Code.PUT:
        flags, version = op[4], op[5]
        fits = record.value == op[2] and record.version == seq
        fits &= not flags & Flag.IF_VERSION or before.version == version
        fits &= not flags & Flag.IF_ABSENT or not before.version or 0 < before.expires_ms <= record.written_ms
    elif code is Code.DELETE:
        fits = not record.version and before.version > 0
        fits &= not op[2] & Flag.IF_VERSION or before.version == op[3]
    elif code is Code.INCREMENT:
        fits = int(record.value) == operation.result[0] == int(before.value or 0) + op[2]
    elif code is Code.APPEND:
        fits = record.value == before.value + op[2] and len(record.value) == operation.result[0]
    elif code is Code.BATCH:
        fits = all(
            states.mutations[each - 1].key == part[1]
            for part, each in zip(op[2], operation.result, strict=True)
            if isinstance(each, int) and each
        )
    if not fits:
        raise Wrong(f"the log has {states.mutations[seq - 1]} over {before} at {seq}: {operation}")


_Fits = Callable[[int], bool]


def _predicate(operation: Operation, states: LogStates) -> _Fits:
    """Whether a state fits a read's answer."""
    op, result = operation.op, operation.result
    code, key = operation.code, operation.key
    if isinstance(result, ConditionFailed):
        version = result.version
        keys = [part[1] for part in op[2]] if code is Code.BATCH else [key]
        return lambda seq: any(
            states.record(each, seq).version == version or (not version and states.may_be(each, seq, None))
            for each in keys
        )
    if code is Code.GET:
        found = None if result is None else Record(*result)
        return lambda seq: states.may_be(key, seq, found)
    if code in (Code.DELETE, Code.EXPIRE):
        return lambda seq: states.may_be(key, seq, None)
    if code is Code.COUNT:
        return lambda seq: states.count(seq) == result
    if code is Code.SCAN:
        return _scan_predicate(op, result, states)
    raise AssertionError(f"no predicate for {operation}")


def _scan_predicate(op: Op, result: Any, states: LogStates) -> _Fits:
    start, end = op[1], op[2]
    pairs, following = result
    found = {key: Record(*record) for key, record in pairs}
    end = following if following is not None else end
    keys = [key for key in states.all_keys() if start <= key and (not end or key < end)]
    strangers = sorted(set(found) - set(keys))
    return lambda seq: not strangers and all(states.may_be(key, seq, found.get(key)) for key in keys)
