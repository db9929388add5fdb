"""The dashboard in Chromium, where there is one: its script runs under the page's policy, and nothing is refused."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.server.ui.test_dashboard import Opened, opened

__all__ = ["opened"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_S = 60.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `apt-get install chromium`"),
]


async def browse(url: str, profile: Path) -> tuple[str, str]:
    """The page as Chromium has it after a moment, and what it has logged."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--timeout=3000")
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        f"--user-data-dir={profile}",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(BROWSER_S):
            page, logged = await browser.communicate()
    finally:
        if browser.returncode is None:
            browser.kill()
            await browser.wait()
    return page.decode(), logged.decode("utf-8", "replace")


async def test_in_a_browser_the_page_is_kept_fresh_and_its_policy_refuses_nothing(
    opened: Opened, tmp_path: Path
) -> None:
    for attempt in range(5):
        page, logged = await browse(f"{opened.url}/ui", tmp_path / f"profile{attempt}")
        assert "Content Security Policy" not in logged
        assert "CONSOLE" not in logged
        if '<span id="link" role="status">live</span>' in page:
            return
    raise AssertionError(f"the page did not become live: {page[:1500]} {logged[-1500:]}")
