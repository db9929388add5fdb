"""The registry of ways to break the bookie, for tests/bookie/mutants.py and its imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MUTANTS: dict[str, Callable[[], None]] = {}
_patches = [pytest.MonkeyPatch()]


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
    _patches[-1].setattr(owner, name, make(getattr(owner, name)))


def hide(owner: type, name: str, by: property) -> None:
    """Make the class answer for an attribute of its objects."""
    _patches[-1].setattr(owner, name, by, raising=False)


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Run code with this breakage, on top of what is broken for the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        _patches.append(patch)
        try:
            MUTANTS[name]()
            yield
        finally:
            _patches.remove(patch)
