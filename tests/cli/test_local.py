"""The commands of the local cluster: what they refuse, and how they say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--nodes", "2"), "--unsafe"),
        (("up", "--nodes", "0"), "want 1 to 99"),
        (("up", "--port-offset", "150"), "--port-offset: want 0 to 99, or a multiple of 100 from 20000"),
        (("up", "--replicas", "4"), "--replicas: want 1 to 3"),
        (("status",), "no cluster in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals_go_to_standard_error_with_a_code(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    answer = kvstore(*arguments, "--data-dir", str(tmp_path / "data"))
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert words in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr


def test_down_without_a_cluster_is_no_error(tmp_path: Path) -> None:
    answer = kvstore("down", "--data-dir", str(tmp_path), "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout) == {"stopped": []}


def test_a_broken_configuration_names_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('id = "n1"\nresp = "0.0.0.0:6401"\nport = 5\n')
    answer = kvstore("node", "run", "--config", str(path))
    assert answer.returncode == 1
    for fault in ("zookeeper: missing", "data_dir: missing", "port: unknown"):
        assert fault in answer.stderr
    assert "Traceback" not in answer.stderr


def test_every_command_explains_itself() -> None:
    answer = kvstore("--help")
    assert answer.returncode == 0
    assert {"up", "down", "status", "node"} <= set(answer.stdout.split())
    for command in (["up"], ["down"], ["status"], ["node", "run"]):
        assert kvstore(*command, "--help").returncode == 0


def test_a_wrong_option_is_wrong_usage() -> None:
    assert kvstore("up", "--nonsense").returncode == 2
