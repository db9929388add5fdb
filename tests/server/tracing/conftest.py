"""What tests of traces share."""

from __future__ import annotations

import pytest

from kvstore.server.tracing import export
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop sends all that is queued, also where the thread that does it has to wait for a processor."""
    monkeypatch.setattr(export, "CLOSE_S", PATIENCE_S)
