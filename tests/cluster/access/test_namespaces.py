"""Namespaces on real processes: the commands of docs/how-to/limit-tenants-with-namespaces.md word for word, refusals at
every endpoint, and usage to the byte after a leader's death, a change of the ring and a restart of every node."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.client import Client
from kvstore.errors import QuotaExceeded
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import kvstore
from tests.pages import Line, blocks
from tests.typed import programs

pytestmark = [pytest.mark.cluster]
KEYS_MAX = 40
PATIENT = "?timeout=60s"
"""Options of a client's URL for a test in which partitions change their leaders."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("namespaces")) as started:
        yield started


def command(cluster: Cluster, *words: str) -> Any:
    """Run a command and return its JSON document."""
    where = () if "--server" in words else ("--data-dir", str(cluster.local.data_dir))
    done = kvstore(*words, *where, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_used(cluster: Cluster, name: str, keys: int, size: int) -> None:
    """Wait until every server counts this usage."""

    def is_counted() -> bool:
        shown = [command(cluster, "namespace", "show", name, "--server", node.grpc) for node in cluster.file.nodes]
        return all((each["keys"], each["bytes"], each["counting"]) == (keys, size, []) for each in shown)

    cluster.wait_until(is_counted, f"{keys} keys and {size} bytes of {name} are counted")


def test_what_the_docs_say_is_typed_word_for_word(cluster: Cluster) -> None:
    (block,) = [each for each in blocks("docs/how-to/limit-tenants-with-namespaces.md") if each.language == "sh"]
    lines = block.lines
    full, room = (
        next(number for number, line in enumerate(lines) if words in line.command)
        for words in ("one too many", "room again")
    )
    with programs(cluster.directory) as found:
        assert type_in(cluster, found, lines[:full]) > 2
        wait_used(cluster, "shop", 3, 3 * len("shop/cart/1") + len("three apples" + "a pear" + "a plum"))
        assert type_in(cluster, found, lines[full:room]) > 3
        cluster.wait_until(lambda: all(keys_max(cluster, node) == 1000 for node in cluster.ids), "all know the quota")
        assert type_in(cluster, found, lines[room:]) > 3


def keys_max(cluster: Cluster, node: str) -> float:
    """Return the quota of `shop` that a node applies; 0 if it does not report one."""
    with suppress(OSError):
        page = cluster.http(node, "/metrics").decode()
        return sum(map(float, re.findall(r'kvstore_namespace_keys_max\{namespace="shop"\} (\S+)', page)))
    return 0


def type_in(cluster: Cluster, found: Path, lines: list[Line]) -> int:
    """Run the lines in a shell that finds our programs there, and return their number. Raises AssertionError unless
    each succeeds and prints what the page says."""
    script = ["set -eu", *(word for line in lines for word in (line.command, "echo '--- done'"))]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=cluster.directory,
        env={**os.environ, "PATH": f"{found}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    *said, rest = done.stdout.split("--- done\n")
    assert (len(said), rest) == (len(lines), "")
    for line, told in zip(lines, said, strict=True):
        assert line.text in told, f"{line.command}\n{told}"
    return len(lines)


def test_each_endpoint_reports_an_exceeded_quota_with_its_own_error(cluster: Cluster) -> None:
    command(cluster, "namespace", "add", "full", "full/", "--keys", "1")
    with Client(cluster.url + PATIENT) as client:
        client.put(b"full/1", b"x")
        wait_used(cluster, "full", 1, 7)
        for node in cluster.ids:
            with pytest.raises(redis.ResponseError, match=r"^QUOTA namespace full: 1 of 1 keys"):
                cluster.redis(node).set("full/2", "x")
            connection = HTTPConnection(*cluster.address(node, "http"), timeout=20)
            connection.request("PUT", "/v1/keys/full%2F3", b"x")
            answer = connection.getresponse()
            told = json.loads(answer.read())
            connection.close()
            assert answer.status == 507
            assert (told["reason"], told["namespace"], told["quota"]) == ("QUOTA_EXCEEDED", "full", "keys")
            assert (told["used"], told["limit"], told["wanted"], told["outcome"]) == (1, 1, 1, "refused")
        with pytest.raises(QuotaExceeded) as refused:
            client.put(b"full/4", b"x")
        assert (refused.value.namespace, refused.value.used, refused.value.limit) == ("full", 1, 1)
        assert client.delete(b"full/1")
        wait_used(cluster, "full", 0, 0)
        client.put(b"full/4", b"x")
        client.delete(b"full/4")

    def refused_total() -> float:
        page = b"".join(cluster.http(node, "/metrics") for node in cluster.ids).decode()
        return sum(map(float, re.findall(r'kvstore_namespace_refused_keys_total\{namespace="full"\} (\S+)', page)))

    cluster.wait_until(lambda: refused_total() == 7, "each refusal is counted once; a page may be a second old")


def test_rate_limit_holds_and_clients_retry_by_themselves(cluster: Cluster) -> None:
    command(cluster, "namespace", "add", "slow", "slow/", "--ops", "30", "--burst", "30")
    pipelined = cluster.redis("n1")
    pipeline = pipelined.pipeline(transaction=False)
    for _ in range(1000):
        pipeline.get("slow/1")
    answers = pipeline.execute(raise_on_error=False)
    refused = [str(each) for each in answers if isinstance(each, redis.ResponseError)]
    assert len(refused) > 500, "a second of 30, on a machine however slow"
    assert all(
        re.search(r"namespace slow: its 30 operations/s are used up .* retry in \d+ ms", each) for each in refused
    )
    with Client(cluster.url + PATIENT) as client:
        for number in range(40):
            client.put(b"slow/1", b"%d" % number)
        assert client.get(b"slow/1").value == b"39"  # type: ignore[union-attr]
    command(cluster, "namespace", "remove", "slow")


@pytest.mark.slow
def test_usage_is_exact_after_kills_moves_and_restarts(cluster: Cluster) -> None:
    command(cluster, "namespace", "add", "app", "app/", "--keys", str(KEYS_MAX), "--bytes", "1G")
    with Client(cluster.url + PATIENT) as client:
        values = {f"app/{number}": bytes(number) for number in range(KEYS_MAX)}
        size = sum(len(key) + len(value) for key, value in values.items())
        for key, value in values.items():
            client.put(key.encode(), value)
        wait_used(cluster, "app", KEYS_MAX, size)

        victim = cluster.wait_led()["p1"]
        cluster.kill(victim)
        cluster.wait_led(by_other_than=victim)
        cluster.start_node(victim)
        cluster.wait_ready()
        wait_used(cluster, "app", KEYS_MAX, size)
        with pytest.raises(QuotaExceeded):
            client.put(b"app/more", b"")

        command(cluster, "ring", "add", "p4")
        cluster.wait_until(lambda: not command(cluster, "ring", "status")["moves"], "all ranges have moved")
        wait_used(cluster, "app", KEYS_MAX, size)
        with pytest.raises(QuotaExceeded):
            client.put(b"app/more", b"")

    cluster.kill_everything()
    cluster.start_zookeeper()
    for node in cluster.ids:
        cluster.start_node(node)
    cluster.wait_ready()
    wait_used(cluster, "app", KEYS_MAX, size)
    with Client(cluster.url + PATIENT) as client:
        client.delete(b"app/0")
        wait_used(cluster, "app", KEYS_MAX - 1, size - len("app/0"))
        client.put(b"app/more", b"")
        wait_used(cluster, "app", KEYS_MAX, size - len("app/0") + len("app/more"))  # who leads the next key, too
        with pytest.raises(QuotaExceeded):
            client.put(b"app/again", b"")
