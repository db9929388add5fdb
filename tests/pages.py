"""Command blocks of tutorials, how-to guides and README.md: what a test runs, and why the rest is not run.

An HTML comment in the line above a block of `sh`, `python` or `sql` says which:

- `<!-- test: local -->`: tests/cluster/pages types it into a shell beside a local cluster;
- `<!-- test: tests/PATH.py -->`: this test reads it;
- `<!-- not tested: REASON -->`.

A block of Python without a comment is run by tests/client/behaviour/test_examples.py against a model of a cluster,
unless it is a file that a later block runs (`title="shop.py"`). In a shell, `# prints: TEXT` names a part of what a
line prints, and `# fails: TEXT` a part of the error of a line that has to fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.source import ROOT

_FENCE = re.compile(
    r"(?:^(?P<margin> *)<!-- (?P<mark>(?:not )?test(?:ed)?): (?P<how>.*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_EXPECTED = re.compile(r"(?P<command>.*?)(?:\s+# (?P<how>prints|fails|meanwhile)(?:: |, )(?P<text>.*))?")
RUN = ("sh", "python", "sql")
"""Languages of blocks that people type or run."""


class Line(NamedTuple):
    """A line of a shell. `how`: it `prints` the text, `fails` with it, or continues `meanwhile`."""

    command: str
    how: str
    text: str


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    heading: str
    language: str
    mark: str
    """`test`, `not tested` or nothing."""
    how: str
    """Which test, or the reason."""
    title: str
    """The file that the reader saves it as, if it is one."""
    code: str

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return f"{self.page}:{self.line}"

    @property
    def lines(self) -> list[Line]:
        """The lines of a shell; a line that ends with a backslash has the next one in it."""
        found = []
        for line in re.sub(r" *\\\n *", " ", self.code).splitlines():
            match = _EXPECTED.fullmatch(line)
            assert match, line
            found.append(Line(match["command"], match["how"] or "", match["text"] or ""))
        return found


def pages() -> list[str]:
    """README.md and every page of the tutorials and the how-to guides."""
    folders = (ROOT / "docs" / "tutorials", ROOT / "docs" / "how-to")
    return ["README.md", *(str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.glob("*.md")))]


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", before, flags=re.DOTALL), re.MULTILINE)
        title = re.search(r'title="([^"]*)"', found["rest"])
        indent = len(found["indent"])
        code = "".join(line[indent:] or "\n" for line in found["code"].splitlines(keepends=True))
        yield Block(
            page,
            text[: found.start("language")].count("\n") + 1,
            headings[-1] if headings else "",
            found["language"],
            {"test": "test", "not tested": "not tested"}.get(found["mark"] or "", found["mark"] or ""),
            found["how"] or "",
            title[1] if title else "",
            code,
        )


def all_blocks() -> list[Block]:
    """Return the blocks of every page that people type or run."""
    return [block for page in pages() for block in blocks(page) if block.language in RUN]
