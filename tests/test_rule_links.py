"""The site links the numbers of rules to the protocol, and every number on an explanation page is a rule."""

from __future__ import annotations

import re

from scripts.rule_links import linked, rules_of
from tests.source import ROOT

RULES = rules_of((ROOT / "docs" / "protocol.md").read_text(encoding="utf-8"))


def test_rule_numbers_become_links_outside_code_links_and_headings() -> None:
    page = "# P17\nA lease (P17, G8) or `P17` or [P17](x.md) or P999.\n```\nP17\n```\n    P17"
    assert linked(page, RULES, "../protocol.md") == (
        "# P17\nA lease ([P17](../protocol.md#p17), [G8](../protocol.md#g8)) or `P17` or [P17](x.md) or P999.\n"
        "```\nP17\n```\n    P17"
    )


def test_rules_that_explanation_pages_cite_are_in_the_protocol() -> None:
    pages = sorted((ROOT / "docs" / "explanation").glob("*.md"))
    cited = {
        (page.name, number)
        for page in pages
        for group in re.findall(r"\(([A-Z]\d+(?:(?:, | to )[A-Z]\d+)*)\)", page.read_text(encoding="utf-8"))
        for number in re.findall(r"[A-Z]\d+", group)
    }
    assert len(cited) > 100
    assert {each for each in cited if each[1] not in RULES} == set()
