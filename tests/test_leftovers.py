"""The check that tests leave no thread and no process behind, in a run of pytest within this one."""

from __future__ import annotations

import pytest

from tests.leftovers import Leftovers

pytest_plugins = ["pytester"]


HEAD = """
import subprocess, threading
from concurrent.futures import ThreadPoolExecutor
import pytest
from conftest import over, processes
"""
CONFTEST = """
import threading
over, processes = threading.Event(), []

def pytest_unconfigure():
    over.set()
    for each in processes:
        each.kill()
        each.wait()
"""


def run(pytester: pytest.Pytester, code: str) -> tuple[dict[str, int], str]:
    """Run tests with the check. Return the counts of outcomes, and the output."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(HEAD + code)
    found = pytester.runpytest_inprocess("-p", "no:asyncio", plugins=[Leftovers(left_s=0.3)])
    return found.parseoutcomes(), found.stdout.str()


@pytest.mark.parametrize("is_daemon", [False, True])
@pytest.mark.parametrize("end", ["pass", "assert False"])
def test_thread_that_a_test_leaves_fails_it(pytester: pytest.Pytester, is_daemon: bool, end: str) -> None:
    code = f"""
def test_it():
    threading.Thread(target=over.wait, name="is-left", daemon={is_daemon}).start()
    {end}

def test_last():
    pass
"""
    outcomes, said = run(pytester, code)
    assert outcomes == ({"passed": 2, "errors": 1} if end == "pass" else {"failed": 1, "passed": 1, "errors": 1})
    assert "ERROR at teardown of test_it" in said
    assert "is-left\n" in said


def test_process_that_a_test_leaves_fails_the_last_test_of_the_file(pytester: pytest.Pytester) -> None:
    code = """
def test_it():
    processes.append(subprocess.Popen(["sleep", "60.125"]))

def test_last():
    pass
"""
    outcomes, said = run(pytester, code)
    assert outcomes == {"passed": 2, "errors": 1}
    assert "ERROR at teardown of test_last" in said
    assert "sleep 60.125" in said


def test_thread_that_a_fixture_leaves_fails_the_last_test_of_the_file(pytester: pytest.Pytester) -> None:
    code = """
@pytest.fixture(scope="module", autouse=True)
def started():
    threading.Thread(target=over.wait, name="is-left").start()

def test_it():
    pass

def test_last():
    pass
"""
    outcomes, said = run(pytester, code)
    assert outcomes == {"passed": 2, "errors": 1}
    assert "ERROR at teardown of test_last" in said


def test_threads_that_end_and_idle_workers_fail_no_test(pytester: pytest.Pytester) -> None:
    code = """
threads = ThreadPoolExecutor(1)

@pytest.fixture
def ends():
    yield
    over.set()

def test_it(ends):
    threading.Thread(target=over.wait).start()
    threads.submit(int).result()
    subprocess.Popen(["true"])
"""
    assert run(pytester, code)[0] == {"passed": 1}
