"""Builds a log with transactions over several partitions, as a leader would write it."""

from __future__ import annotations

from random import Random

from kvstore.partition.state.commands import Record
from kvstore.partition.state.decisions import Decision
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.intents import Intent, IntentEffect, IntentName, IntentRecord
from kvstore.partition.state.internal import Attempt
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from kvstore.wal.ports import LogEntry
from tests.partition.effects import P1, TIME_MS, all_records, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

KEYS = tuple(b"k%d" % number for number in range(12))
HOME = PartitionId("home")


class TransactionLog:
    """A log of p1, which is the participant of some transactions and the home of others."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.state = state_over(MemoryEngine())
        self.log: list[LogEntry] = []
        self.values: dict[bytes, bytes] = {}
        self.intents: dict[IntentName, Intent] = {}
        self.decisions: dict[Attempt, Decision] = {}
        self.attempts = 0
        self.time_ms = TIME_MS

    def draft(self) -> Draft:
        """Return the next entry of the log, empty."""
        self.time_ms += self.random.randrange(3)
        return Draft(self.state.seq + 1, self.time_ms, rings.key_hash)

    def append(self, draft: Draft) -> LogEntry:
        """Append the entry, and apply it to the reference."""
        logged = LogEntry(Position(LedgerId(1), EntryId(len(self.log))), draft.entry(P1, 1).encode())
        self.log.append(logged)
        self.state.apply(logged)
        return logged

    def attempt(self, partition: PartitionId = HOME) -> Attempt:
        self.attempts += 1
        return Attempt(partition, 1, self.attempts)

    def record(self, key: bytes) -> Record | None:
        return all_records(self.state).get(key)

    # ── what a leader would do ────────────────────────────────────────────────────────────────────────────────────────

    def put(self, key: bytes, value: bytes, expires_ms: int = 0) -> LogEntry:
        draft = self.draft()
        draft.put(key, value, self.record(key), expires_ms)
        self.values[key] = value
        return self.append(draft)

    def intent(
        self,
        key: bytes,
        value: bytes | None = b"",
        *,
        attempt: Attempt | None = None,
        is_exclusive: bool = True,
        expires_ms: int = 0,
        deletes_first: bool = False,
    ) -> Intent:
        """Log an intent to write the key, or to delete it if `value` is None, or a shared intent. With
        `deletes_first`, the transaction deletes the key before it writes it."""
        draft = self.draft()
        old = self.record(key)
        effect = IntentEffect.NONE
        if is_exclusive and value is None:
            effect = IntentEffect.NONE if old is None else IntentEffect.DELETE
        elif is_exclusive:
            effect = IntentEffect.RECREATE if deletes_first and old is not None else IntentEffect.PUT
        writes = effect in (IntentEffect.PUT, IntentEffect.RECREATE)
        record = IntentRecord(
            attempt or self.attempt(),
            b"at home",
            is_exclusive,
            draft.time_ms,
            parts=2,
            effect=effect,
            value=(value or b"") if writes else b"",
            created=old.created if old is not None and effect == IntentEffect.PUT else 0,
            expires_ms=expires_ms if writes else 0,
            replaced_ms=old.expires_ms if old is not None and effect != IntentEffect.NONE else 0,
        )
        intent = draft.intent(key, record)
        self.append(draft)
        self.intents[intent.name] = intent
        return intent

    def resolve(self, intent: Intent, *, is_committed: bool) -> LogEntry:
        draft = self.draft()
        draft.resolved(intent, is_committed=is_committed)
        logged = self.append(draft)
        del self.intents[intent.name]
        if is_committed and intent.record.effect in (IntentEffect.PUT, IntentEffect.RECREATE):
            self.values[intent.key] = intent.record.value
        elif is_committed and intent.record.effect == IntentEffect.DELETE:
            del self.values[intent.key]
        return logged

    def decide(self, key: bytes, value: bytes) -> Decision:
        draft = self.draft()
        draft.put(key, value, self.record(key), 0)
        of = [IntentName(b"elsewhere", self.random.randrange(1, 1000))]
        decision = draft.decision(key, self.attempt(P1), of, part=1, parts=2)
        self.append(draft)
        self.values[key] = value
        self.decisions[decision.attempt] = decision
        return decision

    def end(self, decision: Decision) -> LogEntry:
        draft = self.draft()
        draft.end(decision)
        del self.decisions[decision.attempt]
        return self.append(draft)

    def any(self) -> None:
        """Append some entry that a leader might write."""
        random = self.random
        dice = random.random()
        free = [key for key in KEYS if not self.state.intents.at(key)]
        value = b"v%d" % random.randrange(1000)
        expires_ms = self.time_ms + 10_000 if random.random() < 0.2 else 0
        if dice < 0.3 and free:
            key = random.choice(free)
            wanted = value if random.random() < 0.8 else None
            self.intent(
                key,
                wanted,
                is_exclusive=random.random() < 0.7,
                expires_ms=expires_ms,
                deletes_first=random.random() < 0.3,
            )
        elif dice < 0.55 and self.intents:
            self.resolve(random.choice(list(self.intents.values())), is_committed=random.random() < 0.6)
        elif dice < 0.65 and free:
            self.decide(random.choice(free), value)
        elif dice < 0.72 and self.decisions:
            self.end(random.choice(list(self.decisions.values())))
        elif free:
            self.put(random.choice(free), value, expires_ms)
        else:
            self.resolve(random.choice(list(self.intents.values())), is_committed=False)
