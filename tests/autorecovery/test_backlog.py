"""The marked ledgers that a worker takes next."""

from __future__ import annotations

from random import Random

from kvstore.autorecovery.backlog import AGAIN_PER_S, ROUND_MAX, Backlog
from kvstore.types import LedgerId

LEDGERS = [LedgerId(each) for each in range(400)]
LONG = 300.0


def drawn(backlog: Backlog, ledgers: list[LedgerId], now: float) -> list[LedgerId]:
    backlog.begin()
    for ledger in ledgers:
        backlog.see(ledger, now)
    return backlog.drawn()


def test_backlog_does_not_draw_early_or_hold_back_others() -> None:
    backlog = Backlog(Random(1))
    backlog.later(LEDGERS[0], 0.0, LONG)
    assert drawn(backlog, LEDGERS[:2], 10.0) == [LEDGERS[1]]
    assert backlog.marked == 2
    assert backlog.next_due_s(10.0, 1_000.0) == LONG - 10.0
    assert LEDGERS[0] in drawn(backlog, LEDGERS[:2], LONG)


def test_backlog_makes_few_ledgers_due_at_once_when_a_bookie_appears() -> None:
    backlog = Backlog(Random(1))
    for ledger in LEDGERS[:5]:
        backlog.later(ledger, 0.0, LONG)
    backlog.all_due()
    assert sorted(drawn(backlog, LEDGERS[:5], 1.0)) == LEDGERS[:5]


def test_backlog_shortens_the_delays_when_a_bookie_or_a_setting_changes() -> None:
    backlog = Backlog(Random(1))
    past = backlog.begun(LEDGERS[0])
    past.tries, past.refusals = 7, 2
    backlog.later(LEDGERS[0], 0.0, LONG)
    assert backlog.begun(LEDGERS[0]).tries == 7
    backlog.all_due()
    assert (backlog.begun(LEDGERS[0]).tries, past.refusals) == (0, 2)


def test_backlog_retries_soon_if_bookies_changed_during_an_attempt() -> None:
    backlog = Backlog(Random(1))
    backlog.begun(LEDGERS[0])
    backlog.all_due()
    backlog.later(LEDGERS[0], 0.0, LONG)
    assert backlog.next_due_s(1.0, 10.0) == 0.0
    assert drawn(backlog, LEDGERS[:1], 1.0) == LEDGERS[:1]


def test_backlog_limits_retries_however_often_bookies_change() -> None:
    """A flapping bookie would make the worker try all of them repeatedly."""
    backlog = Backlog(Random(1))
    tries, now = 0, 0.0
    for _ in range(600):
        for ledger in drawn(backlog, LEDGERS, now):
            tries += 1
            backlog.later(ledger, now, 5.0)
        backlog.all_due()
        now += 1.0
    assert 0.5 * AGAIN_PER_S * now < tries < 1.5 * AGAIN_PER_S * now


def test_backlog_draws_some_of_very_many() -> None:
    backlog = Backlog(Random(1))
    many = [LedgerId(each) for each in range(3 * ROUND_MAX)]
    found = drawn(backlog, many, 0.0)
    assert len(set(found)) == len(found) == ROUND_MAX
    assert backlog.has_more
    assert max(found) > 2 * ROUND_MAX, "not the first ones only"
