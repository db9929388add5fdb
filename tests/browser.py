"""A headless Chromium for tests, driven by Playwright; nothing of it needs the internet."""

from __future__ import annotations

import base64
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import ConsoleMessage, Page, async_playwright

from tests.png import small_png
from tests.waiting import PATIENCE_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium here: `make test-tools`"
PIXELS = """async data => {
  const picture = new Image();
  picture.src = "data:image/png;base64," + data;
  await picture.decode();
  const canvas = new OffscreenCanvas(picture.width, picture.height), drawn = canvas.getContext("2d");
  drawn.drawImage(picture, 0, 0);
  const bytes = drawn.getImageData(0, 0, picture.width, picture.height).data;
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return [picture.width, btoa(text)];
}"""
"""Returns the width and the pixels of a PNG file, as getImageData gives them."""
WIDTH = 1280
"""Width of pictures, in CSS pixels."""
LEGEND = ".u-legend"
"""Is on the page once the charts are drawn."""


class Tab:
    """One page of a browser."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        """Messages that the page has logged, its exceptions, and requests that its policy has refused."""
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, message: ConsoleMessage) -> None:
        # Live events are refused while the metadata store is away, and asked for again.
        is_refused = message.text.startswith("Failed to load resource")
        if not is_refused or not message.location["url"].endswith("/ui/live"):
            self.complaints.append(f"{message.text} at {message.location}")

    async def open_until(self, url: str, wanted: Collection[str], timeout_s: float = PATIENCE_S) -> str:
        """Open a page again and again until all that is `wanted` can be read on it; return what can be read then."""
        seen = ""

        async def is_shown() -> bool:
            nonlocal seen
            await self.page.goto(url)
            seen = await self.page.inner_text("body")
            return all(each in seen for each in wanted)

        try:
            await wait_until(is_shown, timeout_s=timeout_s, what=f"{wanted} at {url}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it shows:\n{seen}") from None
        return seen

    async def picture(self, place: Path, *, is_dark: bool = False) -> None:
        """Keep the whole page as a PNG file."""
        await self.page.emulate_media(color_scheme="dark" if is_dark else "light")
        await self.page.set_viewport_size({"width": WIDTH, "height": 800})
        shot = await self.page.screenshot(full_page=True)
        await self.page.goto("about:blank")  # the page's own policy shows no pictures
        width, pixels = await self.page.evaluate(PIXELS, base64.b64encode(shot).decode())
        place.write_bytes(small_png(base64.b64decode(pixels), width))


@asynccontextmanager
async def tab_of(url: str = "about:blank", **look: Any) -> AsyncIterator[Tab]:
    """Open a page in a new browser. `look` has Playwright's options of a page, such as `viewport`."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page(**look)
            page.set_default_timeout(PATIENCE_S * 1000)
            tab = Tab(page)
            await page.goto(url)
            yield tab
        finally:
            await browser.close()
