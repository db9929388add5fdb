"""The process that a drill disturbs from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from loadtest.drills.struck_node import write_ahead, write_block

PROGRAM = """
import sys, threading, time
from pathlib import Path
from kvstore.env.clock import SystemClock
from loadtest.drills.struck_node import install

install(Path(sys.argv[1]))
right_ms = time.time() * 1000
print(round((SystemClock().wall_ms() - right_ms) / 1000), flush=True)


def other_thread():
    while True:
        print("thread", flush=True)
        time.sleep(0.05)


threading.Thread(target=other_thread, daemon=True).start()
while True:
    time.sleep(0.05)
    print("loop", flush=True)
"""


def test_struck_node_blocks_its_loop_alone(tmp_path: Path) -> None:
    file = tmp_path / "n1.ahead"
    write_ahead(file, 3600.0)
    write_block(file, 60.0)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(file)], stdout=subprocess.PIPE, text=True)
    killer = threading.Timer(60.0, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert int(next(lines)) in range(3595, 3606)
        while next(lines) != "loop\n":
            pass
        os.kill(process.pid, signal.SIGUSR2)
        began, quiet = time.monotonic(), 0
        while quiet < 10:
            quiet = quiet + 1 if next(lines) == "thread\n" else 0
        assert time.monotonic() - began < 60.0
    finally:
        killer.cancel()
        process.kill()
        process.wait()
