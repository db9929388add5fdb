"""Does to a local cluster what a chaos plan says, and notes when. Blocking; runs in a greenlet beside the load."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import gevent
from gevent.event import Event as Flag

from kvstore.errors import StoreError
from kvstore.extras import install_hint
from kvstore.loadtest.generator.chaos_plan import ADD_PARTITION, KILL, SNAPSHOT, START, Fault, plan
from kvstore.loadtest.generator.options import Options
from kvstore.loadtest.report.figures import Event

if TYPE_CHECKING:
    from kvstore.devcluster.local import LocalCluster

READY_S = 60.0
COMMAND_S = 900.0
"""A snapshot gives way to everything else: on a busy machine it takes long."""
POLL_S = 0.25


def chaos_of(options: Options) -> Chaos:
    """The chaos of a run. Raises ValueError if it would meet another cluster than the measured one, or the run is too
    short."""
    if options.store or options.resp:
        raise ValueError("--shape chaos kills nodes of --data-dir, so that is what it measures: no --store, no --resp")
    faults = plan(options.node_ids(), options.seconds, options.warmup, options.seed)
    try:
        cluster = _local(options.data_dir)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--shape chaos starts nodes: no module {error.name}: {install_hint('node', 'local', 'loadtest')}"
        ) from None
    return Chaos(cluster, options.data_dir, options.report.parent, faults)


def _local(data_dir: Path) -> LocalCluster:
    """Imported when it is wanted: a load test of a cluster elsewhere needs no node's libraries."""
    from kvstore.devcluster.local import LocalCluster

    return LocalCluster(data_dir)


class Chaos:
    """Performs a plan. What it could not do is an event, too: failed if it was tried, else skipped. If no node was
    killed at all, what was skipped has failed: the run has measured a calm cluster."""

    def __init__(self, cluster: LocalCluster, data_dir: Path, scratch: Path, faults: Sequence[Fault]) -> None:
        self.events: list[Event] = []
        self._cluster = cluster
        self._data_dir, self._scratch, self._faults = data_dir, scratch, faults
        self._running: list[gevent.Greenlet] = []
        self._killed: set[str] = set()
        """Down just now."""
        self._kills = 0
        self._skipped: list[Event] = []
        self._snapshots: list[Path] = []
        self._found: frozenset[str] | None = None
        """The partitions before one was added; None: none was."""
        self._added: frozenset[str] = frozenset()
        """That one; none: it was not told which."""
        self._is_over = Flag()

    def start(self, began: float) -> None:
        """Perform each fault at its time after `began`, by the wall clock, until `finish`."""
        self._running.append(gevent.spawn(self._perform, began))

    def _perform(self, began: float) -> None:
        doing: dict[str, Callable[[Fault], None]] = {
            KILL: self._kill,
            START: self._start,
            ADD_PARTITION: self._add_partition,
            SNAPSHOT: self._snapshot,
        }
        for fault in self._faults:
            if self._is_over.wait(max(0.0, began + fault.at_s - time.time())):
                return
            doing[fault.what](fault)

    def finish(self) -> None:
        """Do no more, start what is down, wait for what is under way, and leave the cluster as it was found: with the
        partitions that it had, and without the snapshots. What has broken is an event of its own."""
        self._is_over.set()
        gevent.joinall(self._running[:1])  # else it might kill what is started here
        for node in sorted(self._killed):
            self._start(Fault(0.0, START, node))  # of which none keeps another down, nor the report from being written
        gevent.joinall(self._running, timeout=COMMAND_S)
        for each in self._running:
            if not each.successful():
                event = self._note("chaos broke")
                event.is_failed, event.outcome = True, repr(each.exception or TimeoutError(f"{COMMAND_S:g} s"))
        self._remove_added()
        for event in self._skipped:
            event.is_failed = not self._kills
        for snapshot in self._snapshots:  # not amid the run: that would disturb it once more
            shutil.rmtree(snapshot, ignore_errors=True)

    def _kill(self, fault: Fault) -> None:
        event = self._note(f"kill -9 {fault.node}")
        nodes = {node["id"]: node for node in self._cluster.status()["nodes"]}
        away = [name for name, node in sorted(nodes.items()) if not node["ready"]]
        if away:
            event.outcome = f"skipped: {', '.join(away)} not ready"
            self._skipped.append(event)
            return
        event.at = time.time()
        os.kill(nodes[fault.node]["pid"], signal.SIGKILL)
        self._killed.add(fault.node)
        self._kills += 1

    def _start(self, fault: Fault) -> None:
        if fault.node not in self._killed:
            return
        event = self._note(f"start {fault.node}")
        try:
            self._reap(fault.node)
            self._cluster.start_node(fault.node)
        except (OSError, ValueError, StoreError) as error:  # it stays among the killed: `finish` tries once more
            event.is_failed, event.outcome = True, f"not started: {error}"
            return
        self._killed.discard(fault.node)
        self._running.append(gevent.spawn(self._watch_start, event, fault.node))

    def _watch_start(self, event: Event, name: str) -> None:
        deadline = time.time() + READY_S
        while time.time() < deadline:
            if any(node["id"] == name and node["ready"] for node in self._cluster.status()["nodes"]):
                event.ended = time.time()
                event.outcome = f"ready after {event.ended - event.at:.1f} s"
                return
            gevent.sleep(POLL_S)
        event.is_failed, event.outcome = True, f"not ready after {READY_S:g} s"

    def _reap(self, name: str) -> None:
        """A killed child of ours stays a zombie until somebody asks about it."""
        with suppress(ChildProcessError, TypeError):
            os.waitpid(self._cluster.load().node(name).pid or 0, os.WNOHANG)

    def _add_partition(self, fault: Fault) -> None:
        """Add none where nobody could tell afterwards which one to remove."""
        found = self._partitions_or_none()
        if found is None:
            event = self._note(fault.what)
            event.is_failed, event.outcome = True, "not tried: `ring plan` did not tell the partitions"
            return
        self._found = found
        self._running.append(gevent.spawn(self._watch_adding, self._note(fault.what), found))

    def _watch_adding(self, event: Event, before: frozenset[str]) -> None:
        """Keep which one it is, where that is told: others may add partitions, too."""
        said = self._watch_command(event, ("ring", "add", "--count", "1", "--wait", "--json"))
        with suppress(ValueError, KeyError, TypeError):
            self._added = _partitions_in(said) - before

    def _partitions_or_none(self) -> frozenset[str] | None:
        """Those of the ring; None if it cannot be told."""
        try:
            answer = _run("ring", "plan", "--json", "--data-dir", str(self._data_dir))
            return _partitions_in(answer.stdout)
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            return None

    def _remove_added(self) -> None:
        """Not amid the run. Keys that a partition has taken go back first, so it takes a while."""
        if self._found is None:
            return
        now = self._partitions_or_none()
        if now is None:
            event = self._note("remove the added partition")
            event.is_failed, event.outcome = (
                True,
                "not tried: `ring plan` did not tell the partitions; it may still be there",
            )
            return
        for partition in sorted(now & self._added if self._added else now - self._found):
            event = self._note(f"remove partition {partition}")
            self._watch_command(event, ("ring", "remove", partition, "--wait"))

    def _snapshot(self, fault: Fault) -> None:
        target = self._scratch / f"snapshot-{int(time.time())}"
        self._snapshots.append(target)
        self._command(fault.what, "snapshot", "create", "--to", str(target))

    def _command(self, what: str, *words: str) -> None:
        """Run a command of ours in the background."""
        self._running.append(gevent.spawn(self._watch_command, self._note(what), words))

    def _watch_command(self, event: Event, words: Sequence[str]) -> str:
        """Returns what the command said; nothing if it failed."""
        try:
            answer = _run(*words, "--data-dir", str(self._data_dir))
        except subprocess.TimeoutExpired:
            event.is_failed, event.outcome = True, f"not done after {COMMAND_S:g} s"
            return ""
        event.ended = time.time()
        if answer.returncode:
            said = (answer.stderr or answer.stdout).strip().splitlines()
            event.is_failed, event.outcome = True, f"exit code {answer.returncode}: {said[-1] if said else 'no word'}"
            return ""
        event.outcome = f"done after {event.ended - event.at:.1f} s"
        return answer.stdout

    def _note(self, what: str) -> Event:
        event = Event(time.time(), what)
        self.events.append(event)
        print(f"chaos: {what}", file=sys.stderr, flush=True)
        return event


def _partitions_in(said: str) -> frozenset[str]:
    """The ids in a plan's document. Raises ValueError, KeyError, TypeError."""
    return frozenset(each["id"] for each in json.loads(said)["partitions"])


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
