"""Hook of MkDocs: the number of a rule of docs/protocol.md, such as P17, links to the rule on every page of the site.

A rule begins with its number in bold, which becomes an anchor (`protocol.md#p17`). Numbers in code, in headings and in
links stay as they are. Sources stay free of links, so that they are easy to read and to search.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

PROTOCOL = "protocol.md"
RULE = re.compile(r"^\*\*([A-Z]\d+)\*\*", re.MULTILINE)
_CITED = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|(?<![\w#/.-])([A-Z]\d+)\b(?!\*\*|-)")


def rules_of(protocol: str) -> set[str]:
    """Return the numbers of the rules in the text of the protocol."""
    return set(RULE.findall(protocol))


def linked(markdown: str, rules: set[str], protocol: str) -> str:
    """Return a page with a link for each number of a rule. `protocol` is the path from the page to the protocol."""
    lines = []
    in_code = False
    for line in markdown.split("\n"):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        if not in_code and not line.startswith(("#", "    ")):
            line = _CITED.sub(lambda cited: _link(cited, rules, protocol), line)
        lines.append(line)
    return "\n".join(lines)


def _link(cited: re.Match[str], rules: set[str], protocol: str) -> str:
    number = cited[1]
    return f"[{number}]({protocol}#{number.lower()})" if number in rules else cited[0]


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its anchors, if it is the protocol, and with links to rules."""
    rules = rules_of((Path(config["docs_dir"]) / PROTOCOL).read_text(encoding="utf-8"))
    source = page.file.src_uri
    text = linked(markdown, rules, posixpath.relpath(PROTOCOL, posixpath.dirname(source) or "."))
    if source == PROTOCOL:
        text = RULE.sub(lambda rule: f"**{rule[1]}**{{#{rule[1].lower()}}}", text)
    return text
