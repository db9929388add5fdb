"""The cases notice each breakage of the repair of marked ledgers."""

import pytest

from tests.sim.breakages.mutants_repair import MUTANTS, caught_by

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.mark.parametrize("name", MUTANTS)
def test_breakage_is_noticed(name: str) -> None:
    assert caught_by(name) is not None
