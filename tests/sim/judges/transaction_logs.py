"""Judge transactions by the partitions' logs: every intent and every decision has one end, an intent locks its key
until then, and it is carried out if and only if a decision commits it.

The logs of all partitions are read together: sequences rise along the owners of a key (docs/protocol.md M9), so the
changes of a key have one order whichever partition logged them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvstore.partition.state.commands import Record
from kvstore.partition.state.decisions import Decision, EndRecord, decision_of, end_of
from kvstore.partition.state.entry import (
    CREATE,
    DECISION,
    DELETE,
    END,
    INTENT,
    KIND,
    OVERWRITE,
    RESOLVED,
    Entry,
    EntryKind,
    Mutation,
)
from kvstore.partition.state.intents import Intent, IntentEffect, ResolvedRecord, intent_of, resolved_of
from kvstore.partition.state.internal import Attempt
from kvstore.types import PartitionId, Position
from tests.sim.judges.log_states import ABSENT, Wrong

Name = tuple[bytes, int]
"""The key and the sequence of an intent."""
Place = tuple[PartitionId, int]
"""A partition and a sequence."""


class Change(NamedTuple):
    """One change of a key."""

    seq: int
    partition: PartitionId
    kind: int
    record: Record
    """ABSENT after a delete."""
    entry: int
    """The number of the mutation's entry in its log."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """A RESOLVED mutation with the mutations that carry out its effect."""

    partition: PartitionId
    seq: int
    record: ResolvedRecord
    effects: list[Mutation] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last sequence that belongs to the resolution."""
        return self.effects[-1].seq if self.effects else self.seq


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction over several partitions that is committed."""

    decision: Decision
    partition: PartitionId
    """Home."""
    entry: int
    """The number of the decision's entry in home's log."""


_EFFECTS = {
    IntentEffect.NONE: ((),),
    IntentEffect.PUT: ((CREATE,), (OVERWRITE,)),
    IntentEffect.DELETE: ((DELETE,),),
    IntentEffect.RECREATE: ((DELETE, CREATE),),
}
"""The kinds of mutations that carry out an effect."""


class TransactionLogs:
    """The transactions in all partitions' logs."""

    def __init__(self, logs: Mapping[PartitionId, Iterable[tuple[Position, Entry]]]) -> None:
        """Raises Wrong if the logs contradict themselves."""
        self.changes: defaultdict[bytes, list[Change]] = defaultdict(list)
        """By key: its changes, by sequence."""
        self.intents: dict[Name, tuple[Intent, PartitionId, int]] = {}
        """Each intent, with the partition that logged it and the time of its entry in ms."""
        self.resolutions: defaultdict[Name, list[Resolution]] = defaultdict(list)
        self.commits: dict[Attempt, Commit] = {}
        self.ends: defaultdict[Attempt, list[EndRecord]] = defaultdict(list)
        self.requests: dict[tuple[bytes, int], Place] = {}
        """(client, request number) → where the request ends."""
        self.owner: dict[tuple[bytes, int], Attempt] = {}
        """Key and sequence of each change that carries out an intent → the attempt."""
        self.entry_of: dict[Place, int] = {}
        self.mutations: dict[Place, Mutation] = {}
        self.times: dict[tuple[PartitionId, int], int] = {}
        """The time of an entry, by its partition and number, in ms."""
        entries = [
            (partition, number, entry)
            for partition, log in sorted(logs.items())
            for number, (_, entry) in enumerate(log)
            if not entry.is_control and entry.kinds[0] & KIND != EntryKind.IMPORT
        ]
        for partition, _, entry in entries:
            for kind, seq, key, value, *_ in entry.mutations() if entry.transactions else ():
                if kind == INTENT:
                    self.intents[key, seq] = intent_of(key, seq, value), partition, entry.time_ms
        for partition, number, entry in entries:
            self._take(partition, number, entry)
        for key, changes in self.changes.items():
            changes.sort()
            for earlier, later in pairwise(changes):
                if earlier.seq == later.seq:
                    raise Wrong(f"M9 {key!r} was changed at {earlier.seq} by {earlier.partition} and {later.partition}")

    def _take(self, partition: PartitionId, number: int, entry: Entry) -> None:
        self.times[partition, number] = entry.time_ms
        mutations = list(entry.mutations())
        for at, mutation in enumerate(mutations):
            self.entry_of[partition, mutation.seq] = number
            self.mutations[partition, mutation.seq] = mutation
            self._take_mutation(partition, number, entry, mutation, mutations[at + 1 : at + 3])
        if entry.requests is not None:
            columns = entry.requests
            for client, sequence, index in zip(columns.client, columns.sequences, columns.mutations, strict=True):
                request, place = (columns.clients[client], sequence), (partition, entry.first_seq + index)
                if request in self.requests:
                    raise Wrong(f"P4 request {sequence} is done at {self.requests[request]} and at {place}")
                self.requests[request] = place

    def _take_mutation(
        self, partition: PartitionId, number: int, entry: Entry, mutation: Mutation, following: list[Mutation]
    ) -> None:
        kind, seq, key, value, created, expires_ms, _ = mutation
        if kind in (CREATE, OVERWRITE):
            record = Record(value, seq, created, entry.time_ms, expires_ms)
            self.changes[key].append(Change(seq, partition, kind, record, number))
        elif kind == DELETE:
            self.changes[key].append(Change(seq, partition, kind, ABSENT, number))
        elif kind == DECISION:
            decision = decision_of(key, seq, value)
            if decision.attempt in self.commits:
                raise Wrong(
                    f"Tx5 {decision.attempt} is committed at {self.commits[decision.attempt]} and by {decision}"
                )
            self.commits[decision.attempt] = Commit(decision, partition, number)
        elif kind == END:
            end = end_of(value)
            self.ends[end.attempt].append(end)
        elif kind == RESOLVED:
            record_of = resolved_of(value)
            resolution = Resolution(partition, seq, record_of)
            self.resolutions[key, record_of.seq].append(resolution)
            known = self.intents.get((key, record_of.seq))
            if known is None or not record_of.is_committed:
                return
            count = max(map(len, _EFFECTS[IntentEffect(known[0].record.effect)]))
            for each in following[:count]:
                if each.key != key or each.kind not in (CREATE, OVERWRITE, DELETE):
                    break
                resolution.effects.append(each)
                self.owner[key, each.seq] = record_of.attempt

    # ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def before(self, key: bytes, seq: int) -> Record:
        """Return the record of the key below `seq`, regardless of its expiry, or ABSENT."""
        changes = self.changes.get(key, [])
        at = bisect_left(changes, seq, key=lambda each: each.seq)
        return changes[at - 1].record if at else ABSENT

    def between(self, key: bytes, first: int, last: int) -> list[Change]:
        """Return the changes of the key with sequences from `first` to `last`."""
        changes = self.changes.get(key, [])
        start = bisect_left(changes, first, key=lambda each: each.seq)
        return changes[start : bisect_right(changes, last, key=lambda each: each.seq)]

    # ── checks of the logs alone ──────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Check intents and decisions when everything has come to rest. Raises Wrong."""
        for name, (intent, partition, _) in self.intents.items():
            self._check_resolution(name, intent, partition)
        for name in self.resolutions.keys() - self.intents.keys():
            raise Wrong(f"Tx7 {self.resolutions[name]} resolves {name}, which is no intent")
        for attempt, commit in self.commits.items():
            for key, seq in commit.decision.intents:
                known = self.intents.get((key, seq))
                if known is None or known[0].attempt != attempt or known[0].home != commit.decision.home:
                    raise Wrong(f"Tx5 {commit.decision} commits {key!r} at {seq}, where {known} is")
            if commit.decision.intents and len(self.ends[attempt]) != 1:
                raise Wrong(f"Tx8 {commit.decision} of {commit.partition} has the ends {self.ends[attempt]}")
        for attempt in self.ends.keys() - self.commits.keys():
            raise Wrong(f"Tx8 {self.ends[attempt]} ends what was never decided")
        self._check_locks()

    def _check_resolution(self, name: Name, intent: Intent, partition: PartitionId) -> None:
        commit, resolutions = self.commits.get(intent.attempt), self.resolutions[name]
        if len(resolutions) != 1:
            raise Wrong(f"Tx7 {intent} of {partition} has the ends {resolutions}, its decision is {commit}")
        (resolution,) = resolutions
        if resolution.record.attempt != intent.attempt:
            raise Wrong(f"Tx7 {intent} of {partition} is ended by another attempt: {resolution}")
        is_committed = commit is not None and name in commit.decision.intents
        if resolution.record.is_committed != is_committed:
            raise Wrong(f"Tx6 {intent} of {partition} ends with {resolution}, its decision is {commit}")
        if not is_committed:
            return
        effect, effects, asked = IntentEffect(intent.record.effect), resolution.effects, intent.record
        kinds = tuple(each.kind for each in effects)
        puts = [each for each in effects if each.kind != DELETE]
        if kinds not in _EFFECTS[effect] or any(
            (each.value, each.expires_ms) != (asked.value, asked.expires_ms) for each in puts
        ):
            raise Wrong(f"Tx7 {intent} of {partition} is carried out by {effects}")

    # docs/protocol.md Tx4, Tx9
    def _check_locks(self) -> None:
        """Check that nothing else changes a key under an intent, and that an exclusive intent is alone on its key."""
        by_key: defaultdict[bytes, list[tuple[int, int, Intent]]] = defaultdict(list)
        for (key, seq), (intent, *_) in self.intents.items():
            end = self.resolutions[key, seq][0].seq
            by_key[key].append((seq, end, intent))
            if changes := self.between(key, seq, end):
                raise Wrong(f"Tx9 {key!r} changes while {intent} is on it: {changes}, ended at {end}")
        for key, intents in by_key.items():
            intents.sort(key=lambda each: each[:2])
            for at, (_, end, intent) in enumerate(intents):
                for begin, _, other in intents[at + 1 :]:
                    if begin > end:
                        break
                    if intent.is_exclusive or other.is_exclusive:
                        raise Wrong(f"Tx4 {other} comes to {key!r} while {intent} is on it, until {end}")
