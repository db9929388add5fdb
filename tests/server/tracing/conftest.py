"""Fixtures for tests of traces."""

from __future__ import annotations

import pytest

from kvstore.server.tracing import export
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer at a stop, which sends all queued spans, because its thread may have to wait for a processor."""
    monkeypatch.setattr(export, "CLOSE_S", PATIENCE_S)
