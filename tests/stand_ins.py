"""Programs that documents tell people to type, for machines that do not have them."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

MODULES = {"redis-cli": "tests.redis_cli", "curl": "tests.curl"}


def ensure_programs(folder: Path) -> None:
    """Write what the machine lacks into the folder, which is to be in the PATH; a PYTHONPATH with us is needed, too."""
    for name, module in MODULES.items():
        if shutil.which(name) is None:
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
            program.chmod(0o700)
