"""The command that installs a missing part of kvstore. It names no package index, because the distribution is on
none."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "kvstore-log"
ANY_WHEEL = "kvstore_log-VERSION-py3-none-any.whl"


def install_hint(*extras: str) -> str:
    """Return the command that installs these extras beside what is installed: `make setup` in a checkout, otherwise pip
    with the installed wheel, or with a placeholder if the wheel's path is unknown."""
    try:
        direct = json.loads(Distribution.from_name(NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        direct = {}
    url = urlsplit(str(direct.get("url", "")))
    place = unquote(url.path) if url.scheme == "file" else ""
    is_checkout = bool(direct.get("dir_info", {}).get("editable"))
    checkout = Path(__file__).parents[1]
    if not direct and (checkout / "pyproject.toml").is_file():
        is_checkout, place = True, str(checkout)
    if is_checkout:
        return f"run `make setup` in {place}"
    return f"run `pip install '{place or ANY_WHEEL}[{','.join(extras)}]'`"
