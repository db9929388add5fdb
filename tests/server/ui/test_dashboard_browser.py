"""The dashboard in Chromium, if it is installed: its script runs under the page's policy, and nothing is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.env.clock import SystemClock
from kvstore.server.ui.charts import CHARTS
from tests.browser import CHROMIUM, MISSING, UNTIL_DRAWN, tab_of
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
        assert stops[:2] == ["Skip to the content", "kvstore"]
        sections = [each for each in stops if each.startswith("section ")]
        assert sections == ["section hot", "section nodes", "section partitions", "section bookies"]
        assert stops[stops.index("section partitions") + 1 :][:2] == ["p1", "0"], "a partition's page and its ledgers"
        assert stops[-1] == "this node", "nothing holds the focus"


LEGEND = "document.querySelector('.u-legend').innerText.replace(/\\s+/g, ' ')"


async def test_charts_are_drawn_and_read_by_keys_under_the_policy(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, watcher, now = opened.made.report, opened.made.watcher, SystemClock().now()
    assert watcher is not None
    for number in range(3):
        report.partitions[0].lead.ops_per_s = 100.0 * number
        monkeypatch.setattr(SystemClock, "now", lambda _, number=number: now - 30 + 15 * number)
        watcher(report)
    async with tab_of("about:blank", tmp_path / "profile") as tab, asyncio.timeout(PATIENCE_S):
        await tab.open_until(f"{opened.url}/ui", ["all served"])
        await tab.evaluate(UNTIL_DRAWN)
        assert await tab.evaluate("document.querySelectorAll('.chart canvas').length") == len(CHARTS)
        assert "all300/s" in await tab.evaluate(LEGEND), "the newest values"
        await tab.evaluate("document.querySelector('.chart').focus()")
        for kind in ("rawKeyDown", "keyUp"):
            await tab.call("Input.dispatchKeyEvent", type=kind, key="Home", code="Home", windowsVirtualKeyCode=36)
        await tab.evaluate("new Promise(requestAnimationFrame)")
        assert "all100/s" in await tab.evaluate(LEGEND), "the oldest values"
        assert tab.complaints == []


WIDE_SECTIONS = "[...document.querySelectorAll('section')].filter(each => each.scrollWidth > each.clientWidth).length"


async def test_page_needs_no_sideways_scrolling_on_a_phone(opened: Opened, tmp_path: Path) -> None:
    async with tab_of("about:blank", tmp_path / "profile") as tab, asyncio.timeout(PATIENCE_S):
        await tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        for path in ("/partition?id=p1", "/bookie?id=n1-ab", "/users", "/slow", "/snapshots", ""):
            await tab.open_until(f"{opened.url}/ui{path}", ["kvstore"])
            if not path:
                await tab.evaluate(UNTIL_DRAWN)
            assert await tab.evaluate("document.documentElement.scrollWidth") == 390, path
            assert await tab.evaluate(WIDE_SECTIONS) == 0, path
