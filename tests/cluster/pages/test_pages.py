"""The commands of tutorials, how-to guides and README.md that are marked `test: local`, typed into a shell beside a
local cluster as they are on the page. Real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, running_cluster
from tests.pages import Block, all_blocks
from tests.source import ROOT
from tests.typed import programs

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LOCAL = [each for each in all_blocks() if (each.mark, each.how) == ("test", "local")]
FILES = [each for each in all_blocks() if each.title and not each.mark]
PAGES = sorted({each.page for each in LOCAL})
PATIENCE_S = 400.0
"""Time limit of a page. One page starts load tests, another takes snapshots."""
DONE = "--- done"
SPOILED = 3
"""Exit code of a load test whose load generator got too little processor time, for example because other tests ran."""
PORTS = {"resp": 6401, "grpc": 7401, "http": 8401}
"""Ports of the first node. The next nodes have the next ports."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("pages")) as started:
        started.wait_log_version()
        yield started


@pytest.fixture(scope="module")
def found(cluster: Cluster) -> Iterator[Path]:
    """Return the folder of programs for the shell's PATH."""
    with programs(cluster.directory) as folder:
        yield folder


def here(cluster: Cluster, text: str) -> str:
    """Return the text with the addresses of this cluster in place of those that `kvstore up` gives by default."""
    for endpoint, first in PORTS.items():
        for number, node in enumerate(cluster.ids):
            host, port = cluster.address(node, endpoint)
            text = text.replace(f"127.0.0.1:{first + number}", f"{host}:{port}")
            text = re.sub(rf"(-p |port=|\"127\.0\.0\.1\", ){first + number}\b", rf"\g<1>{port}", text)
    return text


@pytest.mark.parametrize("page", PAGES)
def test_page_commands_print_what_the_page_shows(page: str, cluster: Cluster, found: Path) -> None:
    for each in FILES:
        if each.page == page:
            (cluster.directory / each.title).write_text(here(cluster, each.code))
    blocks = [each for each in LOCAL if each.page == page]
    script = cluster.directory / "typed.sh"
    script.write_text(here(cluster, script_of(blocks)))
    path = os.pathsep.join([str(found), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(script)],
        cwd=cluster.directory,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=PATIENCE_S,
        check=False,
    )
    lines = [line for block in blocks for line in block.lines]
    *printed, rest = done.stdout.split(f"{DONE}\n")
    for line, text in zip(lines, printed, strict=False):
        assert line.text in text, f"{line.command}\n{text}"
    assert (done.returncode, len(printed)) == (0, len(lines)), f"{lines[len(printed)].command}\n{rest}"


def script_of(blocks: list[Block]) -> str:
    """Return a script that runs the lines of the blocks, and marks the end of the output of each."""
    script = ["set -eu"]
    for line in (line for block in blocks for line in block.lines):
        command = f"! {{ {line.command}; }}" if line.how == "fails" else line.command
        if command.startswith("kvstore-loadtest"):
            command += f" || [ $? = {SPOILED} ]"
        script += [command, f"printf '\\n{DONE}\\n'"]
    return "\n".join(script)
