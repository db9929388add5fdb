"""How quick this machine is while a load is measured: what a wake-up of another process and a write to disk take.

    python -m loadtest.pulse FILE        # until its standard input ends; then one line of JSON

Ten times a second a byte goes to a child process, which appends to FILE, syncs it and answers: about what a store does
for a write, without a store. Latencies of a run divided by it can be compared with those of another hour.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 0.1
RECORD = bytes(100)
QUANTILES = {"pulse_p50_ms": 0.50, "pulse_p95_ms": 0.95}


class Pulse:
    """The measuring process, as long as a run takes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"pulse-{os.getpid()}"
        command = [sys.executable, "-m", "loadtest.pulse", str(self._file)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def finish(self) -> dict[str, float]:
        """The figures; none if there are too few."""
        said, _ = self._process.communicate()
        self._file.unlink(missing_ok=True)
        found: dict[str, float] = json.loads(said or b"{}")
        return found


def figures(times_s: list[float]) -> dict[str, float]:
    """In milliseconds; none of less than ten times."""
    ordered = sorted(times_s)
    if len(ordered) < 10:
        return {}
    return {name: round(ordered[int(share * len(ordered))] * 1000, 3) for name, share in QUANTILES.items()}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    ours, others = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _answer(others, Path(sys.argv[1]))
        os._exit(0)
    others.close()
    times_s = []
    while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
        begin = time.perf_counter()
        ours.send(b".")
        if not ours.recv(1):
            break
        times_s.append(time.perf_counter() - begin)
    print(json.dumps(figures(times_s)))


def _answer(asker: socket.socket, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while asker.recv(1):
            file.write(RECORD)
            os.fdatasync(file.fileno())
            asker.send(b".")


if __name__ == "__main__":
    main()
