"""Registers ways to break the bookie: tests/bookie/mutants.py, and what it imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MUTANTS: dict[str, Callable[[], None]] = {}


def mutant(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(patch: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[name] = patch
        return patch

    return register


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, original)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))
