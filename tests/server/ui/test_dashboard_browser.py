"""The dashboard in Chromium, if it is installed: its script runs under the page's policy, and nothing is refused."""

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
FOCUSED = """(() => {
  const at = document.activeElement;
  if (at.tagName === "BODY") return "BODY";
  return at.tagName === "SECTION" ? "section " + at.getAttribute("aria-labelledby") : at.textContent.trim();
})()"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


async def test_page_is_updated_in_a_browser_under_its_policy(opened: Opened, tmp_path: Path) -> None:
    async with tab_of(f"{opened.url}/ui", tmp_path / "profile") as tab, asyncio.timeout(PATIENCE_S):
        await tab.call("Runtime.evaluate", expression=UNTIL_LIVE, awaitPromise=True)
        assert "all served" in await tab.text_of("health")
        assert tab.complaints == []


async def test_keyboard_skips_to_the_content_and_reaches_wide_tables(opened: Opened, tmp_path: Path) -> None:
    async with tab_of("about:blank", tmp_path / "profile") as tab, asyncio.timeout(PATIENCE_S):
        await tab.open_until(f"{opened.url}/ui", ["all served"])
        stops = []
        while not stops or stops[-1] not in ("BODY", "this node"):
            for kind in ("rawKeyDown", "keyUp"):
                await tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            stops.append(await tab.evaluate(FOCUSED))
        assert stops[:2] == ["Skip to the content", "Load"]
        sections = [each for each in stops if each.startswith("section ")]
        assert sections == ["section load", "section nodes", "section partitions", "section bookies"]
        assert stops.index("0") == stops.index("section partitions") + 1, "a partition's ledgers"
        assert stops[-1] == "this node", "nothing holds the focus"
