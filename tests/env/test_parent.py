"""A process ends with the one that started it."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.waiting import wait_until_blocking

CHILD = """
import os, time
from kvstore.env.parent import be_killed_with_parent
be_killed_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_child_is_killed_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until_blocking(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="it has ended")
