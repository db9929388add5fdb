"""A node starts without the tree of commands, where the command line is plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.__main__ import plain_node_run

CONFIG = Path("n1.toml")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("node run --config n1.toml", (CONFIG, False)),
        ("node run --config n1.toml --insecure", (CONFIG, True)),
        ("node run --insecure --config n1.toml", (CONFIG, True)),
        ("node run --config=n1.toml", None),
        ("node run --config n1.toml --help", None),
        ("node run --config --insecure", None),
        ("node run --config n1.toml --insecure --insecure", None),
        ("node run --config s3:/bucket/n1.toml", None),
        ("node run", None),
        ("node", None),
        ("", None),
        ("status --config n1.toml", None),
    ],
)
def test_a_plain_command_line_is_known(line: str, found: tuple[Path, bool] | None) -> None:
    assert plain_node_run(line.split()) == found


def test_what_reads_command_lines_is_not_in_a_nodes_memory() -> None:
    code = (
        "import sys, kvstore.__main__, kvstore.server.node; print({'typer', 'pydantic', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_node_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "kvstore", "node", "run", "--config", str(tmp_path / "none.toml")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "none.toml" in done.stderr
