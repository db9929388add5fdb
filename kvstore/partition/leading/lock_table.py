"""Tracks the intents and decisions as they will be after all entries in flight and the entry under construction, and
the writes that wait for each key. The leader evaluates every write, and every record of a transaction, against them
(docs/protocol.md Tx4, Tx16). Decides only."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.partition.state.commands import Op
from kvstore.partition.state.decisions import Decision, Decisions
from kvstore.partition.state.intents import Intent, Intents
from kvstore.partition.state.overlay import Layer, TransactionChanges
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens
from kvstore.partition.state.traits import KEYLESS

LINE_MAX = 64
"""Maximum number of operations that wait for one key, and of transactions that wait for another one at the same home,
before further transactions are refused with Conflict."""


class LockTable:
    """The lock table of one leadership: its intents and decisions, including those in flight, the keys whose writes
    wait, and the keys that running attempts claim at home."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.intents, self.decisions = Intents(), Decisions()
        self.locks: dict[bytes, int] = {}
        """Key → number of its intents and claims plus number of waiting writes on it. Plain writes test only this map,
        which is empty while no transaction is under way."""
        self.claims: dict[bytes, list[Op]] = {}
        """Key → the transactions whose attempts have claimed it at home. Included in `locks`."""
        self._last: dict[bytes, list[Op]] = {}
        """Key → the transactions that name versions and whose attempts lock it at home last, with DECIDE."""
        self._waiting: dict[bytes, int] = {}
        """Key → number of waiting writes. Included in `locks`."""
        self._places: dict[int, set[bytes]] = {}
        """id of a waiting operation → the keys that it locks meanwhile."""
        self._without_place = 0
        """Number of waiting transactions that lock nothing, because they wait for another one."""
        self.is_freed = False
        """True if, since the last `release`, an intent or a waiting write has gone for which another write may wait."""
        self.conflicting: list[Intent] = []
        """Intents because of which a transaction was refused. The leader asks home about them, because they may be
        orphaned."""
        self.rebuild(())

    def rebuild(self, layers: Iterable[Layer]) -> None:
        """Start again from the state and the entries in flight, because a record about tokens has been applied. The
        waiting writes must be released first."""
        assert not self._waiting, "writes wait at intents of the former tokens"
        self.intents, self.decisions, self.locks = Intents(), Decisions(), {}
        self.locks.update((key, len(ops)) for key, ops in self.claims.items())
        for intent in self._state.intents:
            self.add(intent)
        for decision in self._state.decisions:
            self.decisions.add(decision)
        for layer in layers:
            if layer.transactions is not None:
                self._take(layer.transactions)

    def _take(self, changes: TransactionChanges) -> None:
        for intent in changes.intents:
            self.add(intent)
        for intent in changes.resolved:
            self.remove(intent)
        for decision in changes.decisions:
            self.decisions.add(decision)
        for decision in changes.ended:
            self.decisions.remove(decision.attempt)

    def undo(self, changes: TransactionChanges | None) -> None:
        """Undo the changes of an entry that was not finished."""
        if changes is None:
            return
        for decision in changes.ended:
            self.decisions.add(decision)
        for decision in changes.decisions:
            self.decisions.remove(decision.attempt)
        for intent in changes.resolved:
            self.add(intent)
        for intent in changes.intents:
            self.remove(intent)

    def add(self, intent: Intent) -> None:
        if self.intents.find(intent.key, intent.seq) is None:
            self.intents.add(intent)
            self.locks[intent.key] = self.locks.get(intent.key, 0) + 1

    def remove(self, intent: Intent) -> None:
        if self.intents.remove(intent.key, intent.seq) is not None:
            self._unlock(intent.key, 1)
            self._note_free(intent.key)

    def decide(self, decision: Decision) -> None:
        self.decisions.add(decision)

    def end(self, decision: Decision) -> None:
        self.decisions.remove(decision.attempt)

    def blocking_intents(self, op: Op) -> list[Intent]:
        """Return the intents for which a write has to wait."""
        if op.code in KEYLESS:
            end = getattr(op, "end", b"")
            keys = [key for key in self.intents.by_key if op.key <= key and (not end or key < end)]
        else:
            keys = [each.key for each in op.ops] or [op.key]
        return [intent for key in keys for intent in self.intents.at(key)]

    def locked_between(self, start: bytes, end: bytes, tokens: Tokens) -> list[bytes]:
        """Return the locked keys in [start, end) with one of these tokens. An empty `end` means up to the last key."""
        return [
            key
            for key in self.locks
            if start <= key and (not end or key < end) and tokens.holds(self._state.hash.token_of(key))
        ]

    # ── home's own keys ───────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md Tx16
    def claim(self, op: Op, keys: Iterable[bytes], *, is_last: bool) -> None:
        """Let an attempt of this transaction hold keys at home until it ends. With `is_last`, the keys are only
        noted."""
        for key in keys:
            (self._last if is_last else self.claims).setdefault(key, []).append(op)
            if not is_last:
                self.locks[key] = self.locks.get(key, 0) + 1

    def unclaim(self, op: Op) -> None:
        """End the claims of a transaction, because its decision is under way or its attempt has ended. Its DECIDE may
        have waited. If the same object has claimed twice, this ends one of its claims on each key."""
        for key in {each.key for each in op.ops}:
            for claims in (self._last, self.claims):
                place = next((place for place, each in enumerate(claims.get(key, ())) if each is op), None)
                if place is None:
                    continue
                del claims[key][place]
                if not claims[key]:
                    del claims[key]
                if claims is self.claims:
                    self._unlock(key, 1)
                self._note_free(key)

    def is_another_last(self, keys: Iterable[bytes]) -> bool:
        """Return True if an attempt is under way that names versions and locks one of the keys last."""
        return any(key in self._last for key in keys)

    # ── writes that wait ──────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, op: Op, keys: Iterable[bytes]) -> None:
        """Lock the keys of a write that waits, so that no later write on them overtakes it."""
        self._places[id(op)] = set(keys)
        for key in self._places[id(op)]:
            self._waiting[key] = self._waiting.get(key, 0) + 1
            self.locks[key] = self.locks.get(key, 0) + 1

    def wait_without_place(self) -> None:
        """Record that an operation waits that locks nothing, so that others may overtake it."""
        self._without_place += 1

    def stop_waiting(self, op: Op) -> None:
        """Unlock the keys of a write that was refused while it waited. Other writes may have waited only for it."""
        for key in self._places.pop(id(op), ()):
            left = self._waiting.pop(key) - 1
            if left:
                self._waiting[key] = left
                self.is_freed = True
            self._unlock(key, 1)

    def is_line_full(self, keys: Iterable[bytes]) -> bool:
        """Return True if no further transaction may wait for one of these keys."""
        return self._without_place >= LINE_MAX or any(self._waiting.get(key, 0) >= LINE_MAX for key in keys)

    def is_waited_for(self, key: bytes) -> bool:
        """Return True if a write on the key waits."""
        return key in self._waiting

    def release(self) -> None:
        """Unlock the keys of all waiting writes, because the leader evaluates these writes again."""
        waiting, self._waiting = self._waiting, {}
        self._places.clear()
        self._without_place, self.is_freed = 0, False
        for key, count in waiting.items():
            self._unlock(key, count)

    def _note_free(self, key: bytes) -> None:
        self.is_freed = self.is_freed or self._without_place > 0 or key in self._waiting

    def _unlock(self, key: bytes, count: int) -> None:
        left = self.locks[key] - count
        if left:
            self.locks[key] = left
        else:
            del self.locks[key]
