"""Builds and runs the load generator in closedloop/, a Go program that speaks the protocols of all measured stores."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer
from typing import NamedTuple

SOURCE = Path(__file__).parent / "closedloop"
BORDERS = ("begin\n", "end\n")
"""The lines at the beginning and at the end of the measured span."""
EXTRA_S = 60.0
"""Maximum time of a run besides its own length."""


class Request(NamedTuple):
    """The options of one run, as `closedloop -help` describes them."""

    protocol: str
    addresses: Sequence[str]
    op: str
    connections: int
    pipeline: int = 1
    channels: int = 0
    prefix: str = "key:"
    keys: int = 1_000_000
    seconds: float = 2.0
    warmup_s: float = 0.5
    seed: int = 1


class Figures(NamedTuple):
    """The result of one run."""

    rate: float
    """Successful operations per second."""
    p50_ms: float
    p99_ms: float
    operations: int
    errors: dict[str, int]


def build(folder: Path) -> Path:
    """Build the generator in a folder and return the program. Raises RuntimeError with the compiler's output, or
    FileNotFoundError without Go."""
    program = folder / "closedloop"
    go = shutil.which("go")
    if go is None:
        raise FileNotFoundError("Go is not installed")
    done = subprocess.run(
        [go, "build", "-o", str(program), "."], cwd=SOURCE, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"closedloop is not built: {done.stderr[-1_000:]}")
    return program


def run(program: Path, request: Request, at_border: Callable[[], object] = lambda: None) -> Figures:
    """Run the generator. `at_border` is called at the beginning and at the end of the measured span. Raises
    RuntimeError with the generator's message."""
    command = [str(program), "-addresses", ",".join(request.addresses)]
    for name in ("protocol", "op", "connections", "pipeline", "channels", "prefix", "keys", "seed"):
        command += [f"-{name}", str(getattr(request, name))]
    command += ["-measure", f"{request.seconds}s", "-warmup", f"{request.warmup_s}s"]
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        timer = Timer(request.warmup_s + request.seconds + EXTRA_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line in BORDERS:
                    at_border()
                else:
                    said += line
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}: {said[-1_000:]}")
    found = json.loads(said)
    return Figures(found["rate"], found["p50_ms"], found["p99_ms"], found["operations"], found["errors"])
