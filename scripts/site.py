"""Hook of MkDocs: the site needs nothing from elsewhere.

Links from a page to a file of the repository outside docs/ become the file's path in code type. Such links work where
the repository is browsed, but the site does not hold those files. A path that does not exist stays a link, so that
`mkdocs build --strict` reports it.

A page with a diagram loads the copy of Mermaid in docs/assets/. Without it, the theme loads Mermaid from a public
server when the page is read.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

MERMAID = "assets/mermaid.tiny.js"
_DIAGRAM = re.compile(r'<pre class="mermaid">.*?</pre>', re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with links to files outside docs/ replaced by their paths."""
    docs = Path(config["docs_dir"])
    folder = docs / Path(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if target.is_relative_to(docs) or not target.exists():
            return link[0]
        path = f"`{target.relative_to(docs.parent)}`"
        return path if link[1].strip("`") == path.strip("`") else f"{link[1]} ({path})"

    return _LINK.sub(replaced, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return the page's HTML with its diagrams in frames that scroll, and Mermaid before the theme's script if the page
    has a diagram."""
    if '<pre class="mermaid">' not in output:
        return output
    output = _DIAGRAM.sub(r'<div class="diagram">\g<0></div>', output)
    script = posixpath.relpath(MERMAID, page.url or ".")
    head, tag, tail = output.partition('<script id="__config"')
    assert tag, "expected the theme's configuration in the page"
    return f'{head}<script src="{script}"></script>{tag}{tail}'
