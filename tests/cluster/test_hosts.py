"""Three machines with two processes each: they serve, copies are on distinct machines, and a process or a machine may
be killed without a loss."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.client import Client
from kvstore.devcluster.zookeeper import free_ports, start_standalone
from kvstore.meta.connect import connect
from kvstore.meta.ledgers import LedgerStore
from kvstore.types import LedgerMetadata
from tests.commands import Done, kvstore
from tests.server.test_supervisor import Ear
from tests.waiting import PATIENCE_S, wait_until_blocking

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KVSTORE = [sys.executable, "-m", "kvstore"]
MACHINES, PROCESSES, PARTITIONS = ("n1", "n2", "n3"), 2, 6
NODES = [f"{machine}{process}" for machine in MACHINES for process in ("", ".2")]
LISTENERS = ("bookie", "resp", "grpc", "http")


class Hosts:
    """The supervisors of three machines on loopback, and their metadata store."""

    def __init__(self, folder: Path, metadata: str) -> None:
        self.folder, self.metadata = folder, metadata
        self.ports = {machine: first_ports() for machine in MACHINES}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for machine, ports in self.ports.items():
            lines = [f'{name} = "127.0.0.1:{port}"\n' for name, port in ports.items()]
            (folder / f"{machine}.toml").write_text(
                f'id = "{machine}"\nprocesses = {PROCESSES}\nzookeeper = "{metadata}"\n'
                f'data_dir = "{folder}/{machine}"\nsecret_file = "{folder}/secret"\n{"".join(lines)}'
                "[storage]\nsegment_bytes = 16777216\n[log]\nroll_entries = 50\n"
            )

    def start(self, machine: str, **environ: str) -> None:
        with (self.folder / f"{machine}.log").open("ab") as log:
            command = [*KVSTORE, "node", "run", "--config", str(self.folder / f"{machine}.toml")]
            self.running[machine] = subprocess.Popen(command, stderr=log, env={**os.environ, **environ})

    def stop(self, machine: str) -> int:
        process = self.running.pop(machine)
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def pid(self, node: str) -> int | None:
        supervisor = psutil.Process(self.running[node.partition(".")[0]].pid)
        for each in supervisor.children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if f"id={node}" in each.cmdline():
                    return each.pid
        return None

    def address(self, node: str, listener: str) -> str:
        machine, _, number = node.partition(".")
        return f"127.0.0.1:{self.ports[machine][listener] + int(number or 1) - 1}"

    @property
    def servers(self) -> str:
        return ",".join(self.address(node, "grpc") for node in NODES)

    def kvstore(self, *words: str) -> Done:
        return kvstore(*words, "--server", self.servers)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kvstore("status", "--json").stdout)
        return found

    def wait_healthy(self) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_healthy() -> bool:
            found.update(self.status())
            return found["health"]["grade"] == "healthy" and len(found["nodes"]) == len(NODES)

        wait_until_blocking(is_healthy, timeout_s=120, what=f"healthy: {self.kvstore('status').stdout}")
        return found

    def ledgers(self) -> list[LedgerMetadata]:
        async def read() -> list[LedgerMetadata]:
            store = await connect(self.metadata)
            try:
                ledgers = LedgerStore(store)
                return [(await ledgers.read(each))[0] for each in await ledgers.list_ids()]
            finally:
                await store.close()

        return asyncio.run(read())


def first_ports() -> dict[str, int]:
    """Return a free port for each listener, whose next port is free, too."""
    found: list[int] = []
    while len(found) < len(LISTENERS):
        free = set(free_ports(40))
        for port in sorted(free):
            if port + 1 in free and port - 1 not in found:
                found.append(port)
    return dict(zip(LISTENERS, found, strict=False))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    store = start_standalone(folder / "zookeeper")
    hosts = Hosts(folder, f"{store.address}/kvstore")
    try:
        named = [word for machine in MACHINES for word in ("--node", machine)]
        numbers = ("--processes", str(PROCESSES), "--partitions", str(PARTITIONS))
        secret = ("--secret-file", str(folder / "secret"))
        founded = kvstore("cluster", "init", "--zookeeper", hosts.metadata, *named, *numbers, *secret)
        assert founded.returncode == 0, founded.stderr
        for machine in MACHINES:
            hosts.start(machine)
        yield hosts
    finally:
        hosts.kill()
        store.kill()


@pytest.fixture
def hosts(started: Hosts) -> Hosts:
    """The machines, complete again after the previous test."""
    for machine in MACHINES:
        if machine not in started.running:
            started.start(machine)
    started.wait_healthy()
    return started


def machines(names: list[str] | tuple[str, ...]) -> set[str]:
    return {name.partition("-")[0].partition(".")[0] for name in names}


def write(hosts: Hosts, name: str, count: int = 60) -> dict[bytes, bytes]:
    """Write keys through all nodes, and return them."""
    items = {b"%s-%d" % (name.encode(), number): b"%d" % number for number in range(count)}
    with Client(f"kv://{hosts.servers}") as client:
        for key, value in items.items():
            client.put(key, value)
    return items


def missing(hosts: Hosts, items: dict[bytes, bytes]) -> list[bytes]:
    with Client(f"kv://{hosts.servers}") as client:
        found = {key: client.get(key) for key in items}
    return [key for key, value in items.items() if found[key] is None or found[key].value != value]


# docs/protocol.md H15
def test_copies_of_a_partition_and_a_ledger_are_on_distinct_machines(hosts: Hosts) -> None:
    items = write(hosts, "placed", 300)
    assert missing(hosts, items) == []
    found = hosts.status()
    replicas = [[each["server"] for each in partition["replicas"]] for partition in found["partitions"]]
    assert [len(machines(each)) for each in replicas] == [3] * PARTITIONS
    assert {server for each in replicas for server in each} == set(NODES)
    ensembles = [part.ensemble for ledger in hosts.ledgers() for part in ledger.fragments]
    assert ensembles
    assert all(len(machines(each)) == len(each) for each in ensembles)
    assert {bookie.partition("-")[0] for each in ensembles for bookie in each} == set(NODES)


def test_status_has_a_line_for_each_machine(hosts: Hosts) -> None:
    lines = hosts.kvstore("status").stdout.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("NODE"))
    rows = [line.split() for line in lines[header + 1 : header + 1 + len(MACHINES)]]
    assert [row[:3] for row in rows] == [[machine, str(PROCESSES), "ready"] for machine in MACHINES]
    assert lines[header + 1 + len(MACHINES)] == ""


def test_killed_process_returns_and_its_partitions_stay_available(hosts: Hosts) -> None:
    items = write(hosts, "killed")
    led = hosts.status()["partitions"][0]
    victim = led["leader"]
    other = next(each for each in NODES if each != victim and machines([each]) == machines([victim]))
    before, sibling = hosts.pid(victim), hosts.pid(other)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    items |= write(hosts, "after the kill")
    assert missing(hosts, items) == []
    wait_until_blocking(lambda: hosts.pid(victim) not in (None, before), what=f"{victim} runs again")
    found = hosts.wait_healthy()
    assert hosts.pid(other) == sibling
    assert next(each for each in found["partitions"] if each["id"] == led["id"])["served"]
    assert missing(hosts, items) == []


def test_lost_machine_loses_no_acknowledged_write(hosts: Hosts) -> None:
    """All processes of a machine are killed at once, while two machines have the only other copies."""
    items = write(hosts, "before the loss")
    supervisor = hosts.running.pop("n3")
    supervisor.kill()
    supervisor.wait()
    items |= write(hosts, "during the loss")
    assert missing(hosts, items) == []
    newest = [ledger.fragments[-1].ensemble for ledger in hosts.ledgers()]
    assert all(len(machines(each)) == len(each) for each in newest)
    hosts.start("n3")
    hosts.wait_healthy()
    assert missing(hosts, items) == []


def test_processes_of_a_machine_without_a_spare_are_not_drained(hosts: Hosts) -> None:
    """The second process could take the replicas of the first, but a machine is drained as a whole or not."""
    drained = hosts.kvstore("node", "drain", "n1", "n1.2", "--json")
    assert drained.returncode == 1
    assert all("no other server can take" in each["replicas_left"] for each in json.loads(drained.stdout))
    assert json.loads(hosts.kvstore("ring", "status", "--json").stdout)["draining"] == []
    undrained = hosts.kvstore("node", "undrain", "n1", "n1.2", "--json")
    assert json.loads(undrained.stdout)["nodes"] == {"n1": "serves", "n1.2": "serves"}


def test_machine_stops_in_time_and_reports_readiness_once_for_all(hosts: Hosts) -> None:
    assert hosts.stop("n1") == 0
    assert "killing what has not stopped" not in (hosts.folder / "n1.log").read_text()
    ear = Ear(f"@kvstore-hosts-{os.getpid()}")
    try:
        hosts.start("n1", NOTIFY_SOCKET=ear.address, WATCHDOG_USEC="600000")
        wait_until_blocking(lambda: "READY=1\nSTATUS=ready" in ear.messages, what="READY=1")
        assert all(
            kvstore("node", "check", "--config", str(hosts.folder / f"{each}.toml")).returncode == 0
            for each in MACHINES
        )
        assert ear.said.count("READY=1\nSTATUS=ready") == 1
        assert any("n1.2: starting" in each for each in ear.said)
        wait_until_blocking(lambda: ear.messages.count("WATCHDOG=1") > 2, what="pings")
        for node in ("n1", "n1.2"):
            assert kvstore("get", "--server", hosts.address(node, "grpc"), "placed-1").returncode == 0
        assert hosts.stop("n1") == 0
        assert "STOPPING=1\nSTATUS=stopping" in ear.said
    finally:
        ear.close()
