"""Probes on rare code paths: a simulation that never takes a path has not tested it.

Call `declare` at import, `probe` when the path is taken, and `missed` at the end of many seeds. `watch` counts the
calls of a method of the code under test without changing it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

hits: Counter[str] = Counter()
_declared: set[str] = set()


def declare(*names: str) -> None:
    """Declare the names of paths."""
    _declared.update(names)


def probe(name: str) -> None:
    """Count one use of a path. Fails if the path is not declared."""
    assert name in _declared, f"{name} is not declared"
    hits[name] += 1


def missed(prefix: str = "") -> list[str]:
    """Return the declared paths below `prefix` that were not taken since the process began, sorted."""
    return sorted(name for name in _declared if name.startswith(prefix) and not hits[name])


@contextmanager
def watch(name: str, owner: type, method: str) -> Iterator[None]:
    """Count calls of `owner.method` as `name` while the block runs."""
    declare(name)
    original = getattr(owner, method)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        probe(name)
        return original(*args, **kwargs)

    setattr(owner, method, counted)
    try:
        yield
    finally:
        setattr(owner, method, original)
