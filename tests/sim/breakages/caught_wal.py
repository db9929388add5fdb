"""The cases and seeds that notice a breakage of the ledger client and the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature

import pytest

from tests.sim.breakages.fit import notice_of
from tests.sim.breakages.mutants_wal import broken
from tests.sim.damaged import test_set_back
from tests.sim.ledgers_and_logs import (
    test_batches,
    test_flipped_bits,
    test_forgotten,
    test_ledger,
    test_log,
    test_recovery_cases,
    test_roll_cases,
    test_tail_cases,
    test_takeover_cases,
    test_trim_cases,
    test_writer_cases,
)
from tests.wal import test_new_ids

CASES = (
    test_writer_cases,
    test_recovery_cases,
    test_takeover_cases,
    test_roll_cases,
    test_tail_cases,
    test_trim_cases,
    test_flipped_bits,
    test_forgotten,
    test_set_back,
    test_batches,
    test_new_ids,
)
EVERY_COPY = "test_check_of_every_copy_finds_each_missing_or_damaged_one"
FIRST = {
    "a tail believes a number without a digest": ("test_tail_rejects_last_add_confirmed_without_valid_digest"),
    "a leader goes on without its anchors": "test_lagging_server_ends_no_leadership",
    "a server that lags ends a lead": "test_lagging_server_ends_no_leadership",
    "the packets of a batch are taken by their places": EVERY_COPY,
    "the packets of a batch are not checked": EVERY_COPY,
    "a check takes what a batch lacks for good": EVERY_COPY,
    "a recovery takes what a batch lacks for absent": "test_recovery_reads_alone_what_no_batch_returns",
    "leads a log that ends before the state here": ("test_log_that_ends_before_state_is_not_led_and_stays_unchanged"),
    "leads a log that ends before another replica's state": (
        "test_log_that_ends_before_state_of_another_replica_is_not_led"
    ),
    "goes on in a list that does not have what was read": "test_tail_stops_when_list_lacks_what_it_has_read",
    "takes a list that has changed meanwhile for an older one": (
        "test_replica_ahead_under_another_leader_is_no_sign_of_older_copy"
    ),
    "takes a log over in an older copy of the metadata": ("test_older_copy_marked_by_bookie_is_not_used"),
    "takes a ledger id without asking the bookies": "test_late_answer_counts_for_the_next_id",
    "takes a ledger id before it asks the bookies": "test_concurrent_creators_take_no_id_for_an_old_one",
    "forgets the ledger ids that it has seen in lists": "test_new_ids_remember_ids_seen_in_lists",
    "goes on giving ids in an older copy": "test_leader_that_rolls_to_an_old_id_ends_and_keeps_its_entries",
    "takes another ledger id where one was given again": (
        "test_new_id_that_one_bookie_has_seen_is_refused_and_the_store_marked"
    ),
    "waits for every bookie before it takes a ledger id": (
        "test_silent_bookie_delays_an_id_by_a_quarter_second_at_most"
    ),
    "two processes of a machine get copies of an entry": "test_processes_of_one_machine_get_one_copy_of_an_entry",
    "takes a ledger id without an ack quorum of answers": "test_new_id_needs_an_ack_quorum_of_answers",
    "a recovery chooses between two payloads": "test_recovery_does_not_choose_between_two_payloads_of_an_entry",
    "a listed successor counts as the end of a ledger": "test_log seed 1",
}
"""The case or seed that last noticed a breakage for which much is played otherwise. It is played first."""


def caught_by(name: str, seeds: range) -> str | None:
    """Return the first case or seed that fails with the breakage, and its failure, or None. Raises AssertionError if
    the breakage does not fit the code."""
    with broken(name):
        for label, play in sorted([*_cases(), *_seeds(seeds)], key=lambda each: each[0] != FIRST.get(name)):
            try:
                play()
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - however it is noticed
                return f"{label}: {notice_of(name, error)}"
    return None


def _cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases without arguments, sorted."""
    for module in CASES:
        for name, case in sorted(vars(module).items()):
            if name.startswith("test_") and not signature(case).parameters:
                yield name, case


def _seeds(seeds: range) -> Iterator[tuple[str, Callable[[], object]]]:
    for seed in seeds:
        for suite in (test_ledger, test_log):
            yield f"{suite.__name__.rpartition('.')[2]} seed {seed}", partial(suite.run_seed, seed)
