"""Skips the tests if Apache's jars are not installed; with KVSTORE_INTEROP=1, the tests fail instead."""

from __future__ import annotations

import os

import pytest

from tests.interop import java


@pytest.fixture(autouse=True)
def _jars() -> None:
    if java.is_installed():
        return
    missing = f"no Java, or no jars of BookKeeper {java.VERSION} in {java.JARS.relative_to(java.ROOT)}: make interop"
    if os.environ.get("KVSTORE_INTEROP") == "1":
        pytest.fail(missing)
    pytest.skip(missing)
