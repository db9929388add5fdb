"""Long work in steps, between which the other tasks of the process run."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in steps of some milliseconds each, after which other tasks may run. Returns its result."""


def at_once(steps: Steps[T]) -> T:
    """Do all steps now, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
