"""The rare paths through the store's own code: which paths runs have taken, and in which runs they are likely.

A path is a call of a method, possibly only a call with a certain result. Runs of random seeds must take the common
paths. For each rare path there are knobs under which a few seeds take it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore.bookie.facts import Facts
from kvstore.bookie.refusals import BookieRefusals
from kvstore.errors import RequestExpired
from kvstore.partition.election.replica import Replica
from kvstore.partition.leading.leader import Leader
from kvstore.partition.partition import Partition
from kvstore.partition.state.retry_table import RetryTable
from kvstore.partition.state.transfer import StateImport
from kvstore.server.routing.router import Router
from kvstore.wal import opener
from kvstore.wal.copies.copying import Copying
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.leading.trim import Trimmer
from kvstore.wal.takeover import LogTakeover
from kvstore.wal.writer import LedgerWriter
from tests.sim.judges.probes import declare, probe

Taken = Callable[[Any], bool]
"""Return True if a call with this result, or with this exception, takes the path."""


@dataclass(frozen=True, slots=True)
class CodePath:
    """A method of the code under test. A rare path also has the knobs under which it is taken."""

    owner: Any
    """A class, or a module that calls a function by its own name for the function."""
    method: str
    taken: Taken = lambda _result: True
    faults: tuple[str, ...] = ()
    hints: dict[str, Any] = field(default_factory=dict)

    @property
    def is_rare(self) -> bool:
        return bool(self.faults)


def _is_true(result: Any) -> bool:
    return bool(result) and not isinstance(result, BaseException)


def _is_something(result: Any) -> bool:
    return result is not None and not isinstance(result, BaseException)


def _is_expired(result: Any) -> bool:
    return isinstance(result, RequestExpired)


ZOMBIES = ("metadata_cut", "session_expiry", "pause_leader_beyond_its_session")
RARELY = {"chaos_s": 20.0, "pace_s": 8.0, "load.pause_s": 0.2}
CODE_PATHS: dict[str, CodePath] = {
    "a takeover begins": CodePath(LogTakeover, "_attempt"),
    "a lease is waited out": CodePath(LogTakeover, "_wait_out"),
    "a tail is written back": CodePath(opener._Run, "_write_back"),
    "an ensemble changes": CodePath(LedgerWriter, "_resume"),
    "a ledger is rolled": CodePath(LeaderLog, "_switch"),
    "an operation waits for a leader": CodePath(Router, "_wait"),
    "a retry is answered from the table": CodePath(RetryTable, "find", _is_something),
    "a replica may not open the log": CodePath(Replica, "_drop_lead"),
    "a read is appended for": CodePath(Leader, "_turn"),
    "the log is trimmed": CodePath(Trimmer, "trim", _is_true),
    "copies are recreated": CodePath(Copying, "_give"),
    "a release record saves the wait": CodePath(
        LogTakeover, "_is_released", _is_true, ("hand_over", "rolling_restart")
    ),
    "a recovery replaces a bookie": CodePath(
        opener._Run, "_replace", faults=("kill_leader", "isolate", "cut_a_link"), hints={"nodes": 5}
    ),
    "a snapshot is installed": CodePath(
        StateImport, "add", _is_true, ("wipe", "isolate"), {"log.roll_entries": 3, "partition.retention_ms": 0}
    ),
    "a request is too old": CodePath(RetryTable, "find", _is_expired, ZOMBIES, {"partition.retry_window_ms": 4000}),
    "an orphan is swept": CodePath(
        Trimmer, "_sweep", _is_true, ("kill_leader", "kill"), {"log.orphan_age_s": 2.0, "log.roll_entries": 2}
    ),
    "a bookie is full": CodePath(BookieRefusals, "no_space", faults=("full_disk",), hints={"segment_bytes": 8192}),
    "a bookie doubts a ledger": CodePath(Facts, "set_limbo", faults=("flip_bits", "kill")),
    "the lead is handed back": CodePath(Replica, "yield_lead", faults=("kill_leader",), hints=RARELY),
    "a replica answers by itself": CodePath(
        Partition, "_answer_here", faults=("cut_a_link",), hints={"load.readers": 2}
    ),
}
declare(*(f"path: {name}" for name in CODE_PATHS))


@contextmanager
def counting(code_paths: Mapping[str, CodePath] = CODE_PATHS) -> Iterator[None]:
    """Count the paths that are taken in the block, as probes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, code_path in code_paths.items():
            patch.setattr(
                code_path.owner,
                code_path.method,
                _counted(code_path, getattr(code_path.owner, code_path.method), f"path: {name}"),
            )
        yield


def _counted(code_path: CodePath, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def note(result: Any) -> None:
        if code_path.taken(result):
            probe(name)

    @functools.wraps(original)
    async def count_async(*args: Any, **kwargs: Any) -> Any:
        try:
            result = await original(*args, **kwargs)
        except BaseException as error:
            note(error)
            raise
        note(result)
        return result

    @functools.wraps(original)
    def count(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            note(error)
            raise
        note(result)
        return result

    return count_async if inspect.iscoroutinefunction(original) else count
