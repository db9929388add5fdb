"""The order of a run of all tests, and which tests run at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.schedule import SPARKS_AT_ONCE, WAITING_AT_ONCE, Scheduling, file_of, in_order

UNITS = [f"tests/ring/test_{each}.py::test_it" for each in "abcdefgh"]
SIMULATED = [f"tests/sim/test_run.py::test_{each}" for each in "abcdefgh"]
REAL = [f"tests/cluster/test_{each}.py::test_it" for each in "abcdefgh"]


class Worker:
    """A worker that finishes a test on command."""

    shutting_down = False
    gateway = SimpleNamespace(id="worker")

    def __init__(self, tests: list[str]) -> None:
        self._tests = tests
        self.sent: list[int] = []
        self.done = 0

    @property
    def running(self) -> str:
        return self._tests[self.sent[self.done]] if self.done < len(self.sent) else ""

    def send_runtest_some(self, places: list[int]) -> None:
        self.sent += places

    def shutdown(self) -> None:
        self.shutting_down = True


def played(tests: list[str], workers: int) -> list[list[str]]:
    """Return which tests run at once, step by step. In each step all workers finish a test."""
    values: dict[str, Any] = {"tx": ["popen"] * workers}
    config: Any = SimpleNamespace(option=SimpleNamespace(loadscopereorder=False), getvalue=values.get)
    schedule: Any = Scheduling(config, None)  # type: ignore[arg-type]
    started = [Worker(tests) for _ in range(workers)]
    for each in started:
        schedule.add_node(each)
    for each in started:
        schedule.add_node_collection(each, tests)
    schedule.schedule()
    steps = []
    while running := [each for each in started if each.running]:
        steps.append([each.running for each in running])
        for worker in running:
            worker.done += 1
            schedule.mark_test_complete(worker, worker.sent[worker.done - 1])
    return steps


def test_tests_that_wait_run_beside_tests_that_compute() -> None:
    tests = [*UNITS, *SIMULATED, *REAL]
    steps = played(tests, WAITING_AT_ONCE + 1)
    waiting = [sum(each in REAL for each in step) for step in steps]
    assert waiting[0] == max(waiting) == WAITING_AT_ONCE
    assert [each for step in steps for each in step if each in UNITS] == UNITS, "what computes keeps its order"
    assert sorted(each for step in steps for each in step) == sorted(tests)


def test_all_workers_run_what_is_left() -> None:
    assert played(REAL, 4)[0] == [REAL[place] for place in (0, 1, 2, 3)]
    assert all(each in UNITS for each in played(UNITS, 4)[0])
    assert set(played([*UNITS[:1], *SIMULATED[:1], *REAL], 4)[-1]) <= set(REAL)
    assert set(played([*UNITS, *SIMULATED, *REAL[:1]], 4)[-1]) <= {*UNITS, *SIMULATED}
    assert played([*UNITS[:3], *SIMULATED[:1], *REAL[:2]], 1) == [
        [each] for each in (*UNITS[:3], *SIMULATED[:1], *REAL[:2])
    ]


def item(file: str, *markers: str) -> Any:
    marks = [SimpleNamespace(name=each) for each in markers]
    return SimpleNamespace(nodeid=f"{file}::test_it", iter_markers=lambda: marks)


def test_only_some_workers_start_a_jvm() -> None:
    sparks = [f"tests/spark/test_{each}.py::test_it" for each in "abcdefgh"]
    steps = played([*UNITS, *SIMULATED, *sparks, *REAL], WAITING_AT_ONCE + 1)
    assert [sum(each in sparks for each in step) for step in steps[:4]] == [SPARKS_AT_ONCE] * 4


def test_order_begins_with_unit_tests_and_starts_long_files_first() -> None:
    short, long = "tests/cluster/test_a.py", "tests/cluster/test_up.py"
    sparks = "tests/spark/test_a.py", "tests/spark/test_stream.py"
    unordered = [*(item(each, "cluster") for each in (short, long)), *(item(each, "spark") for each in sparks)]
    unordered += [item("tests/sim/test_run.py", "sim"), item("tests/ring/test_ring.py")]
    found = [file_of(each) for each in in_order(unordered)]
    assert found == ["tests/ring/test_ring.py", "tests/sim/test_run.py", *reversed(sparks), long, short]
