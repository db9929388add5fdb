"""Closes what tests/partition/leading.py has made."""

from collections.abc import Iterator

import pytest

from tests.partition import leading


@pytest.fixture(autouse=True)
def _partitions_end_with_their_test() -> Iterator[None]:
    yield
    while leading.MADE:
        leading.MADE.pop().loop.close()
