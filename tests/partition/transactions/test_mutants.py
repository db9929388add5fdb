"""Each rule of the model of transactions (tests/models/txn_rules.py) holds in the code: without it, the test beside it
fails. tests/sim/breakages/mutants_transactions.py has the breakages that a whole cluster notices."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.errors import NotCaughtUp, StoreError
from kvstore.partition.leading import prepare
from kvstore.partition.leading.answers import SingleResultSink
from kvstore.partition.leading.evaluate import Evaluator, NextEntry
from kvstore.partition.leading.held import HeldReads
from kvstore.partition.leading.leader import Leader
from kvstore.partition.leading.lock_table import LockTable
from kvstore.partition.leading.prepare import TransactionRules
from kvstore.partition.leading.prepared_answers import PreparedAnswers, _PreparedSink
from kvstore.partition.leading.queue import QueuedBatch
from kvstore.partition.moves import pages
from kvstore.partition.state import effects, operations, state
from kvstore.partition.state.commands import Get, Meta, Resolve, Transact
from kvstore.partition.state.decisions import Decisions
from kvstore.partition.state.intents import Intent, Intents
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.rows import ALL_DECISIONS, ALL_INTENTS
from kvstore.partition.transactions.attempts import Attempts, Decide, End, RunningAttempt
from kvstore.partition.transactions.outcomes import _Outcome
from kvstore.partition.transactions.questions import Questions, _Question
from kvstore.partition.transactions.transactor import Transactor, _DecidedSink
from kvstore.server.feed import pins
from kvstore.server.grpc.transaction_admin import TransactionAdmin
from kvstore.server.routing.read_transaction import _ReadTransaction
from tests.models.txn_rules import Rules
from tests.partition.leading import test_held as waiting
from tests.partition.leading import test_prepared_answers as withheld
from tests.partition.state import test_pinned_views_transactions as views
from tests.partition.transactions import test_transactor as transactor
from tests.partition.transactions import test_transactor_moves as moves
from tests.partition.transactions import test_transactor_pins as behind_pins
from tests.partition.transactions import test_transactor_takeovers as takeovers
from tests.server.feed import test_pins_rounds as rounds
from tests.server.grpc import test_transaction_admin as administration
from tests.server.routing import test_read_transaction as reading
from tests.sim.breakages import mutants_transactions as breakages
from tests.sim.breakages.test_moves_broken import retry_table_left_behind

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
Sentence = Callable[[], Any]

# ── Tx2, Tx3: requests and attempts ───────────────────────────────────────────────────────────────────────────────────


def begin_another_attempt_for_a_retry(patch: Patch) -> None:
    patch.setattr(Attempts, "join", lambda *_: False)


def log_no_result_with_the_decision(patch: Patch) -> None:
    decide = TransactionRules._decide

    def forget(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        return decide(self, replace(op, request=None), item, row_key)

    patch.setattr(TransactionRules, "_decide", forget)


def give_a_name_twice(patch: Patch) -> None:
    begin = Attempts.begin

    def again(self: Attempts, *args: Any) -> RunningAttempt:
        self._begun = 0
        return begin(self, *args)

    patch.setattr(Attempts, "begin", again)


def keep_attempts_after_the_lead(patch: Patch) -> None:
    patch.setattr(Transactor, "drop_all", lambda *_: None)


# ── Tx4: PREPARE ──────────────────────────────────────────────────────────────────────────────────────────────────────


def compare_no_conditions(patch: Patch) -> None:
    patch.setattr(operations, "is_met", lambda *_: True)


def refuse_nothing_for_an_intent(patch: Patch) -> None:
    patch.setattr(TransactionRules, "_is_taken", lambda *_, **__: False)


def refuse_nothing_for_a_shared_intent(patch: Patch) -> None:
    def is_taken(self: TransactionRules, keys: Any, *_: Any, **__: Any) -> bool:
        return any(intent.is_exclusive for key in keys for intent in self._lock_table.intents.at(key))

    patch.setattr(TransactionRules, "_is_taken", is_taken)


def forget_shared_intents_in_a_takeover(patch: Patch) -> None:
    rebuild = LockTable.rebuild

    def forget(self: LockTable, layers: Any) -> None:
        rebuild(self, layers)
        for intent in [*self.intents]:
            if not intent.is_exclusive:
                self.remove(intent)

    patch.setattr(LockTable, "rebuild", forget)


def check_what_is_acknowledged_only(patch: Patch) -> None:
    def is_taken(self: TransactionRules, keys: Any, written: Any, *_: Any, **__: Any) -> bool:
        standing = ((key, intent) for key in keys for intent in self._state.intents.at(key))
        return any(key in written or intent.is_exclusive for key, intent in standing)

    patch.setattr(TransactionRules, "_is_taken", is_taken)


def before_the_acknowledgement(kind: type) -> Mutant:
    """Give the results of operations with such a sink at once."""

    def mutant(patch: Patch) -> None:
        append = Leader._append

        def early(self: Leader, made: NextEntry, replies: list[Any], *arrived: float) -> None:
            self._answers.deliver_all([each for each in replies if isinstance(each[0], kind)])
            append(self, made, [each for each in replies if not isinstance(each[0], kind)], *arrived)

        patch.setattr(Leader, "_append", early)

    mutant.__name__ = f"answer_{kind.__name__.strip('_')}_before_the_acknowledgement"
    return mutant


def report_a_failed_check_at_once(patch: Patch) -> None:
    def dirty(self: Leader, taken: QueuedBatch) -> None:
        decided = self._evaluator.evaluate(taken.items, self._env.clock.wall_ms())
        if decided.entry is not None:
            self._append(decided.entry, decided.replies)
        else:
            self._answers.deliver_all(decided.replies)

    patch.setattr(Leader, "_send", dirty)


def check_conditions_before_intents(patch: Patch) -> None:
    prepared = TransactionRules._prepare

    def conditions_first(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        own = prepare._Effects(None, self._evaluator.draft.time_ms, dict.fromkeys([each.key for each in op.ops], 1))
        prepare.carry_out_batch(prepare._Part(own, self._evaluator.latest), Transact(op.key, op.ops, op.flags))
        return prepared(self, op, item, row_key)

    patch.setattr(TransactionRules, "_prepare", conditions_first)


# ── Tx5: DECIDE ───────────────────────────────────────────────────────────────────────────────────────────────────────


def decide_without_homes_conditions(patch: Patch) -> None:
    carry_out = prepare.carry_out_batch

    def unconditional(evaluating: Any, op: Any, *more: Any) -> Any:
        with Patch.context() as inner:
            if not isinstance(evaluating, prepare._Part):
                inner.setattr(operations, "is_met", lambda *_: True)
            return carry_out(evaluating, op, *more)

    patch.setattr(prepare, "carry_out_batch", unconditional)


def with_rules(method: str, patch: Patch, change: Callable[[TransactionRules, Patch], None]) -> None:
    """Run a method of the rules while a part of them is changed."""
    original = getattr(TransactionRules, method)

    def changed(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        with Patch.context() as inner:
            change(self, inner)
            return original(self, op, item, row_key)

    patch.setattr(TransactionRules, method, changed)


def decide_about_keys_that_have_moved(patch: Patch) -> None:
    def own_all(rules: TransactionRules, inner: Patch) -> None:
        inner.setattr(rules, "_serving_ranges", SimpleNamespace(may_read=lambda row_key: True))
        inner.setattr(Evaluator, "is_writable", lambda *_: True)

    with_rules("_decide", patch, own_all)


def decide_when_one_has_prepared(patch: Patch) -> None:
    def is_any_prepared(self: RunningAttempt) -> bool:
        return any(part.prepared is not None for part in self.parts)

    patch.setattr(RunningAttempt, "is_prepared", property(is_any_prepared))


# ── Tx6 to Tx8: outcomes ──────────────────────────────────────────────────────────────────────────────────────────────


def abort_what_is_under_way(patch: Patch) -> None:
    patch.setattr(Transactor, "is_under_way", lambda *_: False)


def abort_what_was_sent(patch: Patch) -> None:
    def is_unsent(self: Transactor, attempt: Any) -> bool:
        running = self.attempts.alive.get(attempt)
        return running is not None and not running.is_sent

    patch.setattr(Transactor, "is_under_way", is_unsent)
    nothing = SimpleNamespace(decisions=Decisions())
    with_rules("_inquire", patch, lambda rules, inner: inner.setattr(rules, "_lock_table", nothing))


def drop_what_was_sent(patch: Patch) -> None:
    def drop_all(self: Transactor, reason: Any) -> None:
        for running in self.attempts:
            self._fail(running, reason)

    patch.setattr(Transactor, "drop_all", drop_all)


def ask_nobody(patch: Patch) -> None:
    patch.setattr(Questions, "_ask", lambda *_: None)


def answer_for_a_range_that_has_moved(patch: Patch) -> None:
    with_rules("_inquire", patch, lambda rules, inner: inner.setattr(Evaluator, "is_owned", lambda *_: True))


def say_aborted_without_a_proof(patch: Patch) -> None:
    inquire = TransactionRules._inquire

    def unproved(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        result = inquire(self, op, item, row_key)
        self._evaluator.needs_proof = False
        return result

    patch.setattr(TransactionRules, "_inquire", unproved)


def remove_intents_by_their_age(patch: Patch) -> None:
    def ask(self: _Question) -> None:
        questions, intent = self._questions, self.intent
        if not questions.is_stopped:
            questions.enqueue(Resolve(intent.key, intent.attempt, intent.seq, False, 0), self, 1)

    patch.setattr(_Question, "ask", ask)


def resolve_by_the_attempt_only(patch: Patch) -> None:
    resolve = TransactionRules._resolve

    def any_intent(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        for intent in self._lock_table.intents.at(op.key):
            if intent.attempt == op.attempt:
                op = replace(op, intent_seq=intent.seq)
        return resolve(self, op, item, row_key)

    patch.setattr(TransactionRules, "_resolve", any_intent)


def say_resolved_before_the_intent(patch: Patch) -> None:
    resolve = TransactionRules._resolve

    def early(self: TransactionRules, op: Any, item: Any, row_key: bytes) -> Any:
        try:
            return resolve(self, op, item, row_key)
        except NotCaughtUp:
            return self._mark()

    patch.setattr(TransactionRules, "_resolve", early)


def end_before_all_have_resolved(patch: Patch) -> None:
    notify_all = _Outcome.notify_all

    def tell_and_end(self: _Outcome) -> None:
        notify_all(self)
        self.end()

    patch.setattr(_Outcome, "notify_all", tell_and_end)


def abandon_while_home_is_between_leaders(patch: Patch) -> None:
    async def check(self: TransactionAdmin, home: Any, *, is_forced: bool) -> None:
        self._check_leaderless(home)

    patch.setattr(TransactionAdmin, "_check_lost", check)


# ── Tx9, Tx10: waiting and silence ────────────────────────────────────────────────────────────────────────────────────


def read_at_intents(patch: Patch) -> None:
    patch.setattr(HeldReads, "sift", lambda self, reads, *_: reads)


def scan_over_intents(patch: Patch) -> None:
    patch.setattr(HeldReads, "hold_range", lambda *_: False)


def assume_nothing_was_sent(patch: Patch) -> None:
    start = Leader.start

    async def begin(self: Leader, *args: Any) -> None:
        await start(self, *args)
        self._prepared.unsaid.update(intent.name for intent in self._state.intents)

    patch.setattr(Leader, "start", begin)


def remember_the_unsent_of_moved_ranges(patch: Patch) -> None:
    patch.setattr(PreparedAnswers, "moved", lambda _: None)


def write_at_intents(patch: Patch) -> None:
    def add(self: LockTable, intent: Intent) -> None:
        self.intents.add(intent)

    def remove(self: LockTable, intent: Intent) -> None:
        self.intents.remove(intent.key, intent.seq)

    patch.setattr(LockTable, "add", add)
    patch.setattr(LockTable, "remove", remove)


def let_writes_overtake_a_waiting_write(patch: Patch) -> None:
    patch.setattr(LockTable, "is_waited_for", lambda *_: False)


def delete_expired_keys_under_an_intent(patch: Patch) -> None:
    reap = Evaluator._reap

    def delete(self: Evaluator, *arguments: Any) -> Any:
        with Patch.context() as inner:
            inner.setattr(self.lock_table, "intents", Intents())
            return reap(self, *arguments)

    patch.setattr(Evaluator, "_reap", delete)


def show_keys_under_an_intent_as_expired(patch: Patch) -> None:
    patch.setattr(HeldReads, "_has_expired", lambda *_: False)


def say_outcomes_before_the_wait_is_over(patch: Patch) -> None:
    use = Leader._use_participants

    def at_once(self: Leader, participants: Any) -> None:
        use(self, participants)
        assert self.transactor is not None
        self.transactor.resume()

    patch.setattr(Leader, "_use_participants", at_once)


# ── Tx11, Tx12: readers ───────────────────────────────────────────────────────────────────────────────────────────────


def look_once(patch: Patch) -> None:
    patch.setattr(_ReadTransaction, "_take_values", _ReadTransaction._answer)


class _Sequel(SingleResultSink):
    """Reads the next key of a transaction once the key before it has been read twice."""

    def __init__(self, transaction: _ReadTransaction, begin: Any, found: list[Any]) -> None:
        super().__init__()
        self.transaction, self.begin, self.found = transaction, begin, found

    def complete(self, token: int, result: Any) -> None:
        whole = self.transaction
        if isinstance(result, StoreError):
            return whole._end(result)
        self.found += result[0]
        if len(self.found) == len(whole._op.ops):
            return whole._end((self.found, []))
        op = whole._op.ops[len(self.found)]
        self.begin(_ReadTransaction(whole._reading, Transact(op.key, (op,)), self, 0, 0))


def look_again_before_all_were_seen(patch: Patch) -> None:
    begin = _ReadTransaction.begin

    def one_by_one(self: _ReadTransaction) -> None:
        if len(self._op.ops) == 1:
            return begin(self)
        _Sequel(self, begin, []).complete(0, ([], []))

    patch.setattr(_ReadTransaction, "begin", one_by_one)


def look_past_an_exclusive_intent(patch: Patch) -> None:
    sift = HeldReads.sift

    def second_look(self: HeldReads, reads: Any, *more: Any) -> Any:
        metas = [each for each in reads if each[0].__class__ in (Get, Meta)]
        others = [each for each in reads if each[0].__class__ not in (Get, Meta)]
        return [*metas, *sift(self, others, *more)]

    patch.setattr(HeldReads, "sift", second_look)


def look_at_no_absent_key_again(patch: Patch) -> None:
    reading.BREAKAGES["absent keys are not looked at"](patch)


def show_a_replicas_value_under_an_intent(patch: Patch) -> None:
    patch.setattr("kvstore.partition.partition.is_undecided", lambda *_: False)


def answer_with_homes_position_only(patch: Patch) -> None:
    result = RunningAttempt.result

    def of_home(self: RunningAttempt, own: Any, seq: int) -> Any:
        results, positions = result(self, own, seq)
        return results, positions[:1]

    patch.setattr(RunningAttempt, "result", of_home)


# ── Tx13: pins ────────────────────────────────────────────────────────────────────────────────────────────────────────


def without_the_pin(kind: type) -> Mutant:
    def mutant(patch: Patch) -> None:
        is_behind = Evaluator.is_behind

        def of_others(self: Evaluator, item: Any, mark: int) -> bool:
            return item[0].__class__ is kind or is_behind(self, item, mark)

        patch.setattr(Evaluator, "is_behind", of_others)

    mutant.__name__ = f"log_{kind.__name__}_before_the_pin"
    return mutant


def take_a_lower_pin(patch: Patch) -> None:
    send = Evaluator._send_mark

    def any_number(self: Evaluator, record: Any) -> None:
        before, self.mark = self.mark, 0
        send(self, record)
        self.mark = max(before, self.mark)

    patch.setattr(Evaluator, "_send_mark", any_number)


def take_a_pin_with_any_owners(patch: Patch) -> None:
    patch.setattr(pins, "_flaw_of", lambda *_: "")


def take_a_pin_over_a_planned_move(patch: Patch) -> None:
    unpinned = pins._unpinned_move
    patch.setattr(pins, "_unpinned_move", lambda before, ring, taken: unpinned(ring, ring, taken))


def take_a_pin_without_targets(patch: Patch) -> None:
    def only_planned(before: Any, ring: Any, taken: Any) -> str:
        return "" if before is not None and ring is not None and before.next_move == ring.next_move else "moved"

    patch.setattr(pins, "_unpinned_move", only_planned)


def show_pinned_intents_as_undecided(patch: Patch) -> None:
    resolve = PinnedView.resolve
    patch.setattr(PinnedView, "resolve", lambda self, committed: resolve(self, ()))


# ── Tx14: moves ───────────────────────────────────────────────────────────────────────────────────────────────────────


def leave_behind(rows: tuple[bytes, bytes]) -> Mutant:
    def mutant(patch: Patch) -> None:
        def bounds(span: Any) -> Any:
            return [each for each in effects.moving_bounds(span) if not rows[0] <= each[0] < rows[1]]

        patch.setattr(pages, "moving_bounds", bounds)

    mutant.__name__ = "leave_intents_behind" if rows is ALL_INTENTS else "leave_decisions_behind"
    return mutant


def count_sequences_without_the_former_owner(patch: Patch) -> None:
    apply_record = state.apply_record

    def without(*arguments: Any) -> Any:
        return apply_record(*arguments)._replace(seq=arguments[-1])

    patch.setattr(state, "apply_record", without)


def log_behind_the_freeze(patch: Patch) -> None:
    for method in ("_prepare", "_resolve"):
        with_rules(method, patch, lambda rules, inner: inner.setattr(Evaluator, "is_writable", lambda *_: True))


def live_on_after_the_release(patch: Patch) -> None:
    patch.setattr(Transactor, "drop_foreign", lambda *_: None)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_rounds(test: Callable[..., Any]) -> Sentence:
    """Return a test of pins with the servers that it needs."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            servers = rounds.Servers(Path(folder))
            await servers.change(lambda ring: ring)
            try:
                async with asyncio.timeout(5):
                    await test(servers)
            finally:
                await servers.keeper.close()
                await servers.env.nursery.close()

    return run


def with_argument(test: Callable[..., None], *arguments: Any, **named: Any) -> Sentence:
    return lambda: test(*arguments, **named)


CAUGHT: list[tuple[str, Mutant, Sentence]] = [
    ("attempt_joined", begin_another_attempt_for_a_retry, takeovers.test_retry_joins_the_running_attempt),
    (
        "result_with_decide",
        log_no_result_with_the_decision,
        takeovers.test_retry_after_a_takeover_gets_the_first_result,
    ),
    ("prepared_named", give_a_name_twice, takeovers.test_no_two_attempts_have_one_name),
    ("dropped_with_lead", keep_attempts_after_the_lead, takeovers.test_leader_drops_its_attempts_when_it_stops),
    ("compare", compare_no_conditions, transactor.test_failed_check_at_participant_undoes_the_transaction),
    (
        "exclude",
        refuse_nothing_for_an_intent,
        transactor.test_conflict_is_refused_at_once_except_at_the_last_participant,
    ),
    ("shared", refuse_nothing_for_a_shared_intent, transactor.test_write_skew_is_refused),
    ("shared_logged", forget_shared_intents_in_a_takeover, takeovers.test_shared_intent_survives_a_takeover),
    ("count_sent", check_what_is_acknowledged_only, takeovers.test_intent_in_flight_refuses_another_transaction),
    (
        "prepared_acked",
        before_the_acknowledgement(_PreparedSink),
        takeovers.test_prepared_is_said_when_the_intent_is_acknowledged,
    ),
    (
        "refusal_acked",
        report_a_failed_check_at_once,
        takeovers.test_check_that_fails_by_a_write_in_flight_is_reported_behind_it,
    ),
    (
        "intents_first",
        check_conditions_before_intents,
        takeovers.test_check_behind_an_exclusive_intent_conflicts_instead_of_failing,
    ),
    ("home_checks", decide_without_homes_conditions, transactor.test_home_checks_its_own_part_when_it_decides),
    (
        "home_owns",
        decide_about_keys_that_have_moved,
        takeovers.test_decision_is_refused_if_a_key_of_homes_part_has_moved,
    ),
    (
        "commit_acked",
        before_the_acknowledgement(_DecidedSink),
        transactor.test_commit_is_answered_when_the_decision_is_acknowledged,
    ),
    ("all_prepared", decide_when_one_has_prepared, transactor.test_home_decides_only_when_all_have_prepared),
    ("dropped_first", abort_what_is_under_way, takeovers.test_nothing_is_said_of_an_attempt_that_is_under_way),
    ("sent_is_not_absent", abort_what_was_sent, takeovers.test_nothing_is_said_of_an_attempt_that_is_under_way),
    (
        "unsent_only",
        drop_what_was_sent,
        takeovers.test_leader_that_stops_aborts_no_attempt_whose_decision_it_has_sent,
    ),
    ("asked", ask_nobody, takeovers.test_intent_whose_outcome_is_lost_gets_it_from_home),
    (
        "owner_says",
        answer_for_a_range_that_has_moved,
        takeovers.test_former_owner_of_the_home_key_does_not_say_aborted,
    ),
    ("aborted_proved", say_aborted_without_a_proof, takeovers.test_aborted_is_said_behind_an_append_only),
    ("home_word", remove_intents_by_their_age, takeovers.test_intent_whose_outcome_is_lost_gets_it_from_home),
    (
        "abandoned_when_lost",
        abandon_while_home_is_between_leaders,
        administration.test_abandon_is_refused_while_the_home_changes_leaders,
    ),
    (
        "outcome_named",
        resolve_by_the_attempt_only,
        takeovers.test_late_outcome_does_not_touch_a_later_intent_of_the_attempt,
    ),
    (
        "resolved_behind",
        say_resolved_before_the_intent,
        takeovers.test_owner_that_has_not_reached_the_intent_does_not_say_resolved,
    ),
    ("end_last", end_before_all_have_resolved, takeovers.test_decision_stays_until_every_owner_has_said_resolved),
    ("reads_wait", read_at_intents, with_argument(waiting.test_read_waits_at_an_exclusive_intent, Get)),
    (
        "reads_wait",
        scan_over_intents,
        with_argument(waiting.test_read_waits_at_an_exclusive_intent, waiting.READS[4]),
    ),
    (
        "sending_noted",
        breakages.read_past_prepared,
        withheld.test_repeated_prepare_is_withheld_only_before_its_first_answer,
    ),
    (
        "assumed_sent",
        assume_nothing_was_sent,
        withheld.test_next_leader_withholds_nothing_that_may_have_been_said,
    ),
    (
        "forgotten_at_release",
        remember_the_unsent_of_moved_ranges,
        withheld.test_leader_forgets_what_is_unsent_when_the_range_moves_away,
    ),
    (
        "writes_wait",
        write_at_intents,
        with_argument(waiting.test_write_waits_at_any_intent, waiting.WRITES[0], is_shared=True),
    ),
    ("writes_wait", let_writes_overtake_a_waiting_write, waiting.test_transactions_do_not_pass_writes_that_wait),
    (
        "expiry_waits",
        delete_expired_keys_under_an_intent,
        waiting.test_sweep_does_not_delete_an_expired_key_under_an_intent,
    ),
    ("expired_reads_wait", show_keys_under_an_intent_as_expired, waiting.test_expiry_waits_at_any_intent),
    (
        "silent_in_wait",
        say_outcomes_before_the_wait_is_over,
        takeovers.test_new_leader_says_no_outcome_before_it_serves,
    ),
    ("ro_twice", look_once, reading.test_read_transaction_begins_again_when_a_key_has_changed),
    (
        "ro_all_first",
        look_again_before_all_were_seen,
        reading.test_write_at_any_moment_is_shown_at_all_keys_or_at_none,
    ),
    (
        "ro_minds",
        look_past_an_exclusive_intent,
        with_argument(waiting.test_read_waits_at_an_exclusive_intent, Meta),
    ),
    (
        "ro_absent",
        look_at_no_absent_key_again,
        with_argument(reading.test_key_created_and_deleted_between_looks_is_noticed, 4),
    ),
    (
        "replica_minds",
        show_a_replicas_value_under_an_intent,
        waiting.test_replica_leaves_session_reads_under_an_intent_to_the_leader,
    ),
    (
        "token_of_prepare",
        answer_with_homes_position_only,
        transactor.test_transaction_writes_in_all_of_its_partitions,
    ),
    (
        "mark_decide",
        without_the_pin(Decide),
        behind_pins.test_decide_waits_for_the_pin_that_a_participant_has_taken,
    ),
    ("mark_resolve", without_the_pin(Resolve), behind_pins.test_resolve_waits_for_the_pin_that_home_has_taken),
    ("mark_end", without_the_pin(End), behind_pins.test_end_waits_for_the_pin_that_a_participant_has_taken),
    ("mark_rises", take_a_lower_pin, behind_pins.test_mark_that_keeps_nothing_is_logged_after_a_second),
    (
        "one_owner",
        take_a_pin_with_any_owners,
        of_rounds(rounds.test_pin_round_is_repeated_if_two_own_a_token),
    ),
    (
        "none_planned",
        take_a_pin_over_a_planned_move,
        of_rounds(rounds.test_pin_round_is_repeated_when_a_range_moved_on),
    ),
    (
        "targets_pinned",
        take_a_pin_without_targets,
        of_rounds(rounds.test_pin_round_is_repeated_if_the_target_of_a_move_was_not_pinned),
    ),
    (
        "view_resolves",
        show_pinned_intents_as_undecided,
        views.test_committed_intents_are_shown_and_others_are_not,
    ),
    (
        "changes_resolved",
        show_pinned_intents_as_undecided,
        views.test_changes_of_committed_intents_can_be_read_alone,
    ),
    ("raised", count_sequences_without_the_former_owner, moves.test_sequences_rise_along_the_owners_of_a_key),
    ("intents_move", leave_behind(ALL_INTENTS), moves.test_intents_move_with_their_range),
    ("decisions_move", leave_behind(ALL_DECISIONS), moves.test_decisions_move_with_the_home_key),
    (
        "results_move",
        retry_table_left_behind,
        with_argument(moves.test_retry_gets_the_first_answer_wherever_the_home_key_is, (0, 1)),
    ),
    ("frozen", log_behind_the_freeze, moves.test_records_of_transactions_wait_behind_a_freeze),
    (
        "die_at_release",
        live_on_after_the_release,
        moves.test_attempt_ends_with_its_range_even_if_the_range_comes_back,
    ),
]
"""A rule of the model, a breakage of the code, and the test that fails."""


def run(sentence: Sentence) -> None:
    done = sentence()
    if inspect.isawaitable(done):
        with asyncio.Runner() as runner:
            runner.run(as_coroutine(done))


async def as_coroutine(done: Any) -> None:
    await done


@pytest.mark.parametrize(
    ("mutant", "sentence"),
    [pytest.param(mutant, sentence, id=f"{rule}-{mutant.__name__}") for rule, mutant, sentence in CAUGHT],
)
def test_broken_transactions_are_noticed(mutant: Mutant, sentence: Sentence, monkeypatch: Patch) -> None:
    run(sentence)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, asyncio.InvalidStateError, pytest.fail.Exception)):
        run(sentence)


def test_each_rule_of_the_model_has_a_mutant() -> None:
    assert {rule for rule, _, _ in CAUGHT} == {field.name for field in fields(Rules)}
