"""Tells a breakage that a test notices from one that does not fit the code any more, which every test would notice."""

from __future__ import annotations

import re

MISFIT = re.compile(r"\b(AttributeError|TypeError|NameError)\b")
"""The errors of a patch that does not fit the code."""


def notice_of(name: str, error: BaseException) -> str:
    """Return the first line of the failure by which breakage `name` was noticed. Raises AssertionError if the breakage
    does not fit the code."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    assert not MISFIT.search(text), f"the breakage {name!r} does not fit the code: {text}"
    return text[:300]
