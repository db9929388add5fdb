"""Rules for every test: order, seeds and the use of event loops. Markers and warnings are set in pyproject.toml."""

import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer

from kvstore.env.files.private import PRIVATE_UMASK
from kvstore.ring import HASHES, KeyHash
from tests.leftovers import Leftovers
from tests.loops import refuse_misuse
from tests.ring import rings
from tests.schedule import Scheduling, file_of, in_order
from tests.spark.jvm import give_up_jvm

ROOT = Path(__file__).parent.parent
RUN_S = 80 * 60
"""Time limit of a run. Two slow processors take an hour for all tests."""
SAID_MAX, LINE_MAX = 1000, 160
"""Characters."""
BROKE_LINES, FAILED_MAX = 4, 6

# Examples are the same in each run, so that a red run can be repeated; `make drill` is where luck is wanted.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("drill", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("repeatable")


# Rewritten asserts are compiled once. Without compiled files each worker takes ten seconds more to collect the tests,
# and each node that a test starts takes 0.6 s more.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that runs the tests in its background has them, and all that they start, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of servers live and die in one process here. A node raises what it may open itself.
_, files = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

# Keys and passwords that tests write are secrets, too. Tests of file modes set their own umask.
os.umask(PRIVATE_UMASK)

# No test uses the web's certificate authorities, and each process that loads aiohttp would read all of them: a tenth of
# a node's start.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)

# The Go programs of tests need no C. Without it, Go compiles less of its library, and links by itself.
os.environ.setdefault("CGO_ENABLED", "0")

refuse_misuse()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1, help="what the `seed` fixture gives; a failure names it")
    parser.addoption("--within", type=float, help="skip tests that would start so many seconds after the first")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('seed')}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the collected tests for the garbage collector. Collecting them makes more than a million objects that
    stay. To traverse them repeatedly took a third of the time, and half a second at every later full collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


# ── what a run says that does not come to its end ─────────────────────────────────────────────────────────────────────


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Stuck())
    config.pluginmanager.register(Leftovers())
    if within_s := config.getoption("--within"):
        config.pluginmanager.register(Within(within_s))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))


class Stuck:
    """Skips the other tests of a file after a wait of one test has timed out, because they share what it waited for.
    Spark files also share a JVM, which is abandoned; otherwise the first test of each later file would wait too."""

    def __init__(self) -> None:
        self._files: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "Timeout (>" in report.longreprtext:
            self._files.add(report.nodeid.partition("::")[0])
            if "spark" in report.keywords and (said := give_up_jvm()):
                report.sections.append(("what the JVM's threads did", said))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if file_of(item) in self._files:
            pytest.fail("not tried: a test of this file before it waited in vain", pytrace=False)


class Within:
    """The time limit of `make quick`, counted from the first test. Tests that would start later are skipped, and pytest
    counts them."""

    def __init__(self, within_s: float) -> None:
        self._within_s, self._ends = within_s, 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._ends = self._ends or time.monotonic() + self._within_s
        if time.monotonic() > self._ends:
            pytest.skip(f"would start later than {self._within_s:g} s after the first test")


class Failures:
    """Prints each failure at once, because pytest prints failures last, and not at all if it is aborted or killed. An
    aborted run repeats them briefly as its last lines, because often only the end of a long output is kept. A run that
    takes too long stops by itself."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._failed: list[str] = []
        self._broke: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            what = f"{report.when} of {report.nodeid} failed: {message[:SAID_MAX]}"
            self._failed.append(what)
            self._say(what)
        if time.monotonic() - self._began > RUN_S and (workers := self._config.pluginmanager.get_plugin("dsession")):
            workers.shouldstop = f"the tests have taken more than {RUN_S} s"

    def pytest_internalerror(self, excrepr: object) -> None:
        """Print a worker's failure first, and then the failure that it causes in the main process."""
        self._broke.append("\n".join(line[:LINE_MAX] for line in str(excrepr).splitlines()[-BROKE_LINES:]))
        failed = [what[:LINE_MAX].replace("\n", " ") for what in self._failed[-FAILED_MAX:]]
        self._say("\n".join(["pytest broke off:", self._broke[0], *self._broke[1:][-1:], *failed]))

    def _say(self, what: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        assert terminal is not None
        terminal.write(f"\n{what}\n")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed, the only source of a test's randomness."""
    value: int = request.config.getoption("seed")
    return value


@pytest.fixture(scope="module", params=HASHES.values(), ids=lambda each: each.name)
def key_hash(request: pytest.FixtureRequest) -> Iterator[KeyHash]:
    """Run each test that uses this fixture with each key hash, which the helpers of tests take from
    tests/ring/rings.py."""
    before, rings.key_hash = rings.key_hash, request.param
    yield rings.key_hash
    rings.key_hash = before


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore the loggers after a test, because logging is configured for the whole process and so for all later
    tests."""
    before = {each: (each.handlers[:], each.level, each.propagate) for each in all_loggers()}
    hooks = sys.unraisablehook, threading.excepthook
    yield
    sys.unraisablehook, threading.excepthook = hooks
    logging.captureWarnings(False)
    for logger in all_loggers():
        handlers, level, propagate = before.get(logger, ([], logging.NOTSET, True))
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def all_loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(each for each in known if isinstance(each, logging.Logger))]
