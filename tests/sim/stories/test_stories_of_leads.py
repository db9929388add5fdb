"""Leader changes in whole clusters: the successor knows what the former leader knew."""

from __future__ import annotations

import pytest

from tests.sim.stories.scenarios import knobs, play
from tests.sim.stories.stories_of_leads import (
    fenced_with_a_write_under_way,
    retry_after_a_snapshot,
    successor_lags_behind,
)

pytestmark = pytest.mark.sim


# docs/protocol.md P12, P16
@pytest.mark.parametrize("seed", range(1, 4))
def test_retry_is_applied_once_when_leader_was_copied_by_snapshot(seed: int) -> None:
    play(retry_after_a_snapshot, knobs(roll_entries=4, lead_back_s=100.0), seed)


# docs/protocol.md P26
@pytest.mark.parametrize("seed", range(1, 4))
def test_leadership_is_kept_when_successor_has_not_caught_up(seed: int) -> None:
    play(successor_lags_behind, knobs(lead_back_s=100.0), seed)


# docs/protocol.md P9
@pytest.mark.parametrize("seed", range(1, 4))
def test_write_has_unknown_outcome_when_its_leader_was_fenced(seed: int) -> None:
    play(fenced_with_a_write_under_way, knobs(lead_back_s=100.0), seed)
