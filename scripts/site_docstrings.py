"""Griffe extension: a doctest in a docstring is shown as code, also where no `Examples:` section holds it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around each doctest that begins at the margin of its docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _EXAMPLE.sub("Examples:", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", text)
