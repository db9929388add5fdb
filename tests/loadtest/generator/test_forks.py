"""Processes that a load test starts during gRPC calls."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

STARTS = 80
SCRIPT = f"""
import locust  # makes the standard library cooperative, as `locust -f` does
import kvstore.loadtest.locustfile
import gevent.event, grpc, os, subprocess, sys

def call(channel, called):
    while True:
        try:
            channel.unary_unary("/a/b")(b"", timeout=0.05)
        except grpc.RpcError:
            called.set()

callers = [gevent.event.Event() for _ in range(15)]
for each in callers:
    gevent.spawn(call, grpc.insecure_channel("127.0.0.1:9"), each)
gevent.wait(callers)
command = [sys.executable, "-S", "-c", ""]
print(sum(subprocess.run(command, capture_output=True).returncode != 0 for _ in range({STARTS})), flush=True)
os._exit(0)
"""


def test_command_that_is_started_beside_grpc_calls_runs() -> None:
    """The fork handlers of gRPC start its threads in the child, and these abort when gevent closes the descriptors
    they poll."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stdout.split() == ["0"], done.stderr[-2000:]


def test_checkouts_locustfile_has_the_users_of_the_command() -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert [line.strip() for line in done.stdout.splitlines()[1:]] == ["GrpcUser", "RespUser"], done.stderr
