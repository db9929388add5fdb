"""Locust without its pages, as tests run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvstore_loadtest.run import LOCUSTFILE
from loadtest.bench.peers import free_ports
from tests.conftest import ROOT

_MASTER = str(free_ports(1)[0])
COMMAND = (
    *(sys.executable, "-m", "locust", "--headless", "--only-summary"),
    *("--master-port", _MASTER, "--master-bind-port", _MASTER),  # others may lead workers at the usual one
)


def run_locust(folder: Path, *words: str, file: Path = LOCUSTFILE) -> tuple[int, dict[str, Any], str, str]:
    """Exit code, document, page, and what was said."""
    report = folder / "report.html"
    command = [*COMMAND, "-f", str(file), "--report", str(report), *words]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    said = f"{answer.stdout}\n{answer.stderr}"
    assert report.exists(), said
    return answer.returncode, json.loads(report.with_suffix(".json").read_text()), report.read_text(), said
