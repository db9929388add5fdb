"""The install hint that users see when a part is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore import extras
from kvstore.extras import install_hint
from tests.conftest import ROOT
from tests.source import tracked_texts


@pytest.mark.parametrize(
    ("direct", "hint"),
    [
        ({"url": "file:///a%20b/kv", "dir_info": {"editable": True}}, "run `make setup` in /a b/kv"),
        ({"url": "file:///d/kv.whl", "archive_info": {}}, "run `pip install '/d/kv.whl[node,delta]'`"),
        ({"url": "https://example.org/kv.whl"}, f"run `pip install '{extras.ANY_WHEEL}[node,delta]'`"),
        ({}, f"run `make setup` in {ROOT}"),
    ],
)
def test_install_hint_names_what_the_user_has(direct: object, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        @staticmethod
        def read_text(_: str) -> str | None:
            return json.dumps(direct) if direct else None

    monkeypatch.setattr(extras.Distribution, "from_name", lambda _: Found())
    assert install_hint("node", "delta") == hint


def test_install_hint_names_a_wheel_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise extras.PackageNotFoundError

    monkeypatch.setattr(extras.Distribution, "from_name", missing)
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "kvstore" / "extras.py"))
    assert install_hint("node") == f"run `pip install '{extras.ANY_WHEEL}[node]'`"


def test_install_hint_never_names_a_package_index() -> None:
    """The name is free there: whoever registers it would run code on our users' machines."""
    texts = {path: text for path, text in tracked_texts().items() if not str(path).startswith("CHANGELOG")}
    found = [f"{path}: {line}" for path, text in texts.items() for line in text.splitlines() if WRONG in line]
    assert not found


WRONG = "kvstore-log" + "["
