"""Each mutant of a namespace is caught by the test beside it: tests that cannot fail prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvstore.namespaces import book, rates
from kvstore.namespaces.book import Book, UsageReport
from kvstore.namespaces.meter import Meter
from kvstore.partition.leading.evaluate import Evaluator
from kvstore.partition.leading.usage import Usage
from tests.namespaces import test_book, test_rates
from tests.partition.leading import test_usage

Patch = pytest.MonkeyPatch


def let_writes_of_a_namespace_take_the_short_way(patch: Patch) -> None:
    patch.setattr(Evaluator, "_prefixes", property(lambda self: (), lambda self, value: None), raising=False)


def refuse_what_makes_nothing_more(patch: Patch) -> None:
    check = Meter._check
    patch.setattr(Meter, "_check", lambda self, space, keys, more, **how: check(self, space, max(1, keys), more, **how))


def judge_a_batch_write_by_write(patch: Patch) -> None:
    begin = Meter.begin
    patch.setattr(Meter, "begin", lambda self, *, is_atomic: begin(self, is_atomic=False))


def keep_what_an_undone_batch_has_added(patch: Patch) -> None:
    patch.setattr(Meter, "undo", lambda self, mark: None)


def count_what_comes_behind_the_cursor_only_once_it_is_there(patch: Patch) -> None:
    admit = Usage.admit

    def forgetful(self: Usage, meter: Meter) -> None:
        counting, self._counting = self._counting, None
        admit(self, meter)
        self._counting = counting

    patch.setattr(Usage, "admit", forgetful)


def count_without_what_is_in_flight(patch: Patch) -> None:
    count = Usage._count

    def without(self: Usage, counting: Any, start: bytes, end: bytes) -> None:
        overlay, self._overlay = self._overlay, type(self._overlay)()
        count(self, counting, start, end)
        self._overlay = overlay

    patch.setattr(Usage, "_count", without)


def go_by_nothing_until_it_is_counted(patch: Patch) -> None:
    lead = Book.lead

    def blank(self: Book, partition: Any, own: Any) -> Any:
        lead(self, partition, own)
        return {}

    patch.setattr(Book, "lead", blank)


def believe_whoever_spoke_last(patch: Patch) -> None:
    def hear(self: Book, reports: Iterable[UsageReport], marks: Any = None) -> None:
        self.reported |= {report.partition: report for report in reports}
        self._elsewhere = None

    patch.setattr(Book, "take_reports", hear)


def forget_a_lead_that_has_ended(patch: Patch) -> None:
    patch.setattr(Book, "leave", lambda self, partition, own: self.led.pop(partition, None))


def take_a_name_for_the_keys_that_it_was_before(patch: Patch) -> None:
    patch.setattr(Book, "_forget", lambda self, names: None)


def believe_counts_of_other_keys(patch: Patch) -> None:
    hear = Book.take_reports
    patch.setattr(Book, "take_reports", lambda self, reports, marks=None: hear(self, reports))


def let_deletes_of_what_is_not_counted_make_room(patch: Patch) -> None:
    patch.setattr(book, "max", lambda _, number: number, raising=False)


def go_by_what_is_led_here_alone(patch: Patch) -> None:
    patch.setattr(Book, "take_reports", lambda self, reports, marks=None: None)


def give_no_default_ttl(patch: Patch) -> None:
    patch.setattr(Meter, "expiry_ms", lambda self, key, now_ms: 0)


def give_each_server_the_whole_rate(patch: Patch) -> None:
    patch.setattr(rates, "share_of", lambda rate, own, others: rate)


def take_from_the_bucket_what_is_refused(patch: Patch) -> None:
    wait_s = rates.Bucket.wait_s

    def eager(self: rates.Bucket, operations: int, now: float) -> float:
        found = wait_s(self, operations, now)
        if found:
            self.take(operations)
        return found

    patch.setattr(rates.Bucket, "wait_s", eager)


MUTANTS: dict[Callable[[Patch], None], Callable[[Patch], Any]] = {
    let_writes_of_a_namespace_take_the_short_way: lambda patch: (
        test_usage.test_write_above_the_key_quota_is_refused_with_numbers()
    ),
    refuse_what_makes_nothing_more: lambda patch: test_usage.test_usage_above_a_lowered_quota_stays_and_can_shrink(),
    judge_a_batch_write_by_write: lambda patch: test_usage.test_batch_is_judged_by_its_total(),
    keep_what_an_undone_batch_has_added: lambda patch: test_usage.test_undone_batch_does_not_count(),
    count_what_comes_behind_the_cursor_only_once_it_is_there: lambda patch: _some_seeds(patch),
    count_without_what_is_in_flight: lambda patch: _some_seeds(patch),
    go_by_nothing_until_it_is_counted: lambda patch: (
        test_usage.test_new_leader_uses_the_known_count_until_it_has_counted()
    ),
    believe_whoever_spoke_last: lambda patch: test_book.test_report_of_former_leader_does_not_replace_successors(),
    forget_a_lead_that_has_ended: lambda patch: test_book.test_usage_stays_until_successor_reports(),
    take_a_name_for_the_keys_that_it_was_before: lambda patch: (
        test_book.test_reused_name_with_another_prefix_starts_empty()
    ),
    believe_counts_of_other_keys: lambda patch: test_book.test_reused_name_with_another_prefix_starts_empty(),
    let_deletes_of_what_is_not_counted_make_room: lambda patch: (
        test_book.test_negative_usage_frees_no_quota_for_others()
    ),
    go_by_what_is_led_here_alone: lambda patch: test_usage.test_usage_at_other_leaders_counts(),
    give_no_default_ttl: lambda patch: test_usage.test_write_without_ttl_gets_that_of_its_namespace(),
    give_each_server_the_whole_rate: lambda patch: test_rates.test_all_servers_together_pass_the_rate_after_exchange(),
    take_from_the_bucket_what_is_refused: lambda patch: test_rates.test_refused_operation_takes_no_tokens(),
}
"""A change that breaks the code, and the test that fails because of it."""


def _some_seeds(patch: Patch) -> None:
    for seed in range(10):
        test_usage.test_count_equals_the_state_despite_concurrent_writes(seed, patch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_namespace_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        MUTANTS[mutant](monkeypatch)
