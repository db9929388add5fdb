"""The site links the numbers of rules to their pages, and every number on an explanation page is a rule."""

from __future__ import annotations

import re

from scripts.rule_links import PAGES, headed, linked, rule_pages
from tests.source import ROOT

RULES = rule_pages(ROOT / "docs")


def test_rule_numbers_become_links_outside_code_links_and_headings() -> None:
    page = "# P17\nA lease (P17, G8) or `P17` or [P17](x.md) or P999.\n```\nP17\n```\n    P17"
    assert linked(page, RULES, "explanation/read-path.md") == (
        "# P17\nA lease ([P17](../reference/protocol/reads.md#p17), [G8](../reference/protocol/log.md#g8)) or `P17` "
        "or [P17](x.md) or P999.\n```\nP17\n```\n    P17"
    )
    assert linked("A decision (Tx5).", RULES, "protocol.md") == (
        "A decision ([Tx5](reference/protocol/transactions.md#tx5))."
    )
    assert linked("**P17** A lease (P17, G8).", RULES, f"{PAGES}/reads.md") == (
        "**P17** A lease ([P17](#p17), [G8](log.md#g8))."
    )


def test_rules_become_headings_with_their_titles() -> None:
    assert headed("**G8** *Takeover.*\n\n1. Read.\n\n**T10** *A LAC is believed* when\n") == (
        "## G8: Takeover {#g8}\n\n\n\n1. Read.\n\n## T10 {#t10}\n\n*A LAC is believed* when\n"
    )
    assert headed("## Space\n\n**B10** *Reclaim.* A ledger\n") == "## Space\n\n### B10: Reclaim {#b10}\n\nA ledger\n"


def test_protocol_page_lists_the_rules_of_each_page() -> None:
    listed = {}
    for numbers, page in re.findall(
        rf"^\| ([A-Z]x?\d[^|]*) \| \[[^]]*\]\({PAGES}/([\w-]+\.md)\)",
        (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        for letter, first, last in re.findall(r"([A-Z]x?)(\d+)(?: to \1(\d+))?", numbers):
            listed |= {f"{letter}{number}": f"{PAGES}/{page}" for number in range(int(first), int(last or first) + 1)}
    assert listed == RULES


def test_rules_that_explanation_pages_cite_are_in_the_protocol() -> None:
    pages = sorted((ROOT / "docs" / "explanation").glob("*.md"))
    cited = {
        (page.name, number)
        for page in pages
        for group in re.findall(r"\(([A-Z]x?\d+(?:(?:, | to )[A-Z]x?\d+)*)\)", page.read_text(encoding="utf-8"))
        for number in re.findall(r"[A-Z]x?\d+", group)
    }
    assert len(cited) > 100
    assert {each for each in cited if each[1] not in RULES} == set()
