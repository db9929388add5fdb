"""`kvstore snapshot nightly` without a cluster: its outcomes, and what it reports to whom."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import run_event
from kvstore.cli.main import main
from kvstore.errors import Corrupted, OutcomeUnknown, StoreError, Unavailable
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.legal_holds import LegalHold
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.planning import NotContinuable, SnapshotRequest
from tests.beside import served
from tests.spark.snapshots.made import EPOCH_MS, Change, full, incremental, some_log

DAY_S = 86_400
LEGAL = LegalHold(reason="case 17", placed_ms=1)


@dataclass
class Job:
    """Takes snapshots in place of a cluster; each night adds ten changes."""

    store: DirectoryStore
    log: list[Change] = field(default_factory=list)
    taken: int = 0
    fails: list[BaseException] = field(default_factory=list)

    def create(self, _: object, wanted: SnapshotRequest, *rest: object) -> Manifest:
        if self.fails:
            raise self.fails.pop(0)
        self.taken += 1
        name = f"s{self.taken:03d}"
        if wanted.parent is None:
            return full(self.store, name, self.log, hour=self.taken)
        return incremental(self.store, name, wanted.parent, self.log, hour=self.taken)

    def next_night(self) -> None:
        start = len(self.log)
        for number, change in enumerate(some_log(10, start=start)):
            time_ms = EPOCH_MS + (start // 10) * DAY_S * 1000 + number
            self.log.append(Change(change.key, change.value, change.sequence, time_ms))


@dataclass
class Night:
    code: int
    result: dict[str, Any]
    err: str

    @property
    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.result["snapshots"]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(DirectoryStore(tmp_path / "snapshots"))
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("kvstore.spark.snapshots.create.create", job.create)
    monkeypatch.setattr("kvstore.cli.snapshot_taking.runs_in_process", lambda *_: True)
    monkeypatch.setattr("kvstore.cli.snapshot_tools.cluster_of", lambda *_: (None, "cluster-1"))
    monkeypatch.setattr("kvstore.cli.snapshot_tools.record", lambda *_: None)
    return job


@pytest.fixture
def run(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Night]:
    def call(*options: object) -> Night:
        words = ["kvstore", "snapshot", "nightly", "--to", job.store.root, "--json", *options]
        monkeypatch.setattr(sys, "argv", [str(each) for each in words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Night(int(ended.value.code or 0), json.loads(out), err)

    return call


Run = Callable[..., Night]


def test_two_weeks_of_nights_take_full_ones_weekly_and_keep_chains(run: Run, job: Job) -> None:
    kinds = []
    for _ in range(15):
        job.next_night()
        night = run("--daily", 3, "--weekly", 0, "--monthly", 0)
        assert (night.code, night.result["outcome"], night.result["problems"]) == (0, "done", [])
        kinds.append("+".join(night.kinds))
    assert kinds == ["full", *["incremental"] * 6, "incremental+full", *["incremental"] * 6, "incremental+full"]
    # nights 13 and 14 need the full snapshot of night 7, and all between; night 15's is new
    assert len(job.store.ids()) == 9
    assert night.result["pruned"]["kept"]["s017"] == ["newest", "daily 2023-11-28"]


def test_night_that_cannot_continue_takes_a_full_one_and_says_why(run: Run, job: Job) -> None:
    job.next_night()
    run()
    job.fails = [NotContinuable("the log does not reach back")]
    job.next_night()
    night = run()
    assert (night.code, night.kinds) == (0, ["full"])
    assert night.result["warnings"] == ["taking a full snapshot instead: the log does not reach back"]


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (Unavailable("no server answers"), "unavailable", 3),
        (OutcomeUnknown("no server answered within 30 s"), "unavailable", 3),
        (StoreError("no"), "failed", 1),
        (OSError(28, "No space left on device"), "failed", 1),
        (Corrupted("a file is not as its task wrote it"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_each_outcome_has_its_exit_code(run: Run, job: Job, error: BaseException, outcome: str, code: int) -> None:
    job.fails = [error]
    job.next_night()
    night = run()
    assert (night.code, night.result["outcome"], night.result["exit_code"]) == (code, outcome, code)
    assert night.result["error"]
    assert night.result["error"] in night.err


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_removes_nothing_and_brings_a_full_snapshot(run: Run, job: Job) -> None:
    """Sizes did not show it, so every night continued a chain that nobody could restore."""
    job.next_night()
    run()
    made = job.store.load("s001")
    damage(job.store.root / "s001" / made.files[0].path)
    job.next_night()
    night = run("--keep", 1, "--daily", 0, "--weekly", 0, "--monthly", 0)
    assert (night.code, night.result["outcome"], night.kinds) == (4, "damaged", ["incremental", "full"])
    assert night.result["problems"][0]["snapshot"] == "s001"
    assert night.result["pruned"] is None
    assert job.store.ids() == ["s001", "s002", "s003"]
    job.next_night()
    assert run().code == 0, "the next night continues the full one"


def test_missing_file_of_a_kept_snapshot_removes_nothing(run: Run, job: Job) -> None:
    job.next_night()
    run()
    made = job.store.load("s001")
    job.store.hold("s001", LEGAL)
    job.next_night()
    run("--full-days", 1)
    (job.store.root / "s001" / made.files[0].path).unlink()
    job.next_night()
    night = run("--keep", 1, "--daily", 0, "--weekly", 0, "--monthly", 0)
    assert (night.code, night.result["outcome"]) == (4, "damaged")
    assert "is missing" in (night.result["error"] or "")


# ── the run event ──


@dataclass
class Receiver:
    url: str
    status: int = 201
    delay_s: float = 0.0
    location: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            released.wait(receiver.delay_s)
            receiver.events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(receiver.status)
            if receiver.location:
                self.send_header("Location", receiver.location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/hook/s3cret")
    with served(server):
        try:
            yield receiver
        finally:
            released.set()


def test_run_event_has_the_result_and_the_new_snapshot(run: Run, job: Job) -> None:
    job.next_night()
    with receiving() as receiver:
        run()
        night = run("--notify", receiver.url)
    (event,) = receiver.events
    assert (night.code, night.result["warnings"], event["eventType"]) == (0, [], "COMPLETE")
    assert event["job"] == {"namespace": "kvstore://cluster-1", "name": "snapshot.nightly"}
    assert event["run"]["facets"]["kvstore_nightly"]["outcome"] == "done"
    (output,) = event["outputs"]
    assert output["name"] == f"{job.store.root}/s002"
    assert output["outputFacets"]["outputStatistics"]["rowCount"] == night.result["snapshots"][0]["rows"]


def test_failure_sends_its_reason(run: Run, job: Job) -> None:
    job.fails = [Unavailable("no server answers")]
    with receiving() as receiver:
        night = run("--notify", receiver.url)
    (event,) = receiver.events
    assert (night.code, event["eventType"]) == (3, "FAIL")
    assert event["run"]["facets"]["errorMessage"]["message"] == "no server answers"


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "is away", "redirects"])
def test_receiver_in_trouble_fails_no_night(run: Run, job: Job, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    monkeypatch.setattr(run_event, "SEND_S", 0.3)
    job.next_night()
    run()
    with receiving() as receiver:
        match trouble:
            case "refuses":
                receiver.status = 500
            case "hangs":
                receiver.delay_s = 60.0
            case "redirects":
                receiver.status, receiver.location = 302, receiver.url
        began = time.monotonic()
        host = "127.0.0.2" if trouble == "is away" else "127.0.0.1"
        night = run("--notify", receiver.url.replace("127.0.0.1", host))
    assert (night.code, night.result["outcome"]) == (0, "done")
    assert time.monotonic() - began < 20
    (warning,) = night.result["warnings"]
    assert warning.startswith("the run event could not be sent: 127.0.0.")
    assert warning in night.err
    assert "s3cret" not in night.err + json.dumps(night.result)


def test_wrong_address_of_the_receiver_is_wrong_usage(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("ftp://host/x", "http://user:word@host/x", "host/x"):
        monkeypatch.setattr(
            sys, "argv", ["kvstore", "snapshot", "nightly", "--to", str(job.store.root), "--notify", url]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code, "expected http://" in capsys.readouterr().err) == (2, True)
    assert not job.store.root.exists()


# ── metrics ──


def test_metrics_are_written_whatever_the_outcome(run: Run, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "kvstore.prom"
    job.next_night()
    run("--metrics-file", path)
    before = path.read_text()
    job.fails = [Unavailable("no server answers")]
    assert run("--metrics-file", path).code == 3
    after = path.read_text()
    assert "kvstore_snapshot_usable 1\n" in after
    assert [line for line in before.splitlines() if "complete_timestamp" in line] == [
        line for line in after.splitlines() if "complete_timestamp" in line
    ]
    night = run("--metrics-file", tmp_path / "absent" / "kvstore.prom")
    assert (night.code, "could not be written" in night.result["warnings"][0]) == (0, True)
