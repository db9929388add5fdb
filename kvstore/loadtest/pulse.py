"""Measure how fast this machine is before a load begins: the time to wake another process and write to disk.

    python -m kvstore.loadtest.pulse FILE SECONDS        # one line of JSON

About thirty times a second, the parent sends a byte to a child process, which appends to FILE, syncs it and replies. A
store does about the same for a write. The measurement ends before the users start, so that a store cannot excuse its
latencies by the load that it puts on the machine.
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
"""Extra seconds until the measurement is abandoned, without figures, because the disk is too slow."""
RECORD = bytes(100)
QUANTILES = {"pulse_p50_ms": 0.50, "pulse_p95_ms": 0.95}


def measure(folder: Path, seconds: float = SECONDS) -> dict[str, float]:
    """Return the figures of the disk that `folder` is on, in about `seconds`. Empty if there are too few samples."""
    file = folder / f"pulse-{os.getpid()}"
    command = [sys.executable, "-Pm", "kvstore.loadtest.pulse", str(file), str(seconds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds + PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return {}
    finally:
        file.unlink(missing_ok=True)
    found: dict[str, float] = json.loads(done.stdout or b"{}")
    return found


def figures(times_s: list[float]) -> dict[str, float]:
    """Return the quantiles in milliseconds. Empty if there are fewer than ten times."""
    ordered = sorted(times_s)
    if len(ordered) < 10:
        return {}
    return {name: round(ordered[int(share * len(ordered))] * 1000, 3) for name, share in QUANTILES.items()}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
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
