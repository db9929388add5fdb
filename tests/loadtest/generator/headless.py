"""Locust without its web pages, as tests run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.devcluster.zookeeper import free_ports
from kvstore.loadtest.run import LOCUSTFILE
from tests.beside import beside
from tests.conftest import ROOT
from tests.waiting import PATIENCE_S

_MASTER = str(free_ports(1)[0])
BLOCK_S = 300.0
COMMAND = (
    *(sys.executable, "-m", "locust", "--headless", "--only-summary"),
    *("--master-port", _MASTER, "--master-bind-port", _MASTER),  # other processes can lead workers at the usual port
)


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a Locust process that must end with the block: if it does not end within PATIENCE_S after the block, or
    the block takes longer than BLOCK_S, the process is killed and the test fails."""
    with (
        subprocess.Popen(command, cwd=ROOT, text=True, **options) as process,
        beside(lambda over: over.wait(BLOCK_S) or process.kill()),
    ):
        try:
            yield process
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def run_locust(folder: Path, *words: str, file: Path = LOCUSTFILE) -> tuple[int, dict[str, Any], str, str]:
    """Return the exit code, the document, the page and the output."""
    report = folder / "report.html"
    command = [*COMMAND, "-f", str(file), "--report", str(report), *words]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BLOCK_S, check=False)
    said = f"{answer.stdout}\n{answer.stderr}"
    assert report.exists(), said
    return answer.returncode, json.loads(report.with_suffix(".json").read_text()), report.read_text(), said
