"""The suites notice each breakage of the ledger client and the log."""

import pytest

from tests.sim.breakages.caught_wal import caught_by
from tests.sim.breakages.mutants_wal import MUTANTS

SEEDS = range(40)

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.mark.parametrize("name", MUTANTS)
def test_breakage_is_noticed(name: str) -> None:
    assert caught_by(name, SEEDS) is not None
