"""The dashboard in Chromium, where there is one: its script runs under the page's policy, and nothing is refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.ui.test_dashboard import Opened, opened
from tests.waiting import PATIENCE_S

__all__ = ["opened"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LISTENS = b"DevTools listening on ws://"
UNTIL_LIVE = """new Promise(live => {
  const look = () => {
    const link = document.getElementById("link");
    if (link && link.textContent === "live") live(true); else setTimeout(look, 20);
  };
  look();
})"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `apt-get install chromium`"),
]


class Tab:
    """One page of a browser, driven by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, count(1)
        self.complaints: list[str] = []
        """What the page has logged, and what its policy has refused."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.complaints.append(str(message["params"]))

    async def text_of(self, id: str) -> str:
        """The text of an element; empty while there is none."""
        script = f"(document.getElementById({id!r}) || {{}}).textContent || ''"
        found = await self.call("Runtime.evaluate", expression=script)
        return str(found["result"].get("value", ""))


@asynccontextmanager
async def tab_of(url: str, profile: Path) -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}")
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert browser.stderr is not None
    draining = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (line := await browser.stderr.readline()).startswith(LISTENS):
                assert line, "Chromium ended"
        draining = asyncio.create_task(browser.stderr.read())
        address = line.removeprefix(LISTENS).split(b"/")[0].decode()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as answer:
                page = next(each for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
                tab = Tab(socket)
                for domain in ("Log", "Runtime", "Page"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                yield tab
    finally:
        browser.kill()
        await browser.wait()
        if draining is not None:
            await draining


async def test_in_a_browser_the_page_is_kept_fresh_and_its_policy_refuses_nothing(
    opened: Opened, tmp_path: Path
) -> None:
    async with tab_of(f"{opened.url}/ui", tmp_path / "profile") as tab, asyncio.timeout(PATIENCE_S):
        await tab.call("Runtime.evaluate", expression=UNTIL_LIVE, awaitPromise=True)
        assert "all is served" in await tab.text_of("health")
        assert tab.complaints == []
