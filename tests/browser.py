"""A headless Chromium for tests, driven by the DevTools protocol; nothing of it needs the internet."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.png import small_png
from tests.waiting import PATIENCE_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium here: `make test-tools`"
PIXELS = """new Promise(async done => {
  const picture = new Image();
  picture.src = "data:image/png;base64,DATA";
  await picture.decode();
  const canvas = new OffscreenCanvas(picture.width, picture.height), drawn = canvas.getContext("2d");
  drawn.drawImage(picture, 0, 0);
  const bytes = drawn.getImageData(0, 0, picture.width, picture.height).data;
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  done([picture.width, btoa(text)]);
})"""
"""Width, and the pixels of a PNG file, as getImageData gives them."""
LISTENS = b"DevTools listening on ws://"
MESSAGE_MAX = 64 << 20
"""Maximum bytes of a message. One message contains all pixels of a picture."""
WIDTH = 1280
"""Width of pictures, in CSS pixels."""
UNTIL_LOADED = """new Promise(loaded => {
  const look = () => { if (document.readyState === "complete") loaded(true); else setTimeout(look, 10); };
  look();
})"""

UNTIL_DRAWN = """new Promise(drawn => {
  const look = () => {
    if (document.querySelector(".u-legend")) requestAnimationFrame(() => drawn(true)); else setTimeout(look, 20);
  };
  look();
})"""
"""A promise that is kept once the charts of the dashboard are drawn."""


class Tab:
    """One page of a browser, driven by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, count(1)
        self.complaints: list[str] = []
        """Messages that the page has logged, and requests that its policy has refused."""

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
                params = message["params"]
                entry = params.get("entry", {})
                # Live events are refused while the metadata store is away, and asked for again.
                if entry.get("source") != "network" or not entry.get("url", "").endswith("/ui/live"):
                    self.complaints.append(str(params))

    async def text_of(self, id: str) -> str:
        """The text of an element; empty while there is none."""
        script = f"(document.getElementById({id!r}) || {{}}).textContent || ''"
        found = await self.call("Runtime.evaluate", expression=script)
        return str(found["result"].get("value", ""))

    async def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it comes to."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open_until(self, url: str, wanted: Collection[str], timeout_s: float = PATIENCE_S) -> str:
        """Open a page again and again until all that is `wanted` can be read on it; returns what can be read then."""
        seen = ""

        async def is_shown() -> bool:
            nonlocal seen
            await self.call("Page.navigate", url=url)
            await self.evaluate(UNTIL_LOADED)
            seen = str(await self.evaluate("document.body.innerText"))
            return all(each in seen for each in wanted)

        try:
            await wait_until(is_shown, timeout_s=timeout_s, what=f"{wanted} at {url}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it shows:\n{seen}") from None
        return seen

    async def picture(self, place: Path, *, is_dark: bool = False, scale: float = 0.7) -> None:
        """Keep the whole page as a PNG file."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=WIDTH, height=800, deviceScaleFactor=1, mobile=False
        )
        height = await self.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": scale}
        shot = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        await self.call("Page.navigate", url="about:blank")  # the page's own policy shows no pictures
        await self.evaluate(UNTIL_LOADED)
        width, pixels = await self.evaluate(PIXELS.replace("DATA", shot["data"]))
        place.write_bytes(small_png(base64.b64decode(pixels), width))


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
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=MESSAGE_MAX) as socket:
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
