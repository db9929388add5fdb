"""What holds for every test: order, seeds and asyncio's debug mode. Markers and warnings are set in pyproject.toml."""

import gc
import logging
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
REAL_PROCESSES = {"needs_zookeeper", "needs_etcd", "cluster", "spark", "interop"}
LONGEST = (
    "tests/upgrade/",
    *(f"tests/cluster/{name}.py" for name in ("test_repair_drill", "access/test_walk", "seeing/test_secrets")),
    *(f"tests/cluster/{name}.py" for name in ("test_autorecovery", "secure/test_up")),
)
"""Files of minutes: one that began last would leave the other worker without work."""

# Examples are the same in each run, so that a red run can be repeated; `make drill` is where luck is wanted.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("drill", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("repeatable")


# A shell that runs the tests in its background has them, and all that they start, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nobody here goes by the authorities of the web, and each process that loads aiohttp would read all of them: a tenth of
# what a node takes to start.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)

# In debug mode it also says which turn of the loop took long: on a machine that stands still any turn does.
logging.getLogger("asyncio").setLevel(logging.ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1, help="what the `seed` fixture gives; a failure names it")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('seed')}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting the tests makes more than a million objects that stay. Looking through them for garbage again and
    again took a third of the time of it, and half a second at every full collection afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _uses_real_processes(item: pytest.Item) -> bool:
    return any(mark.name in REAL_PROCESSES for mark in item.iter_markers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes share cores and memory: their tests run last, the longest files of them first."""
    items.sort(key=lambda item: (_uses_real_processes(item), not item.nodeid.startswith(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """The tests of a file run in one worker, in order: they may share a cluster, and go on from where it stands.
    Simulated worlds are one test's own."""
    return Scheduling(config, log)


class Scheduling(LoadScopeScheduling):
    """See above."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith("tests/sim/") else nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Unit tests run in asyncio's debug mode; it is too slow for simulations and real clusters."""
    item.config.option.asyncio_debug = not (_uses_real_processes(item) or item.get_closest_marker("sim"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The one source of a test's randomness."""
    value: int = request.config.getoption("seed")
    return value
