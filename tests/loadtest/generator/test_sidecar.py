"""The sidecar returns what the client returns inside the users' own process, and measures its own times."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client import Level
from kvstore.errors import OutcomeUnknown
from kvstore.loadtest.generator.sidecar import Sidecar
from kvstore.loadtest.generator.sidecar_wire import CallRequest, CallResult, CallResults, Messages, message
from kvstore.loadtest.report.recorder import USE_S, Recorder
from kvstore.rpc.status import restore
from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread
from tests.conftest import ROOT

SCRIPT = """
import locust, gevent, os, signal, sys, time
from kvstore.client import Level
from kvstore.errors import ConditionFailed, OutcomeUnknown, StoreError, Unavailable
from kvstore.loadtest.generator.sidecar_client import SidecarClient
from kvstore.loadtest.generator.options import Options

sidecar = SidecarClient()
sidecar.wait_started()
sidecar.open(Options(store=sys.argv[1]).cluster)
at, level = time.time(), Level.LINEARIZABLE
version = sidecar.put(b"k", b"v", if_version=0)
sent, received = sidecar.times
assert at <= sent <= received <= time.time()
found = sidecar.get(b"k", level=level)
assert (found.value, found.version, sidecar.get(b"none", level=level)) == (b"v", version, None)
try:
    sidecar.put(b"k", b"w", if_version=0)
except ConditionFailed as error:
    assert error.version == version, error
else:
    raise AssertionError("a condition that is not met")
users = [gevent.spawn(sidecar.put, b"s%03d" % number, b"%d" % number) for number in range(200)]
gevent.joinall(users, raise_error=True)
scanned = list(sidecar.scan(b"s", b"t", limit=150, level=level))
assert [(key, item.value) for key, item in scanned] == [(b"s%03d" % n, b"%d" % n) for n in range(150)]
assert sidecar.processor_s > 0
os.kill(sidecar._process.pid, signal.SIGSTOP)
waiting = gevent.spawn(sidecar.get, b"k", level=level)
gevent.sleep(0)
os.kill(sidecar._process.pid, signal.SIGKILL)
waiting.join()
assert isinstance(waiting.exception, OutcomeUnknown), waiting.exception
try:
    sidecar.get(b"k", level=level)
except Unavailable:
    print("done", flush=True)
sidecar.close()
try:
    SidecarClient().open(Options(store="kv://127.0.0.1:9?timeout=500ms").cluster)
except StoreError as error:
    print("127.0.0.1:9" in str(error), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_sidecar_returns_results_and_errors_of_the_store() -> None:
    """In a process that gevent has patched, as Locust does."""
    with serving_in_a_thread(ModelCluster()) as servers:
        command = [sys.executable, "-c", SCRIPT, servers.patient_url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["done", "True"], done.stderr[-3000:]


class Broken:
    async def get(self, key: bytes, *, level: Level) -> None:
        raise RuntimeError("a fault of the client's")


async def test_exception_in_a_call_is_raised_to_its_user(caplog: pytest.LogCaptureFixture) -> None:
    """Its user waited until it was killed at the end of the run, and no report mentioned it."""
    written: list[bytes] = []
    sidecar = Sidecar(cast("Any", Broken()), cast("Any", SimpleNamespace(write=written.append)))
    sidecar.take(CallRequest(7, "get", b"k", level=Level.STALE.value))
    await asyncio.gather(*sidecar._tasks)
    await asyncio.sleep(0)  # the end of the turn, at which all of it is sent
    ((result,),) = [results.results for results in Messages(CallResults).feed(b"".join(written))]
    assert result.number == 7
    assert result.error is not None
    error = restore(*result.error)
    assert isinstance(error, OutcomeUnknown)
    assert "a fault of the client's" in str(error)
    assert "a call failed: get" in caplog.text


def test_messages_are_complete_however_they_are_split() -> None:
    sent = [
        [CallRequest(1, "put", b"k", value=bytes(300), if_version=0)],
        [CallRequest(2, "get", b"k"), CallRequest(3, "get", b"")],
    ]
    data = b"".join(map(message, sent))
    for size in (1, 3, 4, 100, len(data)):
        messages: Messages[list[CallRequest]] = Messages(list[CallRequest])
        found = [each for at in range(0, len(data), size) for each in messages.feed(data[at : at + size])]
        assert found == sent
    answers = CallResults([CallResult(1, 1.5, 2.5, [(b"k", b"v", 7)], ("R", "m", {"version": "7"}))], 0.5, None)
    assert list(Messages(CallResults).feed(message(answers))) == [answers]


def test_busy_or_starving_sidecar_counts_as_the_load_generator() -> None:
    recorder = Recorder()
    times = iter([(0.0, 0.0), (0.95 * USE_S, 0.5 * USE_S)])
    recorder.beside = lambda: next(times)
    recorder.sample(100.0, 0.0)
    recorder.sample(100.0 + USE_S, 0.1 * USE_S)
    assert recorder.busiest == 0.95
    assert recorder.queued is not None
    assert recorder.queued >= 0.5
