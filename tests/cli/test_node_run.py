"""A node starts without the tree of commands if the command line is plain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.__main__ import INSECURE, plain_node_run
from kvstore.config import Setting
from tests.commands import kvstore

CONFIG, ID = Path("n1.toml"), Setting("id", "n2")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("node run --config n1.toml", (CONFIG, [])),
        ("node run --config n1.toml --insecure", (CONFIG, [INSECURE])),
        ("node run --insecure --config n1.toml", (CONFIG, [INSECURE])),
        ("node run --set id=n2 --config n1.toml --set log.roll_bytes=5", (CONFIG, [ID, Setting("log.roll_bytes", 5)])),
        ("node run --config=n1.toml", None),
        ("node run --config n1.toml --help", None),
        ("node run --config --insecure", None),
        ("node run --config n1.toml --config n2.toml", None),
        ("node run --config n1.toml --set", None),
        ("node run --config n1.toml --set --insecure", None),
        ("node run --config s3:/bucket/n1.toml", None),
        ("node run", None),
        ("node", None),
        ("", None),
        ("status --config n1.toml", None),
    ],
)
def test_plain_command_line_is_known(line: str, found: tuple[Path, list[Setting]] | None) -> None:
    assert plain_node_run(line.split()) == found


def test_node_does_not_import_the_command_line_parser() -> None:
    code = (
        "import sys, kvstore.__main__, kvstore.server.node; print({'typer', 'pydantic', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_node_that_cannot_start_reports_why_in_one_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "kvstore", "node", "run", "--config", str(tmp_path / "none.toml")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "none.toml" in done.stderr


def test_request_for_new_certificates_does_not_end_a_node_that_starts(tmp_path: Path) -> None:
    """The node waits for its configuration, a pipe, while it is signalled. The configuration is wrong, so it ends."""
    os.mkfifo(tmp_path / "node.toml")
    line = [sys.executable, "-m", "kvstore", "node", "run", "--config", str(tmp_path / "node.toml")]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as node:
        with (tmp_path / "node.toml").open("w") as config:  # opens once the node reads
            node.send_signal(signal.SIGHUP)
            config.write("id = 5\n")
        _, said = node.communicate()
    assert node.returncode == 1, said
    assert "id: expected" in said


WRONG = {
    ("--set", "id"): "--set id: expected SECTION.NAME=VALUE",
    ("--set", "id.more=5"): "--set id.more: id is a value, not a section",
    ("--set", "limts.waiting_max=5"): "limts: unknown",
}
"""Options that are no settings, and the messages about them."""


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_setting_that_is_none_is_refused_by_run(tmp_path: Path, words: tuple[str, str]) -> None:
    (tmp_path / "node.toml").write_text("id = 'n1'\n")
    line = [sys.executable, "-m", "kvstore", "node", "run", "--config", str(tmp_path / "node.toml"), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert WRONG[words] in done.stderr


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_setting_that_is_none_is_refused_by_check(tmp_path: Path, words: tuple[str, str]) -> None:
    (tmp_path / "node.toml").write_text("id = 'n1'\n")
    done = kvstore("node", "check", "--config", str(tmp_path / "node.toml"), *words)
    assert done.returncode == 1
    assert WRONG[words] in done.stdout + done.stderr
