"""The ways to break the bookie fit the code that they break."""

from __future__ import annotations

import pytest

from tests.bookie.breakages.registry import broken
from tests.bookie.mutants import MUTANTS


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_each_breakage_finds_what_it_breaks(name: str) -> None:
    with broken(name):
        pass
