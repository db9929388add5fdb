"""How quick this machine is before a load begins: what a wake-up of another process and a write to disk take.

    python -m kvstore.loadtest.pulse FILE SECONDS        # one line of JSON

Some thirty times a second a byte goes to a child process, which appends to FILE, syncs it and answers: about what a
store does for a write, without a store. It is over when the users start: a store that keeps the machine busier must
not excuse itself with that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SECONDS, PERIOD_S = 3.0, 0.03
PATIENCE_S = 30.0
"""A disk that takes longer than this on top has no pulse."""
RECORD = bytes(100)
QUANTILES = {"pulse_p50_ms": 0.50, "pulse_p95_ms": 0.95}


def measure(folder: Path, seconds: float = SECONDS) -> dict[str, float]:
    """The figures of the disk that `folder` is on; none if there are too few. Takes `seconds`."""
    file = folder / f"pulse-{os.getpid()}"
    command = [sys.executable, "-m", "kvstore.loadtest.pulse", str(file), str(seconds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds + PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return {}
    finally:
        file.unlink(missing_ok=True)
    found: dict[str, float] = json.loads(done.stdout or b"{}")
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
    until = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        begin = time.perf_counter()
        ours.send(b".")
        if not ours.recv(1):
            break
        times_s.append(time.perf_counter() - begin)
        time.sleep(PERIOD_S)
    print(json.dumps(figures(times_s)))


def _answer(asker: socket.socket, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while asker.recv(1):
            file.write(RECORD)
            os.fdatasync(file.fileno())
            asker.send(b".")


if __name__ == "__main__":
    main()
