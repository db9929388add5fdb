"""Hook of MkDocs: links from a page to a file of the repository outside docs/ become the file's path in code type.

Such links work where the repository is browsed, but the site does not hold those files. A path that does not exist
stays a link, so that `mkdocs build --strict` reports it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

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
