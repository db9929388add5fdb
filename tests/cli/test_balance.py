"""`kvstore balance explain` shows the settings of the server that balances."""

from __future__ import annotations

import pytest

from kvstore.cli import balance as command
from kvstore.errors import Unavailable
from kvstore.proto.admin_pb2 import BalanceResponse
from tests.commands import kvstore


def answer(mode: str) -> BalanceResponse:
    return BalanceResponse(mode=mode, balancer="n1", moves_per_hour=12, budget_left=12)


def test_explain_shows_the_settings_of_the_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that was asked first described what the balancer does by its own settings."""
    monkeypatch.setattr(command, "ask_admin", lambda cluster, work: answer("suggest"))
    asked = []

    def ask_node(node: str, cluster: object, work: object) -> BalanceResponse:
        asked.append(node)
        return answer("auto")

    monkeypatch.setattr(command, "ask_node", ask_node)
    done = kvstore("balance", "explain", "--server", "x:1")
    assert (done.returncode, done.stderr, asked) == (0, "", ["n1"])
    assert "mode auto: n1 makes steps" in done.stdout


def test_explain_says_so_when_the_balancer_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_node(node: str, cluster: object, work: object) -> BalanceResponse:
        raise Unavailable("timed out")

    monkeypatch.setattr(command, "ask_admin", lambda cluster, work: answer("suggest"))
    monkeypatch.setattr(command, "ask_node", ask_node)
    done = kvstore("balance", "explain", "--server", "x:1")
    assert done.returncode == 0
    assert "n1, which balances the cluster, does not answer (timed out)" in done.stderr
    assert "mode suggest" in done.stdout
