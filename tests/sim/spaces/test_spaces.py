"""Namespaces in whole clusters under faults: leaders count what their engines have, and admit nothing above a quota
by all that they can know (docs/protocol.md, N1 to N3). A quarter of the seeds of test_cluster.py have them too."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvstore.namespaces import Book
from kvstore.namespaces.book import add
from kvstore.partition.leading.usage import Usage
from kvstore.server.namespaces.keeper import Keeper
from tests.sim.cluster import RuleBroken
from tests.sim.judges import probes
from tests.sim.run import run
from tests.sim.spaces.tenants import drawn
from tests.sim.strikes.knobs import Knobs, hinted

pytestmark = pytest.mark.sim

Patch = pytest.MonkeyPatch
FAULTS = ("kill_leader", "hand_over", "pause", "cut_a_link")
SEEDS = range(4)


def knobs(seed: int) -> Knobs:
    hints = {"spaces": drawn(Random(f"{seed}/spaces")), "partitions": 3, "pace_s": 0.7, "search": False}
    return hinted(seed, FAULTS, hints)


def play() -> None:
    for seed in SEEDS:
        run(seed, knobs(seed))


def test_leaders_count_usage_and_keep_to_quotas_whatever_strikes() -> None:
    before = dict(probes.hits)
    play()
    for name in ("tenant.counted", "tenant.judged", "tenant.quota", "tenant.rate"):
        assert probes.hits[name] > before.get(name, 0), name


def look_at_leads_while_they_begin(patch: Patch) -> None:
    """A keeper that drops leaders that do not serve yet: their own writes then count for nothing."""
    look = Keeper.poll

    def eager(self: Keeper) -> None:
        look(self)
        for partition, own in list(self.book.led.items()):
            if not own.is_counted:
                self.book.leave(partition, own)

    patch.setattr(Keeper, "poll", eager)


def count_no_appends(patch: Patch) -> None:
    """Behave as a leader that does not know every record that it replaces."""
    admit = Usage.admit

    def forgetful(self: Usage, meter: Any) -> None:
        admit(self, meter)
        for _, namespace, keys, more in meter.steps:
            if not keys and more > 0:
                add(self.amounts, namespace.name, 0, -more)

    patch.setattr(Usage, "admit", forgetful)


def never_forget_a_report(patch: Patch) -> None:
    """Take a report of another server once, and never again."""
    hear = Book.take_reports

    def once(self: Book, reports: Any, marks: Any = None) -> None:
        hear(self, [each for each in reports if each.partition not in self.reported], marks)

    patch.setattr(Book, "take_reports", once)


@pytest.mark.parametrize("mutant", [look_at_leads_while_they_begin, count_no_appends, never_forget_a_report])
def test_broken_count_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((RuleBroken, AssertionError), match="N1"):
        play()
