"""Runs the `kvstore` command with a wall clock that is wrong:
`python -m loadtest.drills.dated_node FILE node run --config …`.

FILE says by how many seconds it is ahead; none there: by nothing. It is read again while the command runs, so that the
date can jump. Clocks for durations are right.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.env.clock import SystemClock

LOOK_AGAIN_S = 0.05


def write_ahead(file: Path, ahead_s: float) -> None:
    """Set the clock of whatever runs by `file`, in one step."""
    new = file.with_suffix(".new")
    new.write_text(f"{ahead_s}\n")
    new.rename(file)


def install(file: Path) -> None:
    """From now on this process's wall clock is ahead by what `file` says."""
    right = SystemClock.wall_ms
    ahead_ms, looked_at = 0, float("-inf")

    def wall_ms(self: SystemClock) -> int:
        nonlocal ahead_ms, looked_at
        now = self.now()
        if now - looked_at > LOOK_AGAIN_S:
            looked_at = now
            ahead_ms = round(float(file.read_text()) * 1000) if file.exists() else 0
        return right(self) + ahead_ms

    SystemClock.wall_ms = wall_ms  # type: ignore[method-assign]


if __name__ == "__main__":
    from kvstore.cli.main import main

    install(Path(sys.argv.pop(1)))
    main()
