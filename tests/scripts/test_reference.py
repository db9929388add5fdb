"""The generated pages of the reference agree with the code."""

import pytest

from scripts.reference import PAGES
from tests.source import ROOT


@pytest.mark.parametrize("page", PAGES)
def test_generated_page_matches_the_code(page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == PAGES[page](), "run `make reference`"
