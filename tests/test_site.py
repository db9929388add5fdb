"""The documentation site needs nothing from elsewhere when it is read."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from scripts.site import MERMAID, on_post_page
from tests.source import ROOT

DOCS = ROOT / "docs"
THEME = '<script id="__config" type="application/json">{}</script>'


@pytest.mark.parametrize(("url", "script"), [("", MERMAID), ("explanation/write-path/", f"../../{MERMAID}")])
def test_page_with_a_diagram_loads_the_copy_of_mermaid_before_the_theme(url: str, script: str) -> None:
    shown = on_post_page(f'<pre class="mermaid"></pre>{THEME}', page=SimpleNamespace(url=url))
    framed = '<div class="diagram"><pre class="mermaid"></pre></div>'
    assert shown == f'{framed}<script src="{script}"></script>{THEME}'


def test_page_without_a_diagram_does_not_load_mermaid() -> None:
    assert on_post_page(THEME, page=SimpleNamespace(url="")) == THEME


def test_copy_of_mermaid_is_the_file_that_its_license_names() -> None:
    digest = hashlib.sha256((DOCS / MERMAID).read_bytes()).hexdigest()
    assert f"SHA-256: {digest}\n" in (DOCS / "assets" / "mermaid.LICENSE.txt").read_text()
