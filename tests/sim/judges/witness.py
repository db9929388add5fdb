"""Is a partition's history linearizable? The partition's log is the witness.

The log gives every mutation its place: the sequence. The place of a read is between two mutations where the state fits
the answer. It remains to show that places respect real time: an operation that began after another had ended has no
lower place. The operations are visited in the order of their beginnings, and each takes the lowest place that fits. If
this choice fails, every choice fails.

A transaction over several partitions takes effect on a key of another partition than home when its intent is carried
out, which may be after its answer. Until then the intent hides the key, and only that key. So the places of such a
transaction are looked up, and what begins after its end has no lower place if it is on the same key.

Operations of unknown outcome are looked up. If the log has them, they have a place and never end; otherwise they did
nothing. The log must contain no refused operation and no operation twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from kvstore.errors import ConditionFailed, InvalidRequest, StoreError
from kvstore.partition.leading.range_delete import RANGE_KEYS_MAX
from kvstore.partition.state.commands import (
    Append,
    Check,
    Code,
    Count,
    Delete,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Increment,
    Level,
    Meta,
    Op,
    Put,
    Range,
    Record,
    Scan,
    ScanTokens,
    Transact,
)
from kvstore.partition.state.entry import DELETE, NOTE, OF_TRANSACTIONS, Mutation
from kvstore.ring.hashing import MURMUR3, KeyHash
from tests.sim.judges.effects import Effects, deletes_between, is_deleted, keys_of
from tests.sim.judges.log_states import LogStates, Wrong
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.pages import page_fits


class Part(NamedTuple):
    """The part of one partition in a transaction over several."""

    operation: Operation
    place: int
    """The highest sequence that had to be logged before the transaction was answered."""
    keys: Mapping[bytes, tuple[int, int]]
    """Key → the sequence from which on the key is locked, and the sequence from which on the effect shows."""
    changes: Sequence[int]
    """The sequences of its changes."""


class Witness:
    """Checks one partition's history against its log. `prefixes` are the namespaces that give keys a time to live."""

    def __init__(
        self,
        states: LogStates,
        prefixes: tuple[bytes, ...] = (),
        *,
        range_keys: int = RANGE_KEYS_MAX,
        parts: Sequence[Part] = (),
        hash: KeyHash = MURMUR3,
    ) -> None:
        """`range_keys`: a range delete of up to this number of keys is atomic. `parts` are those of transactions over
        several partitions. `hash` is the cluster's key hash."""
        self._states, self._range_keys, self._hash = states, range_keys, hash
        self._parts = {part.operation.number: part for part in parts}
        self._locks: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        """By key: from which sequence on a transaction locked it, and from which on its effect shows."""
        for part in parts:
            for key, shown in part.keys.items():
                self._locks[key].append(shown)
        self._key_floors: dict[bytes, int] = {}
        """The lowest place of what begins now, by key, if the floor of all keys is lower."""
        self._effects = Effects(states, prefixes)
        self._done: set[int] = {seq for part in parts for seq in part.changes}
        """Sequences of mutations that are known to belong to an operation."""
        self._doubtful: list[Operation] = []
        """Operations that may have done more than is known."""
        self.placed = 0
        """Number of operations for which a place was found."""

    def check(self, operations: Iterable[Operation]) -> None:
        """Raises Wrong."""
        floor = 0
        ended: list[tuple[float, int, int]] = []
        mine = [each for each in operations if each.number not in self._parts]
        mine += [part.operation for part in self._parts.values()]
        for operation in sorted(mine, key=lambda each: (each.began, each.number)):
            while ended and ended[0][0] < operation.began:
                _, number, place = heappop(ended)
                floor = max(floor, place)
                if (part := self._parts.get(number)) is not None:
                    for key, (_, shown) in part.keys.items():
                        self._key_floors[key] = max(self._key_floors.get(key, 0), shown)
            place = self._place(operation, floor)
            if place is None:
                continue
            self.placed += 1
            if operation.level in (None, Level.LINEARIZABLE, Level.STRICT):
                heappush(ended, (operation.ended, operation.number, place))

    # docs/protocol.md P7
    def check_nothing_else(self) -> None:
        """Raises Wrong if the log contains a mutation that no client requested or that was refused. Call it after
        `check`, for all operations of a partition."""
        for mutation in self._states.mutations:
            if mutation.seq not in self._done and not self._is_explained(mutation):
                raise Wrong(f"P7 {self._states.partition}: no operation explains {mutation}, or it was refused")

    def _place(self, operation: Operation, floor: int) -> int | None:
        """Return the lowest fitting place at or above `floor`, or None for an operation without a place."""
        if (part := self._parts.get(operation.number)) is not None:
            lowest = min(locked for locked, _ in part.keys.values())
            self._expect_above(operation, lowest, max(floor, *(self._key_floors.get(key, 0) for key in part.keys)))
            return part.place
        floor = max((floor, *(self._key_floors[key] for key in self._seen(operation) if key in self._key_floors)))
        if operation.status is not Status.OK:
            return self._place_of_unanswered(operation, floor)
        if operation.is_write and not _is_read_only(operation):
            return self._place_of_write(operation, floor)
        if operation.level is Level.SESSION:
            locks = self._locks.get(operation.key, ())
            shown = max((shown for locked, shown in locks if locked <= operation.token), default=0)
            floor = max(operation.token, operation.floor, shown)
        elif operation.level is Level.STALE:
            floor = operation.floor
        return self._place_of_read(operation, floor)

    # docs/protocol.md Tx9
    def _seen(self, operation: Operation) -> Sequence[bytes]:
        """Return the keys of which the operation shows or changes the latest state. A page shows its range only."""
        op = operation.op
        if not isinstance(op, (Scan, Range)):
            return keys_of(op)
        if operation.status is not Status.OK or op.flags & Flag.REVERSE:
            return ()
        end = operation.result[1] or op.end
        return [key for key in self._key_floors if op.key <= key and (not end or key < end)]

    # ── writes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place_of_unanswered(self, operation: Operation, floor: int) -> int | None:
        if operation.status is Status.FAIL and isinstance(operation.result, InvalidRequest) and _depends(operation.op):
            self._place_of_read(operation, floor)
        seq = self._find(operation) if operation.is_write else None
        if seq is None:
            if operation.status is not Status.FAIL:
                self._doubtful.append(operation)
            return None
        if operation.status is Status.FAIL:
            raise Wrong(f"P7 the operation was refused, but the log has it at {seq}: {operation}")
        self._expect_above(operation, seq, floor)
        if operation.code is Code.DELETE_RANGE:
            self._doubtful.append(operation)
        elif not self._is_done_at(operation, seq):
            if operation.request is not None:
                raise self._not_so(operation, seq)
            self._doubtful.append(operation)
            return None
        return seq

    def _find(self, operation: Operation) -> int | None:
        """Return the place of the operation in the log: by its request id, otherwise by a value that no other
        operation has written. Balances of transactions repeat, so a transaction is found by its request id only."""
        states, op = self._states, operation.op
        if operation.request is not None:
            return states.requests.get((operation.request.client, operation.request.sequence))
        if isinstance(op, Transact):
            return None
        for part in op.ops or [op]:
            if isinstance(part, Put) and (seq := states.written.get((part.key, part.value))) is not None:
                return seq
            if isinstance(part, Append) and (seq := states.appended.get((part.key, part.value))) is not None:
                return seq
        return None

    def _place_of_write(self, operation: Operation, floor: int) -> int:
        if operation.code is Code.DELETE_RANGE:
            return self._place_of_delete_range(operation, floor)
        end, found = self._states.end, self._find(operation)
        if operation.request is not None and found is None:
            raise Wrong(f"an acknowledged write is in the log at None, which ends at {end}: {operation}")
        least = _seq_in(operation.op, operation.result)
        if least > end:
            raise Wrong(f"an acknowledged write is not in the log, which ends at {end}: {operation}")
        if found is not None and operation.request is not None:
            places = range(found, found + 1)
        elif least:  # mutations that the answer does not name may follow the one that it names
            places = range(least, min(end, least + 2 * len(keys_of(operation.op))) + 1)
        else:
            places = range(floor + 1, end + 1)
        # Two equal operations fit the same places, so each takes a place that no other operation has, if there is one.
        for seq in sorted(places, key=self._done.__contains__):
            if self._is_done_at(operation, seq):
                self._expect_above(operation, seq, floor)
                return seq
        raise self._not_so(operation, found or least)

    def _is_done_at(self, operation: Operation, seq: int) -> bool:
        begin = self._effects.begin_or_none(operation, seq)
        if begin is not None:
            self._done.update(range(begin + 1, seq + 1))
        return begin is not None

    def _not_so(self, operation: Operation, seq: int) -> Wrong:
        states = self._states
        if not 0 < seq <= states.end:
            return Wrong(f"{states.partition}: the log nowhere has {operation}")
        before = {key: states.record(key, seq - 1) for key in keys_of(operation.op)}
        return Wrong(f"the log has {states.mutations[seq - 1]} over {before} at {seq}: {operation}")

    # docs/protocol.md P11
    def _place_of_delete_range(self, operation: Operation, floor: int) -> int:
        """Return the place where no key is left and the reported number of keys was deleted. A long range may still
        hold keys written after the delete began."""
        op = operation.op
        assert isinstance(op, DeleteRange)
        start, end = op.key, op.end
        states, found = self._states, self._find(operation)
        is_atomic = len(states.keys_between(start, end)) <= self._range_keys
        self._doubtful.append(operation)
        for seq in range(floor, states.end + 1) if operation.request is None else [found or 0]:
            if operation.request is not None:
                self._expect_above(operation, seq, floor)
            counted = deletes_between(states, start, end, floor + 1, seq)
            since = seq if is_atomic else floor
            if counted >= operation.result and is_deleted(states, start, end, since, seq):
                return seq
        raise Wrong(f"{states.partition}: keys are left, or fewer were deleted than reported: {operation}")

    def _is_explained(self, mutation: Mutation) -> bool:
        """Return True if an expiry or an operation of unknown outcome may have made this mutation."""
        before = self._states.record(mutation.key, mutation.seq - 1)
        if mutation.kind == NOTE or mutation.kind in OF_TRANSACTIONS:
            return True
        if mutation.kind == DELETE and 0 < before.expires_ms <= self._states.time_ms(mutation.seq):
            return True
        return any(_may_have_done(each.op, mutation, before) for each in self._doubtful)

    def _expect_above(self, operation: Operation, seq: int, floor: int) -> None:
        if seq <= floor:
            raise Wrong(
                f"{self._states.partition}: took effect at {seq}, although {floor} had been shown or written "
                f"before it began: {operation}"
            )

    # ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place_of_read(self, operation: Operation, floor: int) -> int:
        found = self._find(operation) if operation.is_write else None
        if found is not None and operation.code is Code.DELETE_RANGE and operation.status is Status.OK:
            return self._place_of_delete_range(operation, floor)  # recorded where its last part began
        if found is not None and operation.request is not None and operation.status is Status.OK:
            # It has changed nothing, and the log shows where it fits.
            self._expect_above(operation, found, floor)
            if self._is_done_at(operation, found):
                return found
            raise self._not_so(operation, found)
        fits = self._fits(operation)
        # A read sees the state between two entries. A condition, and a transaction that only reads, may be evaluated
        # within an entry, because they take their turn among the writes.
        is_queued = operation.is_write or isinstance(operation.op, Transact)
        ends = range(self._states.end + 1) if is_queued else self._states.entry_ends
        for seq in ends[bisect_left(ends, floor) :]:
            if fits(seq):
                return seq
        raise Wrong(
            f"{self._states.partition}: no state from {floor} to {self._states.end} fits the answer "
            f"(an operation that showed or wrote {floor} had ended before): {operation}"
        )

    def _fits(self, operation: Operation) -> _Fits:
        """Return a function that tells if a state fits the answer of an operation that changed nothing."""
        states, op, result, key = self._states, operation.op, operation.result, operation.key
        match op:
            case Get():
                found = None if result is None else Record(*result)
                return lambda seq: states.may_be(key, seq, found)
            case Meta():
                return lambda seq: _meta_fits(states, key, seq, result)
            case Count():
                return lambda seq: states.count(seq) == result
            case Scan() | Range() | ScanTokens():
                return page_fits(op, result, states, self._hash)
            case DeleteRange():
                return lambda seq: is_deleted(states, op.key, op.end, seq, seq)
        return lambda seq: self._effects.is_answer_at(operation, seq)


_Fits = Callable[[int], bool]


def _is_read_only(operation: Operation) -> bool:
    """Return True if this write has changed nothing, so that its answer depends on a state only."""
    result = operation.result
    match operation.op:
        case _ if isinstance(result, ConditionFailed):
            return True
        case Check():
            return True
        case op if op.ops:
            return all(_part_is_read_only(part.code, each) for part, each in zip(op.ops, result, strict=True))
    return _part_is_read_only(operation.code, result)


def _part_is_read_only(code: int, result: Any) -> bool:
    if isinstance(result, StoreError) or code in (Code.GET, Code.META, Code.CHECK):
        return True
    if code == Code.PUT:
        return isinstance(result, tuple) and not result[0]
    if code in (Code.DELETE, Code.EXPIRE, Code.DELETE_RANGE):
        return not (result[0] if isinstance(result, tuple) else result)
    return False


def _seq_in(op: Op, result: Any) -> int:
    """Return the latest sequence that an answer names as its own, or 0 if it names none."""
    if op.ops:
        return max((_seq_in(part, each) for part, each in zip(op.ops, result, strict=True)), default=0)
    if isinstance(result, StoreError) or op.code in (Code.GET, Code.META, Code.CHECK):
        return 0
    return _seq_of_part(result)


def _seq_of_part(result: Any) -> int:
    match result:
        case bool() | None:
            return 0
        case int():
            return result
        case (bool(), int(), _):
            return int(result[1]) if result[0] else 0
        case (int(), int()):
            return int(result[1])
        case (int(), _):
            return int(result[0])
    return 0


def _meta_fits(states: LogStates, key: bytes, seq: int, result: Any) -> bool:
    if result is None:
        return states.may_be(key, seq, None)
    record = states.record(key, seq)
    return (len(record.value), *record[1:]) == tuple(result) and states.may_be(key, seq, record)


def _depends(op: Op) -> bool:
    """Return True if the validity of the operation depends on the value of a key."""
    return isinstance(op, Increment) or any(map(_depends, op.ops))


def _may_have_done(op: Op, mutation: Mutation, before: Record) -> bool:
    """Return True if an operation, possibly within a batch, could have made this mutation."""
    if op.ops:
        return any(_may_have_done(part, mutation, before) for part in op.ops)
    if isinstance(op, DeleteRange):
        return mutation.kind == DELETE and op.key <= mutation.key and (not op.end or mutation.key < op.end)
    if op.key != mutation.key or op.code in (Code.GET, Code.META, Code.CHECK):
        return False
    if mutation.kind == DELETE:
        return isinstance(op, (Delete, Expire)) or (isinstance(op, Put) and op.expires_ms != 0)
    match op:
        case Put():
            return op.value == mutation.value
        case Increment():
            is_number = before.value.removeprefix(b"-").isdigit() or not before.value
            return is_number and mutation.value == b"%d" % (int(before.value or 0) + op.delta)
        case Append():
            return mutation.value == before.value + op.value
        case Expire():
            return mutation.value == before.value
    return False
