"""Locks in simulated clusters: never held twice, whatever process is paused or killed (docs/protocol.md, Q1 to Q5)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvstore.client.coordination import lease as leases
from kvstore.client.coordination import locking
from kvstore.client.coordination.lease import GRACE_S, SessionLease
from kvstore.client.coordination.steps import FindStep, Recipe, WriteStep
from tests.sim.cluster import RuleBroken
from tests.sim.coordination.contests import play, play_dates_apart
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

QUIET = Knobs(faults=("hand_over",), pace_s=10.0)
STRUCK = Knobs(faults=("kill_leader", "kill_leader", "pause", "hand_over", "cut_a_link"), pace_s=2.0)
JUMPING = Knobs(faults=("clock_jumps", "kill_leader", "hand_over"), pace_s=1.5)
MOST_JUMP = Knobs(faults=("clocks_of_a_majority", "clocks_of_a_majority", "kill_leader", "hand_over"), pace_s=1.5)


def played(seeds: Iterable[int], knobs: Knobs, **options: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += play(seed, knobs, **options)
    return total


@pytest.mark.parametrize(
    ("knobs", "options"),
    [(STRUCK, {}), (STRUCK, {"shared": 0.6}), (JUMPING, {"grace_s": GRACE_S}), (MOST_JUMP, {"grace_s": GRACE_S})],
    ids=("leaders die", "readers and writers", "a clock jumps", "clocks of a majority jump"),
)
def test_lock_is_never_held_twice(knobs: Knobs, options: dict[str, Any], seed: int) -> None:
    counts = played(range(seed, seed + 2), knobs, **options)
    assert counts["held"] > 10, counts
    assert counts["stopped"] > 5, counts
    assert counts["SessionEnded"] + counts["killed"] > 3, counts


def counts_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """Q2."""
    wrote = SessionLease.wrote

    def late(self: SessionLease, write: Any, batch: Any, results: Any, sent: float) -> Any:
        return wrote(self, write, batch, results, asyncio.get_running_loop().time())

    patch.setattr(SessionLease, "wrote", late)


def trusts_what_it_was_told(patch: pytest.MonkeyPatch) -> None:
    """Q2: a holder that does not check the clock."""
    patch.setattr(SessionLease, "holds", lambda self, key, now: key in self.keys)


def asks_for_names_in_order(patch: pytest.MonkeyPatch) -> None:
    """Q4: the order of keys is not the order of their creation."""

    def by_name(line: Any, key: bytes, mode: bytes) -> bytes | None:
        before = [other for other in line if other < key]
        return max(before) if before else None

    patch.setattr(locking, "in_front", by_name)


def trusts_the_end_of_the_one_in_front(patch: pytest.MonkeyPatch) -> None:
    """Q4: a waiter may end before the holder."""
    acquire = locking.acquire

    def hasty(lease: SessionLease, prefix: bytes, *more: Any) -> Recipe[Any]:
        recipe = acquire(lease, prefix, *more)
        answer: Any = None
        looked = False
        try:
            step = next(recipe)
            while True:
                if isinstance(step, WriteStep):
                    answer = yield step
                    key = next(iter(step.puts))
                elif isinstance(step, FindStep) and step.prefix == prefix:
                    answer = yield step
                    answer = {key: answer[key]} if looked else answer
                    looked = True
                else:
                    answer = yield step
                step = recipe.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            recipe.close()

    patch.setattr(locking, "acquire", hasty)


def trusts_any_release(patch: pytest.MonkeyPatch) -> None:
    """Q4: a release reported by another holder is not a release by the predecessor in the queue."""
    patch.setattr(locking, "has_released", lambda turn, token: bool(turn))


@pytest.mark.parametrize(
    ("breaks", "knobs"),
    [
        (counts_from_the_answer, QUIET),
        (trusts_what_it_was_told, QUIET),
        (asks_for_names_in_order, QUIET),
        (trusts_the_end_of_the_one_in_front, QUIET),
        (trusts_any_release, QUIET),
    ],
)
def test_lock_is_held_twice_without_this_rule(
    breaks: Callable[[pytest.MonkeyPatch], None], knobs: Knobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(RuleBroken, match=r"Q[45]"):
        played((0, 21, *range(30)), knobs)  # in 0 or in 21 each of them was noticed


def test_lock_outlives_leader_whose_date_was_earlier(seed: int) -> None:
    for each in range(seed, seed + 2):
        assert play_dates_apart(each)["held"] == 2


def has_no_grace(patch: pytest.MonkeyPatch) -> None:
    """Q3: keys expire as soon as the owner's time is over, and before that by another leader's date."""
    init = SessionLease.__post_init__

    def none(self: SessionLease) -> None:
        init(self)
        self.grace_s = 0.0

    patch.setattr(leases.SessionLease, "__post_init__", none)


def test_lock_is_held_twice_without_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    has_no_grace(monkeypatch)

    def play_some() -> None:
        for seed in range(8):  # most of them show it
            play_dates_apart(seed)

    with pytest.raises(RuleBroken, match="Q4"):
        play_some()
