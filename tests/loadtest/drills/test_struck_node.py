"""The process that a drill disturbs from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from loadtest.drills.struck_node import write_ahead, write_block
from tests.beside import beside

PROGRAM = r"""
import os, queue, sys, threading, time
from pathlib import Path
from kvstore.env.clock import SystemClock
from loadtest.drills import struck_node

asked, released = queue.SimpleQueue(), threading.Event()


class Blocks:
    # stands for the module `time` in struck_node: a sleep ends when the other thread is asked to end it
    @staticmethod
    def sleep(seconds):
        os.write(1, b"blocked %g\n" % seconds)  # the signal may have interrupted a print of the main thread
        released.wait()


struck_node.time = Blocks
struck_node.install(Path(sys.argv[1]))
right_ms = time.time() * 1000
print(round((SystemClock().wall_ms() - right_ms) / 1000), flush=True)


def other_thread():
    for line in sys.stdin:
        print("thread", flush=True)
        if line == "release\n":
            released.set()
        asked.put(line)


threading.Thread(target=other_thread, daemon=True).start()
while True:
    print(f"loop {asked.get().strip()}", flush=True)
"""


def test_struck_node_blocks_its_loop_alone(tmp_path: Path) -> None:
    file = tmp_path / "n1.ahead"
    write_ahead(file, 3600.0)
    write_block(file, 60.0)
    command = [sys.executable, "-c", PROGRAM, str(file)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process,
        beside(lambda over: (over.wait(60.0), process.kill())),
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        say, lines = process.stdin.write, iter(process.stdout)
        assert int(next(lines)) in range(3595, 3606)
        say("one\n")
        assert [next(lines), next(lines)] == ["thread\n", "loop one\n"]
        os.kill(process.pid, signal.SIGUSR2)
        assert next(lines) == "blocked 60\n"
        say("two\nrelease\n")
        assert [next(lines), next(lines)] == ["thread\n"] * 2, "the loop answers nothing, and another thread does"
        assert [next(lines), next(lines)] == ["loop two\n", "loop release\n"]
