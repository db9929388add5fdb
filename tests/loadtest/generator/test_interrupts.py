"""SIGINT in a Locust process."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT
from tests.waiting import PATIENCE_S

INTERRUPTED = """
import os, signal, sys
import gevent
from kvstore.loadtest.generator.interrupts import interrupt_main_greenlet

interrupt_main_greenlet()

def work():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))
        print("worked", flush=True)
    except KeyboardInterrupt:
        print("interrupted at work", flush=True)

try:
    gevent.spawn(work).join()
    gevent.sleep(60)
except KeyboardInterrupt:
    print("main interrupted", flush=True)
"""


def test_sigint_interrupts_the_main_greenlet_and_no_other() -> None:
    """Raised inside gevent, it left Locust waiting forever for a greenlet that had ended."""
    command = [sys.executable, "-c", INTERRUPTED]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert answer.stdout.splitlines() == ["worked", "main interrupted"]
