"""Clients reach servers by name although the name server answers only some questions, and fail in time if it answers
none: with a real name server, which the system's own lookup asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.named import WAYS
from tests.env.name_server import ASK_IT
from tests.env.namespaces import need_mounts, run_mounted

PROGRAM = "import runpy; runpy.run_module('tests.client.named', run_name='__main__')"
ONCE = 1
"""Number of questions per family before the system's own lookup asks again, which it does 5 s after the first question.
If half of the answers are missing, it takes 10 s."""


def told(tmp_path: Path, mode: str) -> dict[str, Any]:
    need_mounts(tmp_path)
    found = run_mounted(ASK_IT, PROGRAM, tmp_path, mode, has_own_network=True)
    assert found.returncode == 0, found.stderr
    assert "never retrieved" not in found.stderr
    answer: dict[str, Any] = json.loads(found.stdout)
    assert answer["asked"], "the system asks another name server"
    assert answer["told"].keys() == WAYS.keys()
    return answer["told"]


@pytest.mark.parametrize("mode", ["both", "A only"])
def test_client_connects_by_name_when_one_family_is_not_answered(tmp_path: Path, mode: str) -> None:
    found = told(tmp_path, mode)
    assert {way: what for way, (what, _) in found.items()} == dict.fromkeys(WAYS, "done")
    assert {way: asked for way, (_, asked) in found.items()} == dict.fromkeys(WAYS, ONCE)


@pytest.mark.parametrize(
    ("mode", "why"), [("silent", "expected its addresses from the name service"), ("no such name", "no such host")]
)
def test_client_reports_in_time_that_a_name_has_no_address(tmp_path: Path, mode: str, why: str) -> None:
    found = told(tmp_path, mode)
    for what, asked in found.values():
        assert what.startswith("Unavailable: ")
        assert why in what
        assert asked == ONCE or mode == "no such name", "it waited for the system's lookup"
