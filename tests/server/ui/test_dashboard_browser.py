"""The dashboard in Chromium, if it is installed: its script runs under the page's policy, and nothing is refused."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import expect

from kvstore.env.clock import SystemClock
from kvstore.server.ui.charts import CHARTS
from tests.browser import CHROMIUM, LEGEND, MISSING, tab_of
from tests.server.ui.test_dashboard import Opened, opened
from tests.waiting import PATIENCE_S

__all__ = ["opened"]

FOCUSED = """(() => {
  const at = document.activeElement;
  if (at.tagName === "BODY") return "BODY";
  return at.tagName === "SECTION" ? "section " + at.getAttribute("aria-labelledby") : at.textContent.trim();
})()"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


async def test_page_is_updated_in_a_browser_under_its_policy(opened: Opened) -> None:
    async with tab_of(f"{opened.url}/ui") as tab:
        await expect(tab.page.locator("#link")).to_have_text("live", timeout=PATIENCE_S * 1000)
        assert "all served" in await tab.page.inner_text("#health")
        assert tab.complaints == []


async def test_keyboard_skips_to_the_content_and_reaches_wide_tables(opened: Opened) -> None:
    async with tab_of() as tab, asyncio.timeout(PATIENCE_S):
        await tab.open_until(f"{opened.url}/ui", ["all served"])
        stops: list[str] = []
        while not stops or stops[-1] not in ("BODY", "this node"):
            await tab.page.keyboard.press("Tab")
            stops.append(await tab.page.evaluate(FOCUSED))
        assert stops[:2] == ["Skip to the content", "kvstore"]
        sections = [each for each in stops if each.startswith("section ")]
        assert sections == ["section nodes", "section hot", "section partitions", "section bookies"]
        assert stops[stops.index("section partitions") + 1 :][:3] == ["p1", "n1", "0"], (
            "a partition, its leader and its ledgers"
        )
        assert stops[-1] == "this node", "nothing holds the focus"


async def test_charts_are_drawn_and_read_by_keys_under_the_policy(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, watcher, now = opened.made.report, opened.made.watcher, SystemClock().now()
    assert watcher is not None
    for number in range(3):
        report.partitions[0].lead.ops_per_s = 100.0 * number
        monkeypatch.setattr(SystemClock, "now", lambda _, number=number: now - 30 + 15 * number)
        watcher(report)
    async with tab_of() as tab:
        await tab.open_until(f"{opened.url}/ui", ["all served"])
        legend = tab.page.locator(LEGEND).first
        await expect(legend).to_contain_text("300/s", timeout=PATIENCE_S * 1000)  # the newest value
        assert await tab.page.locator(".chart canvas").count() == len(CHARTS)
        await tab.page.locator(".chart").first.press("Home")
        await expect(legend).to_contain_text("100/s", timeout=PATIENCE_S * 1000)  # the oldest value
        assert tab.complaints == []


CELLS = """[...document.querySelectorAll("#partitions ~ table tbody tr")].map(row => row.cells[PLACE].textContent)"""


async def test_long_table_is_sorted_by_its_headings(opened: Opened) -> None:
    report = opened.made.report
    for number in range(3, 13):
        report.partitions.add(id=f"p{number}", state="serving", leader="n1", served=True, keys=1000 * number)
    report.partitions[0].keys, report.partitions[1].keys = 5, 900
    async with tab_of(f"{opened.url}/ui") as tab:
        heading = tab.page.locator("#partitions ~ table th", has_text="keys").last
        await heading.get_by_role("button").press("Enter")
        assert await heading.get_attribute("aria-sort") == "descending"
        found = await tab.page.evaluate(CELLS.replace("PLACE", "0"))
        assert found == [*(f"p{number}" for number in range(12, 2, -1)), "p2", "p1"]
        await tab.page.locator("#partitions ~ table th button", has_text="partition").click()
        assert await heading.get_attribute("aria-sort") is None
        assert (await tab.page.evaluate(CELLS.replace("PLACE", "0")))[:3] == ["p1", "p2", "p3"], "p10 comes later"
        assert await tab.page.locator("#nodes ~ table button").count() == 0, "a short table needs no order"
        assert tab.complaints == []


WIDE_SECTIONS = "[...document.querySelectorAll('section')].filter(each => each.scrollWidth > each.clientWidth).length"


async def test_page_needs_no_sideways_scrolling_on_a_phone(opened: Opened) -> None:
    async with tab_of(viewport={"width": 390, "height": 800}, is_mobile=True) as tab:
        for path in ("/partition?id=p1", "/bookie?id=n1-ab", "/users", "/slow", "/snapshots", ""):
            await tab.open_until(f"{opened.url}/ui{path}", ["kvstore"])
            if not path:
                await tab.page.wait_for_selector(LEGEND)
            assert await tab.page.evaluate("document.documentElement.scrollWidth") == 390, path
            assert await tab.page.evaluate(WIDE_SECTIONS) == 0, path
