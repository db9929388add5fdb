"""Command lines for messages: how this program is called from the current directory."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def how_to_start(data_dir: Path) -> str:
    """Return the command that starts the nodes of a local cluster that are down."""
    return f"{own_command()} up --detach{data_dir_option(data_dir)}"


def data_dir_option(data_dir: Path) -> str:
    """Return the option that names a local cluster's directory; empty for the default."""
    return "" if data_dir == Path("data") else f" --data-dir {shlex.quote(str(data_dir))}"


def own_command() -> str:
    """Return how to call this program: by name if the shell finds it, else by path."""
    own = Path(sys.executable).with_name("kvstore")
    found = shutil.which("kvstore")
    if (found is not None and Path(found).samefile(own)) or not own.exists():
        return "kvstore"
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
