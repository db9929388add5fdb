"""The dashboard in Chromium, if it is installed: its script runs under the page's policy, and nothing is refused."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import expect

from kvstore.env.clock import SystemClock
from kvstore.proto.admin_pb2 import DiskReport
from kvstore.proto.kv_pb2 import PageResponse, Record
from kvstore.server.ui.charts import CHARTS
from kvstore.server.ui.keys import keys_page
from tests.browser import CHROMIUM, LEGEND, MISSING, tab_of
from tests.server.status.test_health import silent
from tests.server.ui.test_dashboard import Opened, opened
from tests.server.ui.test_view import judged
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


async def test_open_page_shows_a_new_verdict(opened: Opened) -> None:
    async with tab_of(f"{opened.url}/ui") as tab:
        health = tab.page.locator("#health")
        await expect(health).to_have_class("health HEALTHY", timeout=PATIENCE_S * 1000)
        silent(opened.made.report, 3)
        judged(opened.made.report)
        await expect(health).to_contain_text("Degraded, all partitions served", timeout=PATIENCE_S * 1000)
        await expect(health).to_have_class("health DEGRADED", timeout=PATIENCE_S * 1000)
        await expect(tab.page.locator("#link")).to_have_text("live; reload to see the changes below")
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


NOTE_CUT_LABELS = """window.cut = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, ...more) {
  if (this.textAlign === "right" && x < this.measureText(text).width) window.cut.push(text);
  draw.call(this, text, x, ...more);
};"""


async def test_labels_of_charts_are_not_cut_off(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    report, watcher, now = opened.made.report, opened.made.watcher, SystemClock().now()
    assert watcher is not None
    for number in range(3):
        report.partitions[0].lead.written_bytes_per_s = 600.0 * 1024
        monkeypatch.setattr(SystemClock, "now", lambda _, number=number: now - 30 + 15 * number)
        watcher(report)
    async with tab_of() as tab:
        await tab.page.add_init_script(NOTE_CUT_LABELS)
        await tab.open_until(f"{opened.url}/ui", ["600 KiB/s"])
        assert await tab.page.evaluate("window.cut") == []


LINES = "document.querySelector('tbody th a').getClientRects().length"


async def test_key_stays_on_one_line_beside_a_long_value(opened: Opened) -> None:
    found = PageResponse(keys=[b"counter:000000000000:visits"], records=[Record(value=bytes(80))])
    html = opened.listener.pages.html("keys.html", keys_page(b"", found, 0)).body.decode()
    async with tab_of(f"{opened.url}/ui") as tab:
        await tab.page.set_content(html)
        assert await tab.page.evaluate(LINES) == 1


CELLS = """[...document.querySelectorAll("#partitions ~ table tbody tr")].map(row => row.cells[PLACE].textContent)"""


async def test_long_table_is_sorted_by_its_headings(opened: Opened) -> None:
    report = opened.made.report
    for number in range(3, 13):
        report.partitions.add(id=f"p{number}", state="serving", leader="n1", served=True, keys=1000 * number)
    report.partitions[0].keys, report.partitions[1].keys = 5, 900
    for number, free_bytes in enumerate((1000, 900 << 20, *[2 << 30] * 7)):
        report.bookies.add(id=f"b{number}", state="writable").disk.MergeFrom(
            DiskReport(total_bytes=100 << 30, free_bytes=free_bytes)
        )
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
        await tab.page.locator("#bookies ~ table th button", has_text="disk free").click()
        frees = await tab.page.evaluate(CELLS.replace("PLACE", "2").replace("partitions", "bookies"))
        assert (frees[0], frees[-2:]) == ("50 GiB", ["900 MiB", "1,000 B"]), "by size, not by digits"
        assert tab.complaints == []


WIDE_SECTIONS = "[...document.querySelectorAll('section')].filter(each => each.scrollWidth > each.clientWidth).length"


FILLS = "document.querySelector('.u-wrap').clientWidth === document.querySelector('.chart').clientWidth"
"""True once a chart is as wide as its place."""


async def test_phone_unfolds_what_a_link_names(opened: Opened) -> None:
    async with tab_of(viewport={"width": 390, "height": 800}, is_mobile=True) as tab:
        await tab.open_until(f"{opened.url}/ui", ["Charts", "Partitions: 2"])
        partitions, charts = tab.page.locator("#partitions ~ table"), tab.page.locator(".charts")
        assert not await partitions.is_visible()
        assert not await charts.is_visible()
        assert await tab.page.locator("#nodes ~ table").is_visible()
        await tab.page.locator("summary", has_text="Charts").press("Enter")
        await tab.page.wait_for_selector(LEGEND)
        await tab.page.wait_for_function(FILLS, timeout=PATIENCE_S * 1000)
        await tab.page.goto("about:blank")
        await tab.page.goto(f"{opened.url}/ui#partitions")
        await expect(partitions).to_be_visible(timeout=PATIENCE_S * 1000)
        assert not await charts.is_visible()
        await tab.page.goto("about:blank")
        await tab.page.goto(f"{opened.url}/ui?period=6h#charts")
        await expect(charts).to_be_visible(timeout=PATIENCE_S * 1000)
        assert not await partitions.is_visible()
        await tab.page.set_viewport_size({"width": 1280, "height": 800})
        await expect(partitions).to_be_visible(timeout=PATIENCE_S * 1000)
        assert not await tab.page.locator("summary", has_text="Charts").is_visible()
        assert tab.complaints == []


async def test_page_needs_no_sideways_scrolling_on_a_phone(opened: Opened) -> None:
    async with tab_of(viewport={"width": 390, "height": 800}, is_mobile=True) as tab:
        for path in ("/partition?id=p1", "/bookie?id=n1-ab", "/users", "/slow", "/snapshots", ""):
            await tab.open_until(f"{opened.url}/ui{path}", ["kvstore"])
            if not path:
                await tab.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
                await tab.page.wait_for_selector(LEGEND)
            assert await tab.page.evaluate("document.documentElement.scrollWidth") == 390, path
            assert await tab.page.evaluate(WIDE_SECTIONS) == 0, path
