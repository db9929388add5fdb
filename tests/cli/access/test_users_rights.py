"""`kvstore role grant` and `revoke`: their messages about keys. `kvstore access found` with an administrator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cli.access import users
from kvstore.cli.cluster import ClusterOptions
from kvstore.meta.memory import MemoryStore
from kvstore.meta.tables.access import AccessStore
from tests.commands import Done, kvstore


@pytest.mark.parametrize(("prefix", "keys"), [(("acme/",), "'acme/'"), ((), "every key"), (("",), "every key")])
def test_right_to_every_key_is_shown_as_such(
    monkeypatch: pytest.MonkeyPatch, prefix: tuple[str, ...], keys: str
) -> None:
    """The prefix can be an unset variable of the shell."""
    asked: list[Any] = []
    monkeypatch.setattr(users, "change_access", lambda *_, **change: asked.append(change))
    assert kvstore("role", "grant", "acme", "write", *prefix).stdout == f"role acme may write {keys}\n"
    assert kvstore("role", "revoke", "acme", "write", *prefix).stdout == f"role acme may no longer write {keys}\n"
    assert [each["prefix"] for change in asked for each in change.values()] == ["".join(prefix).encode()] * 2


def test_lost_administrator_is_replaced_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def with_tools(_: ClusterOptions, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            return await work(SimpleNamespace(store=store))

        return asyncio.run(main())

    def found(name: str, *words: str) -> Done:
        return kvstore("access", "found", name, "--password-stdin", *words, stdin="a long password\n")

    monkeypatch.setattr(users, "with_tools", with_tools)
    assert found("root").returncode == 0
    refused = found("anna")
    assert (refused.returncode, "--replace-lost if all administrator" in refused.stderr) == (1, True)
    unasked = found("anna", "--replace-lost")
    assert (unasked.returncode, "expected --yes" in unasked.stderr) == (2, True)
    assert found("anna", "--replace-lost", "--yes").returncode == 0
    table = asyncio.run(AccessStore(store).read())
    assert [(each.name, each.roles) for each in table.users] == [("anna", ("admin",)), ("root", ("admin",))]
