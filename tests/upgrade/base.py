"""The last release, from which a rolling upgrade to this tree must be possible: its tag, and its tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

RELEASE = "0.1.0"
"""DO CHANGE with each release (CONTRIBUTING.md, How to release)."""
UNTAGGED = {"0.1.0": "3798a2e0fc6cbeb7e3b1c819803257be7961f02e"}
"""Commits of releases that have no tag."""
REVISION = UNTAGGED.get(RELEASE, f"v{RELEASE}")
ROOT = Path(__file__).parents[2]


class NoHistory(Exception):
    """The release's revision is not in this clone. The message says how to fetch it."""


def check_out(directory: Path) -> Path:
    """Write the release's package below `directory`, for the start of a node's PYTHONPATH. Raises NoHistory."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", REVISION, "kvstore"]
    try:
        packed = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (
            error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else error
        )
        raise NoHistory(
            f"expected revision {REVISION} (release {RELEASE}) in the history of {ROOT}, got: {why}; "
            "clone with all of the history (`git fetch --tags --unshallow`)"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed.stdout, check=True)
    return directory
