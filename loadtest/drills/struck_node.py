"""Runs the `kvstore` command in a process that a drill can strike from outside:
`python -m loadtest.drills.struck_node FILE node run --config …`.

FILE holds the number of seconds by which the process's wall clock is ahead; without the file the clock is right. The
process reads the file again while it runs, so that the wall clock can jump. Clocks for durations are right.

SIGUSR2 blocks the event loop for the number of seconds in FILE.block. Other threads keep running, as they do when the
loop waits for a disk or a pipe.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from kvstore.env.clock import SystemClock

RECHECK_S = 0.05


def write_ahead(file: Path, ahead_s: float) -> None:
    """Set the wall clock of the process that runs with `file`, in one step."""
    _replace(file, ahead_s)


def write_block(file: Path, seconds: float) -> None:
    """Set how long the next SIGUSR2 blocks the event loop of the process that runs with `file`."""
    _replace(_block_file(file), seconds)


def install(file: Path) -> None:
    """Make this process read `file` for its wall clock, and block its main thread on SIGUSR2."""
    right = SystemClock.wall_ms
    ahead_ms, looked_at = 0, float("-inf")

    def wall_ms(self: SystemClock) -> int:
        nonlocal ahead_ms, looked_at
        now = self.now()
        if now - looked_at > RECHECK_S:
            looked_at = now
            ahead_ms = round(float(file.read_text()) * 1000) if file.exists() else 0
        return right(self) + ahead_ms

    SystemClock.wall_ms = wall_ms  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(float(_block_file(file).read_text())))


def _block_file(file: Path) -> Path:
    return file.with_suffix(".block")


def _replace(file: Path, seconds: float) -> None:
    new = file.with_suffix(f"{file.suffix}.new")
    new.write_text(f"{seconds}\n")
    new.rename(file)


if __name__ == "__main__":
    from kvstore.cli.main import main

    install(Path(sys.argv.pop(1)))
    main()
