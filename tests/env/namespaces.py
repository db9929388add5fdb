"""Commands in their own mount namespace, where this user may mount file systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN = ("--mount",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--mount")
COMMAND_S_MAX = 60.0


def need_mounts(directory: Path) -> None:
    """Skip the test if this kernel does not let the user mount file systems."""
    if not _runs(["mount", "-t", "tmpfs", "tmpfs", str(directory)]):
        pytest.skip("this kernel lets only root mount a file system")


def run_mounted(
    prepare: str, program: str, *arguments: str | Path, has_own_network: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `prepare`, shell lines with `arguments` as $1, $2, ..., and then a Python program with the same arguments, in
    a mount namespace that ends with it. `has_own_network`: also in a network namespace, which has only loopback."""
    shell = f'set -e\n{prepare}\nexec "$PYTHON" -c "$PROGRAM" "$@"'
    own = (*OWN, "--net") if has_own_network else OWN
    return subprocess.run(
        ["unshare", *own, "sh", "-c", shell, "sh", *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable, "PROGRAM": program},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S_MAX,
    )


def _runs(command: list[str]) -> bool:
    try:
        found = subprocess.run(["unshare", *OWN, *command], capture_output=True, check=False, timeout=COMMAND_S_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0
