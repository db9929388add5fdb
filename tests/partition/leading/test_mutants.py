"""Tests that cannot fail prove nothing: each way to break a leader here is detected by the test beside it."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import StoreError
from kvstore.partition.leading import plain_puts, range_reads
from kvstore.partition.leading.evaluate import Evaluator, NextEntry
from kvstore.partition.leading.leader import Leader
from kvstore.partition.leading.leader_reads import LeaderReads
from kvstore.partition.leading.queue import QueuedBatch
from kvstore.partition.leading.read_lease import ReadLease
from kvstore.partition.state import operations, rows
from kvstore.partition.state.commands import Check, Flag, Put
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.overlay import UNTOUCHED, Overlay
from kvstore.partition.state.retry_table import RetryTable
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateExport
from kvstore.types import EntryId, LedgerId, Position
from tests.partition.leading import (
    test_leader,
    test_leader_expiry,
    test_leader_retries,
    test_new_requests,
    test_plain_puts,
    test_range_reads,
    test_read_lease,
)
from tests.partition.one_partition import Partition
from tests.partition.state import test_operations, test_transfer

Patch = pytest.MonkeyPatch


def apply_before_the_acknowledgement(patch: Patch) -> None:
    append, apply = Leader._append, ReplicaState.apply_decoded

    def early(self: Leader, made: NextEntry, replies: list[Any], *arrived: float) -> None:
        apply(self._state, Position(LedgerId(self.epoch), EntryId(self._entries)), made.entry, made.data_keys)
        append(self, made, replies, *arrived)

    patch.setattr(Leader, "_append", early)
    patch.setattr(ReplicaState, "apply_decoded", lambda self, position, entry, data_keys: None)


def let_a_check_fail_by_itself(patch: Patch) -> None:
    patch.setattr(operations, "Check", None)


def answer_before_it_is_applied(patch: Patch) -> None:
    done = Leader._done

    def early(self: Leader, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        if error is None and self._in_flight:
            self._answers.deliver_all(self._in_flight[0].replies)
            self._in_flight[0].replies = []
        done(self, position, sent_at, error)

    patch.setattr(Leader, "_done", early)


def answer_before_the_acknowledgement(patch: Patch) -> None:
    append = Leader._append

    def early(self: Leader, made: NextEntry, replies: list[Any], *arrived: float) -> None:
        self._answers.deliver_all(replies)
        append(self, made, [], *arrived)

    patch.setattr(Leader, "_append", early)


def count_the_lease_from_the_acknowledgement(patch: Patch) -> None:
    done = Leader._done
    patch.setattr(
        Leader, "_done", lambda self, position, sent_at, error: done(self, position, self._env.clock.now(), error)
    )


def cache_the_verdict_on_the_lease(patch: Patch) -> None:
    verdicts: dict[ReadLease, bool] = {}

    def cached(self: ReadLease, now: float) -> bool:
        verdicts[self] = verdicts.get(self, False) or now < self.lease_until
        return verdicts[self]

    patch.setattr(ReadLease, "has_lease", cached)


def use_a_proof_again(patch: Patch) -> None:
    patch.setattr(ReadLease, "proves", lambda self, ticket: self.acknowledged >= ticket)


def renew_the_lease_after_the_release(patch: Patch) -> None:
    def late(self: ReadLease, sent_at: float) -> None:
        self.acknowledged += 1
        self.lease_until = sent_at + self._lease_s

    patch.setattr(ReadLease, "acknowledge", late)


def read_on_until_the_release_is_acknowledged(patch: Patch) -> None:
    patch.setattr(ReadLease, "close", lambda self: None)


def retry_without_the_table(patch: Patch) -> None:
    patch.setattr(RetryTable, "find", lambda self, request, hash_of_key, now_ms: None)


def retry_without_what_is_in_flight(patch: Patch) -> None:
    patch.setattr(Overlay, "find_request", lambda self, request, hash_of_key: UNTOUCHED)


def take_each_of_many_requests_for_new(patch: Patch) -> None:
    patch.setattr(RetryTable, "are_new", lambda *_: True)


def count_none_of_many_requests(patch: Patch) -> None:
    patch.setattr(RetryTable, "admit_all", lambda *_: None)


def tell_a_failed_condition_at_once(patch: Patch) -> None:
    def dirty(self: Leader, taken: QueuedBatch) -> None:
        decided = self._evaluator.evaluate(taken.items, self._env.clock.wall_ms())
        if decided.entry is not None:
            self._append(decided.entry, decided.replies)
        else:
            self._answers.deliver_all(decided.replies)

    patch.setattr(Leader, "_send", dirty)


def tell_a_failed_condition_without_a_lease(patch: Patch) -> None:
    patch.setattr(LeaderReads, "deliver_unlogged", lambda self, replies: self._answers.deliver_all(replies))


def decide_without_what_is_in_flight(patch: Patch) -> None:
    patch.setattr(Overlay, "find", lambda self, key: UNTOUCHED)
    patch.setattr(Overlay, "touched_of", lambda self, keys: set())


def follow_the_engine_alone(patch: Patch) -> None:
    patch.setattr(plain_puts, "_follow", lambda *_: True)


def follow_in_flight_by_the_engines_creation(patch: Patch) -> None:
    """Use the engine's `created` although an entry in flight has created, deleted or recreated the key."""

    def follow(created: list[int], keys: list[bytes], draft: Draft, overlay: Overlay) -> bool:
        touched = [overlay.find(key) for key in keys]
        return not any(row[4] for row in touched if isinstance(row, tuple))

    patch.setattr(plain_puts, "_follow", follow)


def leave_request_ids_out_of_a_snapshot(patch: Patch) -> None:
    begin = StateExport.__init__

    def without(self: StateExport, state: ReplicaState) -> None:
        begin(self, state)
        given = self._rows
        self._rows = (each for each in given if not each[0].startswith(rows.ALL_RETRY[0]))

    patch.setattr(StateExport, "__init__", without)


def take_each_key_for_another(patch: Patch) -> None:
    patch.setattr(plain_puts, "_are_new", lambda *_: True)


def forget_effectless_requests(patch: Patch) -> None:
    patch.setattr(Draft, "note", lambda self, key: 0)
    patch.setattr(Draft, "answer", lambda *_: None)


def call_a_key_absent_by_the_wall_clock(patch: Patch) -> None:
    answer = LeaderReads._answer

    def rash(self: LeaderReads, reads: list[Any], now_ms: int) -> None:
        self._state.record_time_ms, before = now_ms, self._state.record_time_ms
        answer(self, reads, now_ms)
        self._state.record_time_ms = before

    patch.setattr(LeaderReads, "_answer", rash)


def tell_lost_writes_as_not_done(patch: Patch) -> None:
    patch.setattr(
        "kvstore.partition.leading.leader.lost",
        lambda replies, partition: [(sink, token, StoreError("refused")) for sink, token, _ in replies],
    )


def go_on_after_the_lead_is_lost(patch: Patch) -> None:
    patch.setattr(Leader, "lose", lambda self, reason: None)


def number_control_records(patch: Patch) -> None:
    control = Evaluator.control

    def numbered(self: Evaluator, *args: Any) -> NextEntry:
        entry = control(self, *args)
        self._next_seq += 1
        return entry

    patch.setattr(Evaluator, "control", numbered)


def served(test: Callable[..., None], *more: Any) -> Callable[[], None]:
    return lambda: test(Partition().start(), *more)


def with_a_key(test: Callable[[Partition], None]) -> Callable[[], None]:
    def run() -> None:
        partition = Partition().start()
        partition.do(Put(b"a", b"1"))
        test(partition)

    return run


def with_two_keys(test: Callable[..., None], *more: Any) -> Callable[[], None]:
    def run() -> None:
        partition = Partition().start()
        partition.do(Put(b"a", b"1"), Put(b"n", b"5"))
        test(partition, *more)

    return run


def list_keys_that_are_past_their_expiry_as_if_they_were_there(patch: Patch) -> None:
    patch.setattr(range_reads, "_overdue_or_none", lambda state, now_ms: {})


def leave_keys_out_before_their_deletes_are_logged(patch: Patch) -> None:
    overdue = range_reads._overdue_or_none
    patch.setattr(range_reads, "_overdue_or_none", lambda state, now_ms: dict.fromkeys(overdue(state, now_ms) or {}, 0))


def listed_past_expiry() -> None:
    with Patch.context() as patch:
        partition = Partition().start()
        test_range_reads.test_expired_keys_are_deleted_before_keys_or_counts_omit_them(
            partition, patch, Flag.BARE, False
        )


def together() -> None:
    test_plain_puts.test_grouped_plain_puts_match_single_evaluation(0)


def asked_together(bounds: dict[str, int]) -> Callable[[], None]:
    test = test_new_requests.test_puts_with_request_ids_match_single_evaluation
    return lambda: test(0, bounds)


leader, reads, retries, expiry = test_leader, test_read_lease, test_leader_retries, test_leader_expiry
CAUGHT: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (list_keys_that_are_past_their_expiry_as_if_they_were_there, listed_past_expiry),
    (leave_keys_out_before_their_deletes_are_logged, listed_past_expiry),
    (apply_before_the_acknowledgement, with_a_key(reads.test_reads_see_only_acknowledged_entries)),
    (apply_before_the_acknowledgement, served(leader.test_unacknowledged_entry_is_not_applied)),
    (answer_before_it_is_applied, served(leader.test_answers_wait_until_the_entry_is_applied)),
    (
        answer_before_the_acknowledgement,
        served(leader.test_answers_wait_until_the_entry_is_applied),
    ),
    (
        count_the_lease_from_the_acknowledgement,
        with_a_key(reads.test_lease_ends_by_the_clock_of_the_send),
    ),
    (cache_the_verdict_on_the_lease, with_a_key(reads.test_lease_is_checked_for_each_read)),
    (use_a_proof_again, with_a_key(reads.test_proof_is_never_used_for_a_later_read)),
    (use_a_proof_again, with_a_key(reads.test_strict_read_waits_for_an_append_sent_after_it)),
    (renew_the_lease_after_the_release, reads.test_closed_lease_stays_closed),
    (read_on_until_the_release_is_acknowledged, served(leader.test_lease_is_gone_when_the_release_record_is_sent)),
    (
        retry_without_the_table,
        with_two_keys(retries.test_retry_gets_the_first_answer_and_changes_nothing, retries.OPS[6], True),
    ),
    (
        retry_without_what_is_in_flight,
        with_two_keys(retries.test_retry_gets_the_answer_of_an_attempt_in_flight, retries.OPS[6]),
    ),
    (
        retry_without_what_is_in_flight,
        with_two_keys(retries.test_late_duplicate_is_refused_while_acknowledgement_is_in_flight),
    ),
    (take_each_of_many_requests_for_new, asked_together({})),
    (count_none_of_many_requests, asked_together({"retry_results_max": 60})),
    (tell_a_failed_condition_at_once, served(leader.test_failed_condition_waits_for_the_entries_it_depends_on)),
    (tell_a_failed_condition_at_once, served(leader.test_failed_condition_on_a_lost_entry_is_not_reported)),
    (tell_a_failed_condition_without_a_lease, served(leader.test_failed_condition_needs_the_lease)),
    (tell_a_failed_condition_without_a_lease, with_two_keys(retries.test_retry_answer_needs_the_lease)),
    (
        decide_without_what_is_in_flight,
        served(leader.test_operations_see_earlier_ones_in_flight),
    ),
    (follow_the_engine_alone, together),
    (follow_in_flight_by_the_engines_creation, together),
    (leave_request_ids_out_of_a_snapshot, lambda: test_transfer.test_transfer_carries_request_ids(0)),
    (take_each_key_for_another, together),
    (
        forget_effectless_requests,
        with_two_keys(retries.test_retry_gets_the_first_answer_and_changes_nothing, retries.OPS[5], False),
    ),
    (
        call_a_key_absent_by_the_wall_clock,
        served(expiry.test_expired_key_is_absent_and_its_delete_is_logged_first),
    ),
    (
        call_a_key_absent_by_the_wall_clock,
        served(expiry.test_expired_key_stays_absent_at_a_leader_with_a_late_clock),
    ),
    (tell_lost_writes_as_not_done, served(leader.test_stop_answers_everything_and_notifies_nobody)),
    (go_on_after_the_lead_is_lost, served(leader.test_lost_log_ends_the_lead)),
    (number_control_records, served(leader.test_mutations_of_one_turn_share_an_entry)),
    (
        let_a_check_fail_by_itself,
        served(
            test_operations.test_batch_is_done_only_if_every_check_holds,
            Flag.INDEPENDENT,
            Check(b"a", Flag.IF_ABSENT),
            False,
        ),
    ),
]


@pytest.mark.parametrize(
    ("mutant", "sentence"), CAUGHT, ids=[f"{number}-{mutant.__name__}" for number, (mutant, _) in enumerate(CAUGHT)]
)
def test_broken_leader_is_detected(
    mutant: Callable[[Patch], None], sentence: Callable[[], None], monkeypatch: Patch
) -> None:
    sentence()
    mutant(monkeypatch)
    with pytest.raises((AssertionError, AttributeError, KeyError)):
        sentence()
