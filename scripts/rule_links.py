"""Hook of MkDocs: the number of a rule of the protocol, such as P17, links to the rule on every page of the site.

The rules are on the pages of `docs/reference/protocol/`, which `docs/protocol.md` lists. A rule begins with its number
in bold. On the site the number becomes a heading, with the rule's title if it has one, so that the table of contents
and the search show it. Numbers in code, in headings and in links stay as they are. Sources stay free of links, so that
they are easy to read and to search.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGES = "reference/protocol"
"""The folder of the pages with rules, below `docs/`."""
RULE = re.compile(r"^\*\*([A-Z]x?\d+)\*\*", re.MULTILINE)
_TITLED = re.compile(r"^\*\*([A-Z]x?\d+)\*\*(?: \*([^*\n]+)\.\*)? *", re.MULTILINE)
_CITED = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|(?<![\w#/.-])([A-Z]x?\d+)\b(?!\*\*|-)")


def rule_pages(docs: Path) -> dict[str, str]:
    """Return the page below `docs` of each rule, by the rule's number."""
    pages = sorted((docs / PAGES).glob("*.md"))
    return {rule: f"{PAGES}/{page.name}" for page in pages for rule in RULE.findall(page.read_text(encoding="utf-8"))}


def linked(markdown: str, pages: Mapping[str, str], source: str) -> str:
    """Return the page `source` with a link for each number of a rule in `pages`."""
    lines = []
    in_code = False
    for line in markdown.split("\n"):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        if not in_code and not line.startswith(("#", "    ")):
            line = _CITED.sub(lambda cited: _link(cited, pages, source), line)
        lines.append(line)
    return "\n".join(lines)


def headed(markdown: str) -> str:
    """Return a page of rules with a heading for each rule: its number and, if it has one, its title."""
    level = "###" if re.search(r"^## ", markdown, re.MULTILINE) else "##"
    return _TITLED.sub(
        lambda rule: f"{level} {rule[1]}{f': {rule[2]}' if rule[2] else ''} {{#{rule[1].lower()}}}\n\n", markdown
    )


def _link(cited: re.Match[str], pages: Mapping[str, str], source: str) -> str:
    number = cited[1]
    if number not in pages:
        return cited[0]
    page = "" if pages[number] == source else posixpath.relpath(pages[number], posixpath.dirname(source) or ".")
    return f"[{number}]({page}#{number.lower()})"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with links to rules and, if it is a page of rules, with a heading for each rule."""
    source = page.file.src_uri
    text = linked(markdown, rule_pages(Path(config["docs_dir"])), source)
    return headed(text) if posixpath.dirname(source) == PAGES else text
