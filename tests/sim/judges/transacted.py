"""Judge transactions by comparing requests and answers with the partitions' logs.

- An acknowledged transaction is in the logs, with all of its keys; a refused one is not; none is there twice.
- Its effects and its answer are those that a model computes from the records before it.
- All operations on the keys of transactors, transactions or not, have an order that respects the versions that they
  wrote and read, and real time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    Code,
    Flag,
    Get,
    Level,
    Meta,
    Op,
    Put,
    Record,
    Transact,
)
from kvstore.partition.state.entry import NOTE
from kvstore.types import PartitionId
from tests.partition.model import Model
from tests.sim.judges.cycles import Cycle, Edge, Graph, described
from tests.sim.judges.effects import plain
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.operations import Operation, Status, changes_nothing
from tests.sim.judges.transaction_logs import Commit, TransactionLogs
from tests.sim.judges.transactions import is_certain, is_done, is_refused, is_unique, steps_of
from tests.sim.judges.witness import Part

LATER = 1 << 40
"""A sequence above those of all logs."""
_READS = (Code.GET, Code.META, Code.CHECK)


@dataclass(slots=True)
class Found:
    """A transaction's place in the logs."""

    partition: PartitionId
    """Home."""
    last: int
    """The last sequence of its part at home."""
    commit: Commit | None
    """None if one partition has all of its keys."""
    begin: int = 0
    """The sequence before its part at home."""
    intents: dict[bytes, int] = field(default_factory=dict)
    """The sequence of each intent, by key."""


class Transacted:
    """The operations of one run and where the logs have them."""

    def __init__(self, logs: TransactionLogs, operations: Iterable[Operation]) -> None:
        self._logs = logs
        self._operations = list(operations)
        self._commits: defaultdict[tuple[PartitionId, int], list[Commit]] = defaultdict(list)
        for commit in logs.commits.values():
            self._commits[commit.partition, commit.entry].append(commit)
        self.found: dict[int, Found] = {}
        """By the number of the operation."""

    def check(self) -> None:
        """Raises Wrong."""
        owned: dict[tuple[PartitionId, int], Operation] = {}
        for operation in self._operations:
            if not isinstance(operation.op, Transact) or changes_nothing(operation.op):
                continue
            found = self._find(operation)
            if found is None:
                if is_done(operation) and operation.request is not None:
                    raise Wrong(f"acknowledged, but in no log: {operation}")
                continue
            if is_refused(operation):
                raise Wrong(f"refused, but committed by {found}: {operation}")
            if found.commit is not None:
                other = owned.setdefault((found.partition, found.commit.decision.seq), operation)
                if other is not operation:
                    raise Wrong(f"Tx2 {found.commit} is of two operations: {operation} and {other}")
            self._check_positions(operation, found)
            self._check_effects(operation, found)
            self.found[operation.number] = found
        self._check_nothing_else(owned)

    def _check_nothing_else(self, owned: dict[tuple[PartitionId, int], Operation]) -> None:
        """Check that each decision belongs to an operation."""
        nameless = {
            each.op.key
            for each in self._operations
            if isinstance(each.op, Transact)
            and each.request is None
            and (changes_nothing(each.op) or not is_refused(each))
        }
        for commit in self._logs.commits.values():
            if not commit.decision.record.parts:
                continue  # it writes nothing: endpoints read keys that are absent so
            if (commit.partition, commit.decision.seq) not in owned and commit.decision.home not in nameless:
                raise Wrong(f"P7 no operation explains {commit}, or it was refused")

    # ── places ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, operation: Operation) -> Found | None:
        """Return where an operation is done: by its request id, otherwise by the decision that its answer names, or by
        a value that no other operation writes."""
        logs, request = self._logs, operation.request
        if request is not None:
            place = logs.requests.get((request.client, request.sequence))
            if place is None:
                return None
            partition, seq = place
            commit = self._commit_at(partition, seq)
        else:
            found = self._by_position(operation) or self._by_value(operation)
            if found is None:
                return None
            partition, seq, commit = found
        intents = dict(commit.decision.intents) if commit is not None else {}
        return Found(partition, max(seq, commit.decision.seq if commit else 0), commit, intents=intents)

    def _commit_at(self, partition: PartitionId, seq: int) -> Commit | None:
        """Return the decision at a sequence. A decision is the last mutation of its transaction's part at home."""
        commits = self._commits[partition, self._logs.entry_of[partition, seq]]
        return next((each for each in commits if each.decision.seq == seq), None)

    def _commit_with(self, partition: PartitionId, seq: int) -> Commit | None:
        """Return the decision to whose part at home a change belongs."""
        for commit in self._commits[partition, self._logs.entry_of[partition, seq]]:
            if commit.decision.seq - commit.decision.record.mutations <= seq < commit.decision.seq:
                return commit
        return None

    def _by_position(self, operation: Operation) -> tuple[PartitionId, int, Commit | None] | None:
        for place in operation.positions.items():
            commit = self._commit_at(*place) if place in self._logs.entry_of else None
            # The position of one that changes nothing may be that of its neighbour in the entry.
            if commit is not None and commit.decision.home == operation.key and len(operation.positions) > 1:
                return *place, commit
        return None

    def _by_value(self, operation: Operation) -> tuple[PartitionId, int, Commit | None] | None:
        logs = self._logs
        for op in operation.op.ops:
            if not (isinstance(op, (Put, Append)) and is_unique(op.value)):
                continue
            for at, change in enumerate(logs.changes.get(op.key, ())):
                before = logs.changes[op.key][at - 1].record.value if at and isinstance(op, Append) else b""
                if change.record.value != before + op.value:
                    continue
                attempt = logs.owner.get((op.key, change.seq))
                commit = (
                    self._commit_with(change.partition, change.seq) if attempt is None else logs.commits.get(attempt)
                )
                if attempt is None:
                    return change.partition, change.seq, commit
                if commit is not None:
                    return commit.partition, commit.decision.seq, commit
        return None

    # docs/protocol.md Tx12
    def _check_positions(self, operation: Operation, found: Found) -> None:
        """Check that the answer covers the decision and all intents."""
        if not is_done(operation):
            return
        told = operation.positions
        if found.commit is not None and told.get(found.partition, 0) < found.commit.decision.seq:
            raise Wrong(f"Tx12 the answer {told} does not cover {found}: {operation}")
        for key, seq in found.intents.items():
            partition = self._logs.intents[key, seq][1]
            if told.get(partition, 0) < seq:
                raise Wrong(f"Tx12 the answer {told} does not cover the intent {seq} of {key!r}: {operation}")

    # ── effects ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_effects(self, operation: Operation, found: Found) -> None:
        """Check each partition's part."""
        logs = self._logs
        keys = {op.key for op in operation.op.ops}
        if strange := found.intents.keys() - keys:
            raise Wrong(f"Tx5 {found} commits intents on {strange}: {operation}")
        parts: defaultdict[tuple[PartitionId, int], dict[bytes, int]] = defaultdict(dict)
        for key, seq in found.intents.items():
            _, partition, time_ms = logs.intents[key, seq]
            parts[partition, time_ms][key] = seq
        for (_, time_ms), intents in parts.items():
            before = {key: logs.before(key, seq) for key, seq in intents.items()}
            after = {
                key: logs.before(key, max(each.last for each in logs.resolutions[key, seq]) + 1)
                for key, seq in intents.items()
            }
            if wrong := _differs(operation, before, after, time_ms):
                raise Wrong(f"Tx4 {wrong} in {found}: {operation}")
        wrong = ""
        # Without a request id, only one of its changes is known.
        for last in range(found.last, found.last + (1 if operation.request else 2 * len(operation.op.ops) + 1)):
            if logs.entry_of.get((found.partition, last)) != logs.entry_of[found.partition, found.last]:
                break
            found.begin, wrong = self._home_begin(operation, found, keys - found.intents.keys(), last)
            if not wrong:
                found.last = last
                return
        raise Wrong(f"Tx5 {wrong} at home in {found}: {operation}")

    def _home_begin(self, operation: Operation, found: Found, keys: set[bytes], last: int) -> tuple[int, str]:
        """Return the sequence before the part at home if it ends at `last`, and what is wrong with it."""
        logs, partition = self._logs, found.partition
        entry = logs.entry_of[partition, last]
        time_ms, wrong = logs.times[partition, entry], ""
        after = {key: logs.before(key, last + 1) for key in keys}
        begins: Sequence[int] = range(last - 1, max(-1, last - 2 * len(operation.op.ops) - 3), -1)
        if found.commit is not None:  # the log says how many mutations are the transaction's
            decision = found.commit.decision
            begins = [decision.seq - decision.record.mutations - 1]
        for begin in begins:
            mutation = logs.mutations.get((partition, begin + 1))
            if mutation is None or logs.entry_of[partition, begin + 1] != entry:
                break
            if mutation.key not in keys | {operation.key}:
                break
            before = {key: logs.before(key, begin + 1) for key in keys}
            count = sum(len(logs.between(key, begin + 1, last)) for key in keys)
            notes = sum(logs.mutations[partition, seq].kind == NOTE for seq in range(begin + 1, last + 1))
            wrong = _differs(operation, before, after, time_ms, range(count, count + notes + 1))
            if not wrong:
                return begin, ""
        return 0, wrong or "no sequence fits"

    # ── partitions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def parts(self, partition: PartitionId) -> list[Part]:
        """Return what transactions over several partitions did in this one. Call it after `check`, if no range has
        moved."""
        parts = []
        for operation in self._operations:
            found = self.found.get(operation.number)
            if found is None or found.commit is None:
                continue
            keys, changes, place = dict[bytes, tuple[int, int]](), list[int](), 0
            for key, seq in found.intents.items():
                if self._logs.intents[key, seq][1] == partition:
                    (resolution,) = self._logs.resolutions[key, seq]
                    keys[key], place = (seq, resolution.last), max(place, seq)
                    changes += [each.seq for each in resolution.effects]
            if found.partition == partition:
                keys |= {op.key: (found.last, found.last) for op in operation.op.ops if op.key not in found.intents}
                place = max(place, found.last)
                changes += range(found.begin + 1, found.last + 1)
            if keys:
                parts.append(Part(operation, place, keys, changes))
        return parts

    # ── order ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_order(self) -> None:
        """Check that all operations on keys of transactors have an order, by versions. Raises Wrong or Cycle. Call it
        after `check`."""
        graph = Graph()
        writers = self._writers()
        named = {each.number + 1: each for each in self._operations}
        for key, changes in self._logs.changes.items():
            known = [writer for each in changes if (writer := writers.get((key, each.seq))) is not None]
            for earlier, later in pairwise(known):
                graph.add(earlier, later, Edge.WW)
        committed = set(writers.values())
        for operation in self._operations:
            node = operation.number + 1
            for key, version in self._versions_read(operation):
                self._add_read(graph, writers, operation, key, version)
                committed.add(node)
        times = [
            (each.began, each.ended if is_done(each) else inf, each.number + 1)
            for each in self._operations
            if each.number + 1 in committed
        ]
        graph.add_times(times)
        if (anomaly := graph.anomaly()) is not None:
            raise Cycle(described(*anomaly, lambda node: str(named[node])))

    def _writers(self) -> dict[tuple[bytes, int], int]:
        """Return the node of the operation that made each change, by key and sequence."""
        writers: dict[tuple[bytes, int], int] = {}
        by_attempt: dict[Any, int] = {}
        for operation in self._operations:
            node = operation.number + 1
            if (found := self.found.get(operation.number)) is not None:
                if found.commit is not None:
                    by_attempt[found.commit.decision.attempt] = node
                for key in {op.key for op in operation.op.ops} - found.intents.keys():
                    for change in (
                        self._logs.between(key, found.begin + 1, found.last) if found.begin is not None else ()
                    ):
                        if change.partition == found.partition:
                            writers[key, change.seq] = node
            elif not operation.op.ops and (seq := self._seq_of(operation)):
                writers[operation.key, seq] = node
        for place, attempt in self._logs.owner.items():
            if attempt in by_attempt:
                writers[place] = by_attempt[attempt]
        return writers

    def _seq_of(self, operation: Operation) -> int:
        """Return the sequence of the change that a lone operation made, or 0."""
        if operation.is_write and operation.request is not None:
            place = self._logs.requests.get((operation.request.client, operation.request.sequence))
            if place is None:
                return 0
            # A range delete takes effect in one partition, which may not own the range's first key.
            partition, seq = place
            mine = (change.partition == partition for change in self._logs.between(operation.key, seq, seq))
            return seq if any(mine) else 0
        if not is_done(operation):
            return 0
        result = operation.result
        if operation.code in (Code.PUT, Code.DELETE) and isinstance(result, int):
            return result
        return int(result[1]) if operation.code in (Code.INCREMENT, Code.APPEND) else 0

    def _versions_read(self, operation: Operation) -> Iterator[tuple[bytes, int]]:
        """Yield the keys and versions that an operation saw; 0 for an absent key."""
        if not is_done(operation) or operation.level in (Level.SESSION, Level.STALE):
            return
        written = set()
        for op, result in steps_of(operation):
            if op.code not in _READS:
                written.add(op.key)
            elif op.key in written or isinstance(result, StoreError):
                continue
            elif isinstance(op, (Get, Meta)):
                yield op.key, 0 if result is None else result[1]
            elif isinstance(op, Check) and op.flags & Flag.IF_VERSION:
                yield op.key, op.version

    def _add_read(
        self, graph: Graph, writers: dict[tuple[bytes, int], int], operation: Operation, key: bytes, version: int
    ) -> None:
        node, changes = operation.number + 1, self._logs.changes.get(key, [])
        if not version:
            if all(each.record.version and not each.record.expires_ms for each in changes):  # it was absent once
                self._add_next(graph, writers, node, key, 0)
            return
        at = bisect_left(changes, version, key=lambda each: each.seq)
        if at == len(changes) or changes[at].seq != version:
            raise Wrong(f"no log has version {version} of {key!r}: {operation}")
        if (writer := writers.get((key, version))) is not None:
            graph.add(writer, node, Edge.WR)
        self._add_next(graph, writers, node, key, at + 1)

    def _add_next(self, graph: Graph, writers: dict[tuple[bytes, int], int], node: int, key: bytes, at: int) -> None:
        """Add the dependency on the first known change of the key that the operation did not see."""
        for change in self._logs.changes.get(key, [])[at:]:
            if (writer := writers.get((key, change.seq))) is not None and writer != node:
                graph.add(node, writer, Edge.RW)
                return


def _differs(
    operation: Operation,
    before: dict[bytes, Record],
    after: dict[bytes, Record],
    time_ms: int,
    counts: range | None = None,
) -> str:
    """Return what a model says against these records before and after the operation's part on their keys, or
    nothing. `counts` are the possible numbers of changes in between, if they are known: a note may be of a write that
    changes nothing, or of the request."""
    op = operation.op
    chosen = [at for at, each in enumerate(op.ops) if each.key in before]
    if not chosen:
        return f"{counts} changes of no key" if counts and counts.start else ""
    model = Model({key: each for key, each in before.items() if each.version}, LATER, time_ms)
    parts = tuple(op.ops[at] for at in chosen)
    results = model.apply(Batch(parts[0].key, parts, op.flags))
    if isinstance(results, StoreError):
        return f"a part that a model refuses ({results!r}) over {before}"
    if counts is not None and model.seq - LATER not in counts:
        return f"{counts} changes over {before}, expected {model.seq - LATER},"
    if is_done(operation):
        written: set[bytes] = set()
        for at, part, expected in zip(chosen, parts, results, strict=True):
            if told(part, expected, written) != told(part, operation.result[at], written):
                return f"{part} over {before} is answered {operation.result[at]}, expected {expected},"
            if part.code not in _READS:
                written.add(part.key)
    for key, record in after.items():
        if _content(model.records.get(key), time_ms) != _content(record, time_ms):
            return f"{key!r} becomes {record}, expected {model.records.get(key)},"
    return ""


def _content(record: Record | None, time_ms: int) -> tuple[bytes, int] | None:
    if record is None or not record.version or 0 < record.expires_ms <= time_ms:
        return None
    return record.value, record.expires_ms


def told(op: Op, result: Any, written: set[bytes]) -> Any:
    """Return what an answer says besides the sequences that its own transaction took."""
    result = plain(result)
    is_error = isinstance(result, str) or (isinstance(result, tuple) and result[:1] and isinstance(result[0], str))
    if is_error:
        return result[0] if isinstance(result, tuple) and op.key in written else result
    if result is None:
        return None
    match op.code:
        case Code.GET | Code.META:
            return (result[0], result[4]) if op.key in written else result
        case Code.PUT if op.flags & Flag.RETURN_OLD:
            is_applied, version, old = result
            shown = old if old is None or op.key not in written else (old[0], old[4])
            return is_applied, None if is_applied or op.key in written else version, shown
        case Code.DELETE if op.flags & Flag.RETURN_OLD:
            seq, old = result
            return bool(seq), old if old is None or op.key not in written else (old[0], old[4])
        case Code.PUT | Code.DELETE:
            return bool(result)
        case Code.INCREMENT | Code.APPEND:
            return result[0]
        case Code.CHECK:
            return bool(result) if op.key in written else result
    return result


def places(operations: Sequence[Operation]) -> int:
    """Return the number of transactions that were acknowledged."""
    return sum(isinstance(each.op, Transact) and is_certain(each) and each.status is Status.OK for each in operations)
