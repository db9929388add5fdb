"""Skips the tests where Pulsar's jars are not installed; with KVSTORE_INTEROP=1 it fails them there."""

from __future__ import annotations

import os

import pytest

from tests.interop import java


@pytest.fixture(autouse=True)
def _jars() -> None:
    if java.has_pulsar():
        return
    missing = f"no Java, or no jars of Pulsar {java.PULSAR} in {java.PULSAR_JARS.relative_to(java.ROOT)}: make interop"
    if os.environ.get("KVSTORE_INTEROP") == "1":
        pytest.fail(missing)
    pytest.skip(missing)
