"""Which runner takes a snapshot, by what the servers say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from kvstore.errors import PermissionDenied
from kvstore.spark.snapshots import runners
from kvstore.spark.snapshots.runners import SMALL_ROWS, is_small


class Said:
    """Servers whose partition has so many changes, and so many keys; None: the user may not know."""

    def __init__(self, changes: int | None, keys: int | None) -> None:
        self._changes, self._keys = changes, keys

    def __enter__(self) -> Said:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def positions(self) -> list[Any]:
        if self._changes is None:
            raise PermissionDenied("user anna lacks the right watch")
        return [SimpleNamespace(partition="p1", latest=self._changes)]

    def count(self) -> int:
        if self._keys is None:
            raise PermissionDenied("user nightly lacks the right read")
        return self._keys


@pytest.mark.parametrize(
    ("changes", "keys", "small"),
    [
        (None, None, True),
        (SMALL_ROWS, None, True),
        (SMALL_ROWS + 1, SMALL_ROWS, True),
        (SMALL_ROWS + 1, SMALL_ROWS + 1, False),
        (SMALL_ROWS + 1, None, False),
    ],
)
def test_a_full_snapshot_is_small_by_its_changes_or_else_by_its_keys(
    changes: int | None, keys: int | None, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FeedReader", "Client"):
        monkeypatch.setattr(runners, name, lambda *_: Said(changes, keys))
    wanted: Any = SimpleNamespace(cluster="kv://127.0.0.1:1", instance="c", parent=None, where=Path())
    assert is_small(wanted) is small
