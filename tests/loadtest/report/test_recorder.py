"""The sum of the workers' measurements equals the measurements of a single process."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import pytest

from kvstore.loadtest.report.recorder import WRONG_MAX, Recorder, TimelineSecond


def measure(recorder: Recorder, seed: int, count: int = 500) -> None:
    random = Random(seed)
    for _ in range(count):
        intended = 1_000 + random.random() * 10
        if random.random() < 0.05:
            recorder.failed("grpc", "read", "Unavailable", intended=intended, ended=intended + 5)
            continue
        took = random.lognormvariate(-6, 1)
        recorder.done(
            "grpc", "read", intended=intended, ended=intended + took, service_s=took / 2, length=10, late_s=took / 4
        )


def figures(recorder: Recorder) -> list[object]:
    cells = {
        second: (cell.due, cell.done, cell.errors, cell.responses.get_total_count(), cell.responses.get_max_value())
        for second, cell in sorted(recorder.cells.items())
    }
    tallies = {
        key: (
            tally.errors,
            tally.bytes,
            [each.get_value_at_percentile(p) for each in (tally.responses, tally.services) for p in (1, 50, 99, 99.9)],
        )
        for key, tally in recorder.tallies.items()
    }
    late = [recorder.late.get_total_count(), recorder.late.get_value_at_percentile(99)]
    return [cells, tallies, recorder.error_counts, recorder.wrong, recorder.wrong_count, late]


def test_merged_workers_are_as_one_process() -> None:
    one, master = Recorder(), Recorder()
    for seed in range(4):
        measure(one, seed)
        worker = Recorder()
        measure(worker, seed, 500)
        worker.is_wrong(f"{seed}")
        one.is_wrong(f"{seed}")
        master.merge(worker.take())
    assert figures(master) == figures(one)


def test_each_measurement_is_reported_once() -> None:
    worker, master, one = Recorder(), Recorder(), Recorder()
    for seed in (1, 2):
        measure(worker, seed)
        measure(one, seed)
        master.merge(worker.take())
    master.merge(worker.take())
    assert figures(master) == figures(one)


def test_latencies_below_a_millisecond_are_distinguished() -> None:
    recorder = Recorder()
    for number in range(1, 1_001):
        recorder.done("resp", "read", intended=5.0, ended=5.0 + number * 1e-6, service_s=number * 1e-6)
    histogram = recorder.tallies["resp", "read"].responses
    assert histogram.get_value_at_percentile(50) == pytest.approx(500, abs=2)
    assert histogram.get_value_at_percentile(99) == pytest.approx(990, abs=2)


def test_late_operations_are_measured_from_their_due_time() -> None:
    recorder = Recorder()
    for number in range(20):  # a stall of two seconds, then all operations at once
        recorder.done("grpc", "read", intended=10.0 + number / 10, ended=12.0, service_s=0.001)
    tally = recorder.tallies["grpc", "read"]
    assert tally.responses.get_value_at_percentile(50) == pytest.approx(1_000_000, rel=0.01)
    assert tally.services.get_value_at_percentile(99) == pytest.approx(1_000, rel=0.01)
    assert [(recorder.cell(second).due, recorder.cell(second).done) for second in (10, 11, 12)] == [
        (10, 0),
        (10, 0),
        (0, 20),
    ]


def test_warm_up_is_in_the_timeline_and_in_no_table() -> None:
    recorder = Recorder(counted_from=11.0)
    recorder.done("grpc", "read", intended=10.5, ended=11.5, service_s=1)
    recorder.failed("grpc", "read", "Unavailable", intended=10.6, ended=11.6)
    assert recorder.tallies == {}
    assert (recorder.cell(10).due, recorder.cell(11).done, recorder.cell(11).errors) == (2, 1, 1)


def test_operations_never_begun_count_as_due() -> None:
    recorder = Recorder()
    recorder.abandoned([10.1, 10.2, 11.0])
    assert (recorder.cell(10).due, recorder.cell(11).due) == (2, 1)


def test_run_of_hours_loses_no_samples() -> None:
    recorder, hours = Recorder(), 8_000
    for second in range(hours):
        recorder.done("grpc", "read", intended=float(second), ended=second + 0.002, service_s=0.002)
    recorder.failed("grpc", "read", "Unavailable", intended=0.5, ended=1.5)
    recorder.done("grpc", "read", intended=0.5, ended=1.0, service_s=0.5)
    first = recorder.cell(0).responses
    assert (first.get_total_count(), first.get_max_value()) == (2, pytest.approx(500_000, rel=0.01))
    assert first.get_min_value() == pytest.approx(2_000, rel=0.01)
    whole = recorder.between(0, hours)
    assert (whole.due, whole.done, whole.errors, whole.responses.get_total_count()) == (
        hours + 2,
        hours + 1,
        1,
        hours + 1,
    )


def test_all_wrong_values_are_counted_and_some_described() -> None:
    master = Recorder()
    for _ in range(3):
        worker = Recorder()
        for number in range(40):
            worker.is_wrong(str(number))
        master.merge(worker.take())
    assert (master.wrong_count, len(master.wrong)) == (120, WRONG_MAX)


def test_busiest_process_is_the_one_that_counts() -> None:
    master = Recorder()
    for share in (0.5, 0.95, 0.2):
        worker = Recorder()
        for second in range(7):
            worker.used(float(second), second * share)
        master.merge(worker.take())
    assert master.busiest == 0.95


def test_busy_second_or_warm_up_is_no_saturation() -> None:
    recorder = Recorder(counted_from=100.0)
    for at, processor_s in ((80.0, 0.0), (99.0, 19.0), (100.0, 20.0), (101.0, 21.0), (104.0, 21.0)):
        recorder.used(at, processor_s)
    recorder.used(106.0, 21.8)
    assert recorder.busiest == pytest.approx(0.4, abs=0.01)


def test_reading_the_latest_seconds_changes_no_others() -> None:
    recorder = Recorder()
    for second in range(1_000):
        recorder.done("grpc", "read", intended=float(second), ended=second + 0.002, service_s=0.002)
    recorder.cells = TouchedCells(recorder.cells)
    assert recorder.between(990, 995).done == 5
    assert recorder.cells.touched == {990, 991, 992, 993, 994}


class TouchedCells(dict[int, TimelineSecond]):
    """Records the requested seconds."""

    def __init__(self, cells: dict[int, TimelineSecond]) -> None:
        super().__init__(cells)
        self.touched: set[int] = set()

    def get(self, second: int, default: Any = None) -> Any:
        self.touched.add(second)
        return super().get(second, default)


def test_processor_wait_is_the_share_of_the_worst_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.loadtest.report.recorder.queued_or_none", lambda: None)
    one, other, master = Recorder(counted_from=10.0), Recorder(counted_from=10.0), Recorder()
    for second in range(21):
        one.waited(second, 0.9 * min(second, 9) + 0.3 * max(second - 9, 0))
        other.waited(second, 0.1 * second)
    assert one.queued == pytest.approx(0.3)
    for each in (one, other):
        master.merge(each.take())
    assert master.queued == one.queued


def test_processor_wait_of_a_process_is_read_from_linux() -> None:
    """Two threads that are busy on one processor wait half of the time."""
    answer = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=60, check=True)
    assert float(answer.stdout) > 0.2, "seconds of one"


STARVED = """
import os, time
from kvstore.loadtest.report.recorder import queued_or_none
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()
until = time.time() + (1.5 if child == 0 else 1.0)
before = queued_or_none()
while time.time() < until:
    pass
if child == 0:
    os._exit(0)
print(queued_or_none() - before)
os.waitpid(child, 0)
"""
