"""The dashboard in Chromium, where there is one: its script runs under the page's policy, and nothing is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, MISSING, tab_of
from tests.server.ui.test_dashboard import Opened, opened
from tests.waiting import PATIENCE_S

__all__ = ["opened"]

UNTIL_LIVE = """new Promise(live => {
  const look = () => {
    const link = document.getElementById("link");
    if (link && link.textContent === "live") live(true); else setTimeout(look, 20);
  };
  look();
})"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


async def test_in_a_browser_the_page_is_kept_fresh_and_its_policy_refuses_nothing(
    opened: Opened, tmp_path: Path
) -> None:
    async with tab_of(f"{opened.url}/ui", tmp_path / "profile") as tab, asyncio.timeout(PATIENCE_S):
        await tab.call("Runtime.evaluate", expression=UNTIL_LIVE, awaitPromise=True)
        assert "all is served" in await tab.text_of("health")
        assert tab.complaints == []
