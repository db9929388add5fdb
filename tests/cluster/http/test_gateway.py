"""The HTTP/JSON gateway on real processes: the commands of docs/how-to/use-http.md word for word, keys at any node, and
a leader that is killed under writers that retry and a reader that reconnects."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.pages import Line, blocks
from tests.source import ROOT
from tests.stand_ins import ensure_programs
from tests.waiting import PATIENCE_S, wait_until_blocking

pytestmark = [pytest.mark.cluster]
CLIENT = "0123456789abcdef0123456789abcdef"
GONE = (OSError, HTTPException)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("gateway")) as started:
        yield started


def ask(
    cluster: Cluster, node: str, method: str, target: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, Message]:
    """Send a request. Return status, body and headers. Raises one of GONE."""
    connection = HTTPConnection(*cluster.address(node, "http"), timeout=20)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def documented() -> list[Line]:
    (block,) = [each for each in blocks("docs/how-to/use-http.md") if each.how == "tests/cluster/http/test_gateway.py"]
    return block.lines


def test_what_the_docs_say_is_typed_word_for_word(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_programs(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lines = documented()
    assert len(lines) > 15
    script, wanted = ["set -eu"], []
    for line in lines:
        command, says = line.command, line.text
        script.append(command.replace("127.0.0.1:8401", "{}:{}".format(*cluster.address("n1", "http"))))
        if says:
            wanted.append((command, says))
            script.append("printf '\\n--- done\\n'")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("--- done\n")
    for (command, says), said in zip(wanted, parts, strict=False):
        assert says.lower() in said.lower(), f"{command}\n{said}"
    assert len(parts) == len(wanted) + 1


def test_each_node_serves_each_key_at_each_endpoint(cluster: Cluster) -> None:
    """Most of the requests are forwarded to other nodes."""
    with Client(cluster.url) as client:
        for number in range(12):
            key, node = f"k/{number}", cluster.ids[number % 3]
            status, _, headers = ask(cluster, node, "PUT", f"/v1/keys/{key}", b"%d" % number)
            assert status == 200
            item = client.get(key.encode())
            assert item is not None
            assert (item.value, f'"{item.version}"') == (b"%d" % number, headers["ETag"])
            for other in cluster.ids:
                token = headers["Kvstore-Token"]
                for level in ("linearizable", "session"):
                    found = ask(cluster, other, "GET", f"/v1/keys/{key}?level={level}", Kvstore_Token=token)
                    assert found[:2] == (200, b"%d" % number)
    page = json.loads(ask(cluster, "n3", "GET", "/v1/keys?prefix=k/&limit=1000")[1])
    assert [each["key"] for each in page["items"]] == sorted(f"k/{number}" for number in range(12))


class Reader:
    """Follows a key from node to node, and continues after the last event."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self.shown: list[int] = []
        """Versions that the reader was shown."""
        self.has_begun = threading.Event()
        self.connections = 0
        self._cluster, self._key = cluster, key
        self._last_id = ""

    def run(self, over: threading.Event) -> None:
        nodes = self._cluster.ids
        while not over.is_set():
            node = nodes[self.connections % len(nodes)]
            self.connections += 1
            with suppress(*GONE):
                self._follow(node, over)
            over.wait(0.1)

    def _follow(self, node: str, over: threading.Event) -> None:
        connection = HTTPConnection(*self._cluster.address(node, "http"), timeout=5)
        try:
            headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
            connection.request("GET", f"/v1/watch?key={self._key}&heartbeat_ms=500", headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return
            event: dict[str, str] = {}
            while not over.is_set() and (line := answer.readline()):
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    event[name] = value
                    continue
                if event.get("event") == "change":
                    self.shown.append(json.loads(event["data"])["version"])
                if "id" in event:
                    self._last_id = event["id"]
                    self.has_begun.set()
                event = {}
        finally:
            connection.close()


def increment(cluster: Cluster, first: int, sequence: int, seen: str) -> dict[str, Any]:
    """Add 1 exactly once: send the same request to one node after another until there is an answer."""
    tries = 0

    def try_next() -> dict[str, Any] | None:
        nonlocal tries
        node = cluster.ids[(first + tries) % 3]
        tries += 1
        try:
            status, body, headers = ask(
                cluster, node, "POST", "/v1/increment/counted",
                Kvstore_Request=f"client={CLIENT}; sequence={sequence}; seen={seen}",
            )  # fmt: skip
        except GONE:
            return None
        if status in (429, 503, 504):
            return None
        assert status == 200, body
        return {**json.loads(body), "seen": headers["Kvstore-Time-Ms"]}

    answers: list[dict[str, Any]] = []
    wait_until_blocking(
        lambda: answers or ((found := try_next()) and answers.append(found)) or answers, what="an answer"
    )
    return answers[0]


# docs/protocol.md P16, F5
def test_writes_are_applied_and_watched_once_when_a_leader_is_killed(cluster: Cluster) -> None:
    cluster.wait_ready()
    _, _, headers = ask(cluster, "n1", "PUT", "/v1/keys/counted", b"0")
    seen, versions = headers["Kvstore-Time-Ms"], list[int]()
    before = int(headers["ETag"].strip('"'))
    reader = Reader(cluster, "counted")
    with beside(reader.run):
        assert reader.has_begun.wait(PATIENCE_S)
        killed = ""
        for sequence in range(1, 41):
            answer = increment(cluster, sequence, sequence, seen)
            assert answer["value"] == sequence
            seen = answer["seen"]
            versions.append(answer["version"])
            if sequence == 20:
                killed = cluster.wait_led()[partition_of(cluster, "counted")]
                cluster.kill(killed)
        cluster.start_node(killed)
        cluster.wait_until(lambda: reader.shown[-1:] == versions[-1:], "the last change is shown")
        # The change right before the watch may be shown, because the client did not report that it has seen it.
        assert [each for each in reader.shown if each != before] == versions
        cluster.wait_ready()
        for node in cluster.ids:
            assert ask(cluster, node, "GET", "/v1/keys/counted?level=strict")[:2] == (200, b"40")


def partition_of(cluster: Cluster, key: str) -> str:
    with Client(cluster.url) as client:
        client.get(key.encode())
        return client.cluster.partition_of(key.encode())
