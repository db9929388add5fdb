"""Keeps the figures of a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keep(out: Path | None, document: Any) -> None:
    """Write the document as JSON, if a file was named for it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2))
