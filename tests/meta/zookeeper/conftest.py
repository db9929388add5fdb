"""What kazoo leaves behind is collected where it was left."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Let the collections below look only at objects of their own tests: to look through all that a run of tests keeps
    took one to two seconds for each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected_sockets() -> Iterator[None]:
    """Kazoo closes no socket whose connecting fails. Left to the collector these would fail whichever test of ours runs
    when it comes."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
