"""Collects what kazoo leaves behind in the test that left it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Limit the collections below to objects of their own tests: scanning everything that a run of tests keeps took one
    to two seconds for each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected_sockets() -> Iterator[None]:
    """Kazoo does not close a socket whose connecting fails. Left to the garbage collector, it would fail whichever test
    runs then."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
