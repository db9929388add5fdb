"""Deliberate breakages of a move. The checks of the simulation must notice each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.partition.leading import serving_ranges
from kvstore.partition.moves import import_driver, pages
from kvstore.partition.state import ownership, state
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.effects import bounds, remove
from kvstore.partition.state.move_records import Freeze, Own
from tests.sim.moving.moves import Users, World, play
from tests.sim.moving.moves_accidents import same_again
from tests.sim.moving.test_moves import COUNTERS, KEYS, SPAN, TWO

pytestmark = [pytest.mark.sim, pytest.mark.slow]

Break = Callable[[pytest.MonkeyPatch], None]


async def there_and_back(world: World, users: Users) -> None:
    for target in ("p2", "p1"):
        async with same_again(world):
            await world.shift(SPAN, target)
            await world.moved(30.0)


def delete_before_own(patch: pytest.MonkeyPatch) -> None:
    """The source removes the rows when it freezes them, and the target may still need them."""
    whole = state.apply_record

    def apply(engine: Any, batch: Any, before: Any, record: Any, changed: Any, seq: int) -> Any:
        if isinstance(record, Freeze):
            remove(engine, batch, *bounds(record.span))
        return whole(engine, batch, before, record, changed, seq)

    patch.setattr(state, "apply_record", apply)


def release_without_freeze(patch: pytest.MonkeyPatch) -> None:
    """Writes continue after FREEZE, and are not counted."""
    _trust_the_copy(patch)
    patch.setattr(ownership.Ownership, "writable", property(lambda self: self.owned))
    recompute = serving_ranges.ServingRanges._recompute

    def recomputed(self: serving_ranges.ServingRanges) -> None:
        recompute(self)
        self.writable, self.is_freezing = self.readable, False

    patch.setattr(serving_ranges.ServingRanges, "_recompute", recomputed)


def retry_table_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Rows move, but results do not."""
    patch.setattr(pages.PickedRequests, "requests", property(lambda self: None))


def deletes_dropped_by_the_filter(patch: pytest.MonkeyPatch) -> None:
    """Keys deleted during the copy come back."""
    patch.setattr(pages.RangeChanges, "rows", property(lambda self: [each for each in self._rows.values() if each]))
    patch.setattr(pages.RangeChanges, "keys", property(lambda self: [key for key, row in self._rows.items() if row]))


def ring_flip_without_release(patch: pytest.MonkeyPatch) -> None:
    """The target owns the range because it has everything; the source was never asked."""

    async def ask(self: Any, leader: Any, move: Any) -> None:
        end = self._import().end
        await leader.append_record(Own(self.move, end.freeze, end.freeze, 0, 0))

    patch.setattr(import_driver.ImportDriver, "_ask", ask)


def _trust_the_copy(patch: pytest.MonkeyPatch) -> None:
    """Disable the hash check. Otherwise it alone would notice."""
    patch.setattr(RangeDigest, "_add", lambda self, key, row, sign: setattr(self, "count", 0))


BREAKAGES = [
    delete_before_own,
    release_without_freeze,
    retry_table_left_behind,
    deletes_dropped_by_the_filter,
    ring_flip_without_release,
]


def test_unbroken_moves_pass() -> None:
    play(11, there_and_back, TWO, keys=KEYS, counters=COUNTERS)


@pytest.mark.parametrize("broken", BREAKAGES, ids=lambda each: each.__name__)
def test_breakage_is_noticed(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    for seed in range(11, 31):  # a read must arrive while a range is briefly frozen
        try:
            play(seed, there_and_back, TWO, keys=KEYS, counters=COUNTERS)
        except AssertionError:
            return
    pytest.fail(f"nobody has noticed: {broken.__doc__}")
