"""Closes the event loops that tests/partition/one_partition.py has made."""

from collections.abc import Iterator

import pytest

from tests.partition import one_partition


@pytest.fixture(autouse=True)
def _partitions_end_with_their_test() -> Iterator[None]:
    yield
    while one_partition.MADE:
        one_partition.MADE.pop().loop.close()
