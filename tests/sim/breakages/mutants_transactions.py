"""Ways to break transactions over partitions, one for each rule that a run of transactions can notice
(docs/protocol.md, Tx). tests/partition/leading and tests/partition/transactions break the rules whose cases whole
clusters rarely meet."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.partition.leading.held import HeldReads
from kvstore.partition.leading.lock_table import LockTable
from kvstore.partition.leading.prepare import TransactionRules
from kvstore.partition.leading.prepared_answers import PreparedAnswers
from kvstore.partition.state import operations
from kvstore.partition.state.commands import Resolve
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.overlay import UNTOUCHED
from kvstore.partition.transactions.attempts import Attempts, RunningAttempt
from kvstore.partition.transactions.outcomes import _Outcome
from kvstore.partition.transactions.questions import _Question
from kvstore.partition.transactions.transactor import Transactor
from kvstore.server.routing.read_transaction import _ReadTransaction
from tests.sim.breakages.catalogue import mutant
from tests.sim.transacting.swarm import Plan

BUSY = Plan(users=5, pause_s=0.02)
SPREAD: dict[str, Any] = {"partitions": 3, "nodes": 3, "chaos_s": 3.0, "power_cut_at_end": False}
QUICK: dict[str, Any] = {**SPREAD, "transactions": BUSY}
LOSSES = ("kill_leader", "resets")


# ── Tx4: locks ────────────────────────────────────────────────────────────────────────────────────────────────────────


@mutant("Tx4 an intent refuses nothing", **QUICK)
def _free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionRules, "_is_taken", lambda *_, **__: False)


@mutant("Tx4 a shared intent refuses nothing", **QUICK)
def _exclusive_only(patch: pytest.MonkeyPatch) -> None:
    def is_taken(self: TransactionRules, keys: Any, written: Any, **_: Any) -> bool:
        return any(intent.is_exclusive for key in keys for intent in self._lock_table.intents.at(key))

    patch.setattr(TransactionRules, "_is_taken", is_taken)


@mutant("Tx4 intents in flight do not count", **QUICK)
def _acknowledged_only(patch: pytest.MonkeyPatch) -> None:
    def is_taken(self: TransactionRules, keys: Any, written: Any, **_: Any) -> bool:
        standing = ((key, intent) for key in keys for intent in self._state.intents.at(key))
        return any(key in written or intent.is_exclusive for key, intent in standing)

    patch.setattr(TransactionRules, "_is_taken", is_taken)


@mutant("Tx4 conditions are not compared", **QUICK)
def _unconditional(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "is_met", lambda *_: True)


# ── Tx5, Tx2: decisions and requests ──────────────────────────────────────────────────────────────────────────────────


@mutant("Tx5 the result is not logged with the decision", *LOSSES, **QUICK)
def _without_result(patch: pytest.MonkeyPatch) -> None:
    decide = TransactionRules._decide

    def forget(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        return decide(self, replace(op, request=None), item, row_key)

    patch.setattr(TransactionRules, "_decide", forget)


@mutant("Tx2 a request is decided again", *LOSSES, **QUICK)
def _decided_again(patch: pytest.MonkeyPatch) -> None:
    decide = TransactionRules._decide

    def forget(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        evaluator: Any = self._evaluator
        evaluator.known = lambda *_: UNTOUCHED
        try:
            return decide(self, op, item, row_key)
        finally:
            del evaluator.known

    patch.setattr(Attempts, "join", lambda *_: False)
    patch.setattr(TransactionRules, "_decide", forget)


# ── Tx6 to Tx8: outcomes ──────────────────────────────────────────────────────────────────────────────────────────────


@mutant("Tx6 an attempt that is under way counts as aborted", "slow_links", "slow_disk", **QUICK)
def _given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transactor, "is_under_way", lambda *_: False)


@mutant("Tx6 an intent is given up by its age", "slow_links", **QUICK)
def _by_age(patch: pytest.MonkeyPatch) -> None:
    def ask(self: _Question) -> None:
        questions, intent = self._questions, self.intent
        if not questions.is_stopped:
            questions.enqueue(Resolve(intent.key, intent.attempt, intent.seq, False, 0), self, 1)

    patch.setattr(_Question, "ask", ask)


@mutant("Tx7 a committed intent has no effect", **QUICK)
def _no_effect(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "_take_effect", lambda *_: None)


@mutant("Tx8 the decision ends before all have resolved", *LOSSES, **QUICK)
def _early_end(patch: pytest.MonkeyPatch) -> None:
    notify_all = _Outcome.notify_all

    def tell_and_end(self: _Outcome) -> None:
        notify_all(self)
        self.end()

    patch.setattr(_Outcome, "notify_all", tell_and_end)


# ── Tx9 to Tx12: reads and writes at intents ──────────────────────────────────────────────────────────────────────────


@mutant("Tx9 reads do not wait at intents", **QUICK)
def _impatient_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldReads, "sift", lambda self, reads, *_: reads)


@mutant("Tx9 a leader does not note that it sends PREPARED", **QUICK)
def read_past_prepared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PreparedAnswers, "_give_prepared", lambda *_: None)


@mutant("Tx9 writes do not wait at intents", **QUICK)
def _impatient_writes(patch: pytest.MonkeyPatch) -> None:
    def add(self: LockTable, intent: Intent) -> None:
        self.intents.add(intent)

    def remove(self: LockTable, intent: Intent) -> None:
        self.intents.remove(intent.key, intent.seq)

    patch.setattr(LockTable, "add", add)
    patch.setattr(LockTable, "remove", remove)


@mutant("Tx11 a read transaction looks once", **QUICK)
def _one_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_ReadTransaction, "_take_values", _ReadTransaction._answer)


@mutant("Tx12 the answer covers home only", **QUICK)
def _home_only(patch: pytest.MonkeyPatch) -> None:
    result = RunningAttempt.result

    def of_home(self: RunningAttempt, own: Any, seq: int) -> Any:
        results, positions = result(self, own, seq)
        return results, positions[:1]

    patch.setattr(RunningAttempt, "result", of_home)
