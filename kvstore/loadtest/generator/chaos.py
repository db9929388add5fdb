"""Performs a chaos plan on a local cluster and records when. Blocking; runs in a greenlet beside the load."""

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
from kvstore.loadtest.generator.chaos_plan import ADD_PARTITION, KILL, SNAPSHOT, START, ChaosFault, plan
from kvstore.loadtest.generator.options import Options
from kvstore.loadtest.report.figures import Event

if TYPE_CHECKING:
    from kvstore.devcluster.local import LocalCluster

READY_S = 60.0
COMMAND_S = 900.0
"""A snapshot yields to all other work, so on a busy machine it takes long."""
POLL_S = 0.25


def chaos_of(options: Options) -> Chaos:
    """Return the chaos of a run. Raises ValueError if chaos would hit a cluster other than the measured one, or if the
    run is too short."""
    if options.store or options.resp:
        raise ValueError("--shape chaos kills nodes of --data-dir and measures that cluster: omit --store and --resp")
    faults = plan(options.node_ids(), options.seconds, options.warmup, options.seed)
    try:
        cluster = _local(options.data_dir)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--shape chaos starts nodes: no module {error.name}: {install_hint('node', 'local', 'loadtest')}"
        ) from None
    return Chaos(cluster, options.data_dir, options.report.parent, faults)


def _local(data_dir: Path) -> LocalCluster:
    """Import the local cluster on demand: a load test of a remote cluster does not need a node's libraries."""
    from kvstore.devcluster.local import LocalCluster

    return LocalCluster(data_dir)


class Chaos:
    """Performs a chaos plan. Each fault becomes an event. A fault that was tried and failed is a failed event; one that
    was not tried is skipped. If no node was killed at all, skipped faults count as failed, because the run has measured
    a cluster without faults."""

    def __init__(self, cluster: LocalCluster, data_dir: Path, scratch: Path, faults: Sequence[ChaosFault]) -> None:
        self.events: list[Event] = []
        self._cluster = cluster
        self._data_dir, self._scratch, self._faults = data_dir, scratch, faults
        self._running: list[gevent.Greenlet] = []
        self._killed: set[str] = set()
        """Nodes that are down at the moment."""
        self._kills = 0
        self._skipped: list[Event] = []
        self._snapshots: list[Path] = []
        self._found: frozenset[str] | None = None
        """The partitions before one was added; None if none was added."""
        self._added: frozenset[str] = frozenset()
        """The partition that was added; empty if its id is not known."""
        self._is_over = Flag()

    def start(self, began: float) -> None:
        """Perform each fault at its time after `began`, in wall clock, until `finish`."""
        self._running.append(gevent.spawn(self._perform, began))

    def _perform(self, began: float) -> None:
        doing: dict[str, Callable[[ChaosFault], None]] = {
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
        """Stop. Start the nodes that are down, wait for commands in progress, and restore the cluster: remove the added
        partition and the snapshots. Anything that fails becomes an event."""
        self._is_over.set()
        gevent.joinall(self._running[:1])  # otherwise it might kill a node that is started below
        for node in sorted(self._killed):
            self._start(
                ChaosFault(0.0, START, node)
            )  # a failure keeps neither another node down nor the report unwritten
        gevent.joinall(self._running, timeout=COMMAND_S)
        for each in self._running:
            if not each.successful():
                event = self._note("chaos failed")
                event.is_failed, event.outcome = True, repr(each.exception or TimeoutError(f"{COMMAND_S:g} s"))
        self._remove_added()
        for event in self._skipped:
            event.is_failed = not self._kills
        for snapshot in self._snapshots:  # not during the run, which this would disturb
            shutil.rmtree(snapshot, ignore_errors=True)

    def _kill(self, fault: ChaosFault) -> None:
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

    def _start(self, fault: ChaosFault) -> None:
        if fault.node not in self._killed:
            return
        event = self._note(f"start {fault.node}")
        try:
            self._reap(fault.node)
            self._cluster.start_node(fault.node)
        except (OSError, ValueError, StoreError) as error:  # it stays in `_killed`, so that `finish` tries again
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
        """Reap a killed child of this process, which otherwise stays a zombie."""
        with suppress(ChildProcessError, TypeError):
            os.waitpid(self._cluster.load().node(name).pid or 0, os.WNOHANG)

    def _add_partition(self, fault: ChaosFault) -> None:
        """Add a partition, unless the existing partitions are unknown: nobody could tell later which one to remove."""
        found = self._partitions_or_none()
        if found is None:
            event = self._note(fault.what)
            event.is_failed, event.outcome = True, "not tried: `ring plan` did not list the partitions"
            return
        self._found = found
        self._running.append(gevent.spawn(self._watch_adding, self._note(fault.what), found))

    def _watch_adding(self, event: Event, before: frozenset[str]) -> None:
        """Keep the id of the added partition if the command prints it. Others may add partitions, too."""
        output = self._watch_command(event, ("ring", "add", "--count", "1", "--wait", "--json"))
        with suppress(ValueError, KeyError, TypeError):
            self._added = _partitions_in(output) - before

    def _partitions_or_none(self) -> frozenset[str] | None:
        """Return the partitions of the ring, or None if they cannot be read."""
        try:
            answer = _run("ring", "plan", "--json", "--data-dir", str(self._data_dir))
            return _partitions_in(answer.stdout)
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            return None

    def _remove_added(self) -> None:
        """Remove the added partition after the run. It takes a while, because the partition's keys move back first."""
        if self._found is None:
            return
        now = self._partitions_or_none()
        if now is None:
            event = self._note("remove the added partition")
            event.is_failed, event.outcome = (
                True,
                "not tried: `ring plan` did not list the partitions; the added one may still exist",
            )
            return
        for partition in sorted(now & self._added if self._added else now - self._found):
            event = self._note(f"remove partition {partition}")
            self._watch_command(event, ("ring", "remove", partition, "--wait"))

    def _snapshot(self, fault: ChaosFault) -> None:
        target = self._scratch / f"snapshot-{int(time.time())}"
        self._snapshots.append(target)
        self._command(fault.what, "snapshot", "create", "--to", str(target))

    def _command(self, what: str, *words: str) -> None:
        """Run a command of kvstore in the background."""
        self._running.append(gevent.spawn(self._watch_command, self._note(what), words))

    def _watch_command(self, event: Event, words: Sequence[str]) -> str:
        """Return the output of the command; empty if it failed."""
        try:
            answer = _run(*words, "--data-dir", str(self._data_dir))
        except subprocess.TimeoutExpired:
            event.is_failed, event.outcome = True, f"not done after {COMMAND_S:g} s"
            return ""
        event.ended = time.time()
        if answer.returncode:
            lines = (answer.stderr or answer.stdout).strip().splitlines()
            event.is_failed = True
            event.outcome = f"exit code {answer.returncode}: {lines[-1] if lines else 'no output'}"
            return ""
        event.outcome = f"done after {event.ended - event.at:.1f} s"
        return answer.stdout

    def _note(self, what: str) -> Event:
        event = Event(time.time(), what)
        self.events.append(event)
        print(f"chaos: {what}", file=sys.stderr, flush=True)
        return event


def _partitions_in(output: str) -> frozenset[str]:
    """Return the ids in the JSON document of a plan. Raises ValueError, KeyError, TypeError."""
    return frozenset(each["id"] for each in json.loads(output)["partitions"])


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-Pm", "kvstore", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
