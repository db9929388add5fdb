"""Tests that cannot fail prove nothing: each way to break the auditor is caught by the test beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from kvstore.autorecovery import auditor, checks
from kvstore.autorecovery.absences import BookieAbsences
from kvstore.autorecovery.auditor import Auditor
from kvstore.autorecovery.auditor_role import AuditorRole
from kvstore.meta import paths
from kvstore.meta.auditor_votes import AuditorVotes
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.registration import RegistrationClient
from kvstore.types import BookieId, EntryId, LedgerMetadata
from tests.sim.recovering import test_checks, test_lost_bookies

pytestmark = pytest.mark.sim

Patch = pytest.MonkeyPatch


def count_a_bookie_as_lost_at_once(patch: Patch) -> None:
    lost = BookieAbsences.lost
    patch.setattr(BookieAbsences, "lost", lambda self, delay_s, now: lost(self, 0, now))


def count_two_as_lost_at_once(patch: Patch) -> None:
    lost = BookieAbsences.lost
    patch.setattr(
        BookieAbsences, "lost", lambda self, delay_s, now: lost(self, delay_s if len(self._since) < 2 else 0, now)
    )


def go_on_counting_when_a_bookie_comes_back(patch: Patch) -> None:
    def seen(self: BookieAbsences, known: Collection[BookieId], present: Collection[BookieId], now: float) -> None:
        self._since |= {bookie: now for bookie in known if bookie not in present and bookie not in self._since}
        self._is_anybody_there = True

    patch.setattr(BookieAbsences, "seen", seen)


def never_forget_who_was_away(patch: Patch) -> None:
    patch.setattr(BookieAbsences, "forget", lambda self: None)


def miss_the_read_only_ones(patch: Patch) -> None:
    async def names(self: RegistrationClient) -> frozenset[BookieId]:
        return frozenset(map(BookieId, await self._store.children(paths.AVAILABLE)))

    patch.setattr(RegistrationClient, "names", names)


def know_only_those_that_were_seen_alive(patch: Patch) -> None:
    async def bookies(self: CookieStore) -> list[BookieId]:
        return []

    patch.setattr(CookieStore, "bookies", bookies)
    patch.setattr(auditor, "bookies_of", lambda metadata: [])


def audit_whatever_the_switch_says(patch: Patch) -> None:
    async def is_enabled(self: object) -> bool:
        return True

    patch.setattr(auditor.RecoverySettings, "is_enabled", is_enabled)


def act_without_the_role(patch: Patch) -> None:
    async def is_elected(self: Auditor) -> bool:
        await self._role.votes.stand()
        return True

    patch.setattr(Auditor, "_is_elected", is_elected)
    patch.setattr(AuditorRole, "may_act", property(lambda self: True))
    patch.setattr(AuditorVotes, "is_auditor", property(lambda self: True))


def check_what_a_writer_has_under_way(patch: Patch) -> None:
    def last(metadata: LedgerMetadata) -> EntryId:
        return EntryId(max(metadata.last_entry, metadata.fragments[-1].first))

    patch.setattr(checks, "last_to_check", last)


def check_without_a_pause(patch: Patch) -> None:
    patch.setattr(checks, "is_due", lambda *_: True)


lost = test_lost_bookies
CAUGHT: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (count_a_bookie_as_lost_at_once, lost.test_bookie_that_returns_in_time_has_nothing_marked),
    (count_a_bookie_as_lost_at_once, lost.test_restarting_all_bookies_one_by_one_marks_nothing),
    (count_two_as_lost_at_once, lost.test_two_absent_bookies_wait_as_long_as_one),
    (count_two_as_lost_at_once, lost.test_restarting_all_bookies_one_by_one_marks_nothing),
    (go_on_counting_when_a_bookie_comes_back, lost.test_bookie_that_returns_in_time_has_nothing_marked),
    (go_on_counting_when_a_bookie_comes_back, lost.test_nothing_is_marked_while_no_bookie_is_registered),
    (never_forget_who_was_away, lost.test_time_that_auditor_could_not_observe_does_not_count),
    (miss_the_read_only_ones, lost.test_read_only_bookie_counts_as_present),
    (
        know_only_those_that_were_seen_alive,
        lambda: lost.test_auditor_started_after_death_knows_of_dead_bookie(True),
    ),
    (
        audit_whatever_the_switch_says,
        lost.test_nothing_is_marked_while_autorecovery_is_off_nor_when_it_resumes,
    ),
    (act_without_the_role, lost.test_auditor_stops_marking_when_its_session_ends),
    (check_what_a_writer_has_under_way, test_checks.test_check_ignores_entries_that_writer_may_have_in_flight),
    (check_without_a_pause, test_checks.test_next_check_marks_ledger_with_copy_missing_in_its_middle),
]


@pytest.mark.parametrize(
    ("mutant", "sentence"), CAUGHT, ids=[f"{number}-{mutant.__name__}" for number, (mutant, _) in enumerate(CAUGHT)]
)
def test_broken_auditor_is_noticed(
    mutant: Callable[[Patch], None], sentence: Callable[[], None], monkeypatch: Patch
) -> None:
    sentence()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        sentence()
