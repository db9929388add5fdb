"""The tutorial docs/tutorials/secure-cluster.md on five nodes with TLS, users and roles: each command of the page
has the result that the page describes. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from kvstore.client import Client
from kvstore.errors import NotAuthenticated, PermissionDenied
from tests.cluster.test_safe_by_default import Load, for_others, redis_of, serial_of
from tests.cluster.test_tls import Secured, secured_cluster
from tests.pages import Line, blocks
from tests.source import ROOT
from tests.typed import programs
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster, pytest.mark.spark]
PAGE = "docs/tutorials/secure-cluster.md"
PATIENCE_S = 240.0
"""Time limit of one command in seconds. A snapshot starts Spark."""
HEARD_S = 60.0
"""Time limit until every node applies a change. Each node learns of it separately."""
CHANGE = re.compile(r"kvstore (access found|(user|role|token) (add|grant|remove|revoke)) ")
TAKES = re.compile(r"kvstore \w+ (remove|revoke) ")
LOOK = re.compile(r"kvstore status|/metrics")
"""Commands whose output may need a moment: a ledger may be under-replicated now and then, and numbers are up to a
second old."""
REFUSED = re.compile(
    r"access found NAME|lacks the right|NOPERM|WRONGPASS|username-password|the token is unknown|error: 40[13]"
)
PATIENT = (("snapshot create", "snapshot create --nice 0"), (r"kvstore (get|put|scan) ", r"kvstore \1 --timeout 60 "))
"""Changes of the commands for a busy machine: a process with the lowest priority takes minutes to start, and five
seconds may be too few for five nodes."""


class Part(NamedTuple):
    """A step of the tutorial and its commands."""

    title: str
    steps: list[Line]


def parts_of_the_walk() -> list[Part]:
    """Return the parts. The first defines addresses and files, the second the shell functions."""
    found = [each for each in blocks(PAGE) if each.how == "tests/cluster/access/test_walk.py"]
    return [Part(each.heading.partition(". ")[2], each.lines) for each in found]


def patient(command: str) -> str:
    for pattern, instead in PATIENT:
        command = re.sub(pattern, instead, command)
    return command


class Walk:
    """The operator's machine: a folder, and a shell that knows the addresses of the cluster."""

    def __init__(self, secured: Secured, directory: Path, programs: Path, functions: Part) -> None:
        self.secured, self.directory = secured, directory
        cluster = secured.cluster
        resp = "-h {} -p {}".format(*cluster.address("n1", "resp"))
        self._where = {
            "NODES": ",".join("{}:{}".format(*cluster.address(node, "grpc")) for node in cluster.ids),
            "METADATA": cluster.file.zookeeper,
            "HTTP": "{}:{}".format(*cluster.address("n1", "http")),
            "REDIS": resp,
            "KVSTORE_TLS_CA": str(secured.ca),
            "KVSTORE_TLS_CERT": str(secured.of_client),
            "KVSTORE_TLS_KEY": str(secured.of_client),
        }
        path = f"{programs}:{os.environ['PATH']}"
        self._environ = {**os.environ, **self._where, "PATH": path, "PYTHONPATH": str(ROOT)}
        self._functions = "\n".join(step.command for step in functions.steps)
        self._has_taken = False
        """True if the last change removed a permission."""

    def names(self) -> set[str]:
        return set(self._where)

    def start(self, step: Line, out: Path) -> subprocess.Popen[bytes]:
        with out.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", f"{self._functions}\n{patient(step.command)}"],
                cwd=self.directory, env=self._environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def do(self, step: Line) -> None:
        """Run a command to its end. Retry while its node may not have applied the change before, and while numbers that
        change by themselves do not show the documented value. Raises AssertionError unless the command does what its
        line says."""
        looks: list[tuple[int, str]] = []

        def is_over() -> bool:
            looks.append(self._run(step))
            return self._is_as_said(step, *looks[-1]) or not self._may_change(step, *looks[-1])

        with suppress(TimeoutError):
            wait_until_blocking(is_over, timeout_s=HEARD_S, what=step.command)
        status, said = looks[-1]
        told = f"{step.command}\nwanted {step.how or 'success'} {step.text}, got status {status} and\n{said}"
        assert self._is_as_said(step, status, said), told
        if CHANGE.search(step.command):
            self._has_taken = TAKES.search(step.command) is not None

    def _run(self, step: Line) -> tuple[int, str]:
        out = self.directory / "out"
        process = self.start(step, out)
        try:
            status = process.wait(PATIENCE_S)
        finally:
            end(process)
        return status, out.read_text(errors="replace")

    def _is_as_said(self, step: Line, status: int, said: str) -> bool:
        return (status != 0) == (step.how == "fails") and step.text in said

    def _may_change(self, step: Line, status: int, said: str) -> bool:
        """Return True if the outcome may be different in a moment. A change is made once. An operation that succeeds
        although it was never permitted is a fault at once."""
        if CHANGE.search(step.command):
            return False
        if status == 0 and step.how == "fails":
            return self._has_taken
        return LOOK.search(step.command) is not None or REFUSED.search(said) is not None

    def password(self, user: str) -> str:
        return (self.directory / f"{user}.password").read_text().strip()

    def url(self, user: str) -> str:
        own = f"ca={self.secured.ca}&cert={self.secured.of_client}&key={self.secured.of_client}"
        return f"kvs://{user}:{self.password(user)}@{self._where['NODES']}?timeout=30s&{own}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    directory, nodes = tmp_path_factory.mktemp("walk"), ("n1", "n2", "n3", "n4", "n5")
    with secured_cluster(directory, *nodes, addressed=for_others, nodes=len(nodes)) as secured:
        machine = directory / "machine"
        machine.mkdir()
        with programs(directory) as found:
            yield Walk(secured, machine, found, parts_of_the_walk()[1])


def a_new_certificate(walk: Walk, part: Part) -> None:
    """Replace the files of the node n1 by those with other names, which the nodes have been given."""
    secured, (replaced, *others) = walk.secured, part.steps
    key, cert = "/etc/kvstore/n1.key", "/etc/kvstore/n1.pem"
    assert key in replaced.command
    assert cert in replaced.command
    secured.write_another(walk.directory / "new.key", walk.directory / "new.pem")
    step = Line(replaced.command.replace(key, str(secured.key)).replace(cert, str(secured.cert)), "", "")
    cluster = secured.cluster
    endpoints = [(node, endpoint) for node in cluster.ids for endpoint in ("resp", "grpc", "http")]
    before = {each: serial_of(secured, *each) for each in endpoints}
    with Load(secured, "acme", walk.password("acme"), b"acme/load-").running() as load:
        cluster.wait_until(lambda: load.has_gone_on([0, 0]), "work begins")
        walk.do(step)
        for each in endpoints:
            cluster.wait_until(
                lambda each=each: serial_of(secured, *each) != before[each], f"{each} shows the new certificate"
            )
        rounds = list(load.rounds)
        cluster.wait_until(lambda: load.has_gone_on(rounds), "work goes on")
    assert load.failures == []
    for each in others:
        walk.do(each)


def a_user_is_revoked(walk: Walk, part: Part) -> None:
    """Revoke a user who has an open connection at each endpoint that keeps connections."""
    watch, removed, *others = part.steps
    assert (watch.how, "user remove acme" in removed.command) == ("meanwhile", True)
    cluster, out = walk.secured.cluster, walk.directory / "watch"
    watching = walk.start(watch, out)
    try:
        with (
            Client(walk.url("acme")) as client,
            client.watch(prefix=b"acme/") as changes,
            redis_of(walk.secured, "n2", username="acme", password=walk.password("acme"), socket_timeout=60) as store,
        ):
            connection = store.connection_pool.get_connection()
            cluster.wait_until(
                lambda: (client.put(b"acme/seen", b"yes"), "acme/seen" in out.read_text())[1], "his watch is there"
            )
            assert next(iter(changes)).key == b"acme/seen"
            walk.do(removed)
            with pytest.raises(redis.ConnectionError):
                connection.read_response()
            with pytest.raises((NotAuthenticated, PermissionDenied)):
                for _ in changes:  # what he had written before may come yet
                    pass
            with pytest.raises((NotAuthenticated, PermissionDenied)):
                client.get(b"acme/1")
            cluster.wait_until(lambda: watching.poll() is not None, "his watch has ended")
        assert watching.returncode != 0
        # A watch that reconnected while its connection was being closed is refused as a login.
        wanted = watch.text.partition(": ")[2], "invalid username-password pair"
        assert any(each in out.read_text().splitlines()[-1] for each in wanted), out.read_text()
    finally:
        end(watching)
    for each in others:
        walk.do(each)


def test_tutorial_commands_print_what_the_page_says(walk: Walk) -> None:
    where, _, *parts = parts_of_the_walk()
    assert set(re.findall(r"(\w+)=", "\n".join(step.command for step in where.steps))) == walk.names()
    doing = {"Replace a certificate": a_new_certificate, "Revoke a user": a_user_is_revoked}
    titles = [part.title for part in parts]
    assert set(doing) < set(titles)
    assert titles[0] == "Make the first administrator"
    assert len(titles) >= 7, titles
    for part in parts:
        if part.title in doing:
            doing[part.title](walk, part)
        else:
            for step in part.steps:
                walk.do(step)
