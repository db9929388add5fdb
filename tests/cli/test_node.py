"""Commands that ask nodes about themselves, and their message for nodes that cannot answer."""

import pytest

from kvstore.cli.node.commands import why_unasked
from tests.commands import kvstore

BOOKIES = ["b1-0001", "n1-5f3a", "far.example:3181"]


@pytest.mark.parametrize("name", ["b1", "b1-0001", "far.example:3181"])
def test_node_with_only_a_bookie_is_shown_as_a_bookie(name: str) -> None:
    said = why_unasked(name, ["n1", "n2"], BOOKIES)
    assert said.startswith(f"{name} is only a bookie")
    assert "expected one of n1, n2; to change its log, set [log_output]" in said


@pytest.mark.parametrize("name", ["n9", "b", "b1-", "0001", ""])
def test_unknown_name_is_no_node(name: str) -> None:
    assert why_unasked(name, ["n1", "n2"], BOOKIES) == f"no server {name!r}: expected one of n1, n2"


def test_argument_that_is_no_text_is_an_error_of_one_line() -> None:
    answer = kvstore("node", "slow-log", "n1", "--key=\udcff", "--server", "127.0.0.1:1")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == "kvstore: expected UTF-8, got '\\udcff'\n"
