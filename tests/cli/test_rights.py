"""`kvstore role grant` and `revoke`: what they say of the keys."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.cli.access import users
from tests.commands import kvstore


@pytest.mark.parametrize(("prefix", "keys"), [(("acme/",), "'acme/'"), ((), "every key"), (("",), "every key")])
def test_a_right_to_every_key_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch, prefix: tuple[str, ...], keys: str
) -> None:
    """It may be the prefix that a shell's variable did not hold."""
    asked: list[Any] = []
    monkeypatch.setattr(users, "change_access", lambda *_, **change: asked.append(change))
    assert kvstore("role", "grant", "acme", "write", *prefix).stdout == f"role acme may write {keys}\n"
    assert kvstore("role", "revoke", "acme", "write", *prefix).stdout == f"role acme may no longer write {keys}\n"
    assert [each["prefix"] for change in asked for each in change.values()] == ["".join(prefix).encode()] * 2
