"""Forks the nodes of test clusters from processes that have loaded the code, which saves half a second per node. Each
node is still a separate process with its own command line, session, environment and output. tests/cluster/test_up.py,
the tests of documented commands and all tests that run `kvstore up` start nodes as users do.

Python orders a set of bytes differently in each process, and replicas must agree nevertheless. So the nodes of a
cluster are forked from different processes.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PROCESSES = 3
ROOM = 4000
"""Maximum bytes of a command line, because the system shows one page."""
START_S = 60
SERVE = "from tests.forked import serve; serve()"


class Forks:
    """A process that forks nodes for this process, and ends with it."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "x" * ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )
        atexit.register(self._process.kill)

    def start(self, command: Sequence[str], environ: dict[str, str], output: Path) -> int:
        """Start a process that runs this `kvstore` command. Return its pid."""
        asked = {"command": command, "environ": environ, "output": str(output), "folder": os.getcwd()}
        with self._one_at_a_time:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], START_S)[0]:
                raise TimeoutError(f"no process for {' '.join(command)} after {START_S} s")
            return int(self._process.stdout.readline())


@cache
def forks(number: int) -> Forks:
    """Return one of PROCESSES."""
    return Forks()


def fits(command: Sequence[str]) -> bool:
    """Return True if such a process can be forked, because it runs the loaded code. Words with a space cannot be passed
    on."""
    return command[0] == sys.executable and " " not in "".join(command) and len(os.fsencode(" ".join(command))) < ROOM


def start(name: str, command: list[str], environ: dict[str, str], output: Path) -> int:
    """Start a node with this name. Return its pid."""
    return forks(sum(name.encode()) % PROCESSES).start(command, environ, output)


# ── the process that forks ────────────────────────────────────────────────────────────────────────────────────────────


def serve() -> None:
    """Fork a process for each line, until the input ends. Ended processes are not reaped, so that their pids are not
    reused: a run of all tests starts more processes than there are pids."""
    import gc

    gc.disable()
    import kvstore.__main__
    import kvstore.server.node

    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no other threads"
    while line := sys.stdin.readline():
        if os.fork() == 0:
            become(**json.loads(line))
            kvstore.__main__.main()
            return


def become(command: list[str], environ: dict[str, str], output: str, folder: str) -> None:
    """Take the state with which a new process would begin, and report that to the requester."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["kvstore", *command[command.index("kvstore") + 1 :]]
    show(command)
    os.write(1, b"%d\n" % os.getpid())
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for source, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, stream)
    os.close(nothing)
    os.close(log)


def show(command: Sequence[str]) -> None:
    """Have the system name these words as this process' command line: by them clusters know their nodes. Where the last
    byte of its place is another than 0, the line is what is there up to a 0 (proc(5), setproctitle(3))."""
    fields: list[Any] = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = os.fsencode(" ".join(command))
    ctypes.memmove(start, words.ljust(end - start - 1, b"\0") + b"x", end - start)
