"""Commands that need the metadata store report soon that it is unavailable."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.cli import cluster
from kvstore.cli.cluster import ClusterOptions, Tools, with_tools
from kvstore.cli.main import main
from kvstore.devcluster.zookeeper import free_port
from kvstore.errors import MetadataUnavailable, Unavailable
from kvstore.meta.zookeeper import session

ABOUT_S = 5.0
"""The longest time that an operator waits."""


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that accepts connections and never answers, as of a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.PATIENCE_S <= ABOUT_S, "nobody waits longer for a store that is away"
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.4)
    monkeypatch.setattr(cluster, "LOOKUP_S", 0.2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup without a time limit: the answer of the host ends it, not a timer."""
    monkeypatch.setattr(cluster, "PATIENCE_S", 600.0)
    monkeypatch.setattr(cluster, "LOOKUP_S", 600.0)


async def nothing(_: Tools) -> None:
    raise AssertionError("not connected")


@pytest.mark.parametrize("kind", ["", "etcd://"])
def test_store_that_accepts_connections_without_answering_is_unavailable(soon: None, silent: str, kind: str) -> None:
    with pytest.raises(MetadataUnavailable, match=f"answers at {silent}"):
        with_tools(ClusterOptions(metadata=f"{kind}{silent}/kvstore"), nothing)


def test_store_without_a_listener_is_reported_at_once(patient: None) -> None:
    refused = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"no ZooKeeper listens at {refused}"):
        with_tools(ClusterOptions(metadata=f"{refused}/kvstore"), nothing)


def test_unknown_host_is_reported_as_unknown(patient: None) -> None:
    """The message must not describe the cluster as down."""
    refused = f"127.0.0.1:{free_port()}"
    for address, says in (
        ("zk1.nowhere.invalid:2181", r"^cannot resolve zk1.nowhere.invalid:2181 \([^)]+\)$"),
        (
            f"zk1.nowhere.invalid:2181,{refused}",
            rf"cannot resolve .*\); no ZooKeeper listens at {refused}; `kvstore status --server",
        ),
    ):
        with pytest.raises(Unavailable, match=says):
            with_tools(ClusterOptions(metadata=f"{address}/kvstore"), nothing)


async def test_host_is_refused_where_each_of_its_addresses_is(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost, for example, has an address of each family."""
    loop = asyncio.get_running_loop()

    async def both(host: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", ("127.0.0.1", port)), (0, 0, 0, "", ("127.0.0.2", port))]

    monkeypatch.setattr(loop, "getaddrinfo", both)
    assert await cluster.takes_connections(f"localhost:{free_port()}") is False


@pytest.mark.parametrize("prefix", ["", "zookeeper://", "etcd://"])
def test_hosts_that_take_no_connection_are_left_out(
    patient: None, monkeypatch: pytest.MonkeyPatch, silent: str, prefix: str
) -> None:
    """The driver tries hosts in turn: an unreachable host would use up the time of the others."""
    asked: list[str] = []

    @asynccontextmanager
    async def tools(address: str) -> AsyncIterator[None]:
        asked.append(address)
        yield None

    async def work(_: Any) -> str:
        return "read"

    monkeypatch.setattr(cluster, "_tools", tools)
    assert with_tools(ClusterOptions(metadata=f"{prefix}127.0.0.1:{free_port()},{silent}/kv"), work) == "read"
    assert asked == [f"{prefix}{silent}/kv"]


async def test_where_no_host_answers_all_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(_: str) -> None:
        return None

    monkeypatch.setattr(cluster, "takes_connections", unknown)
    assert await cluster._reachable("a:1,b:2/kv") == "a:1,b:2/kv"


def test_client_that_could_not_connect_does_not_wait_for_confirmation(
    soon: None, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispose = session.ZooKeeperSession._dispose

    def never_done(self: session.ZooKeeperSession, client: session.GuardedClient) -> Any:
        dispose(self, client)
        return self._loop.create_future()

    monkeypatch.setattr(session.ZooKeeperSession, "_dispose", never_done)
    monkeypatch.setattr(session, "CLOSE_TIMEOUT_S", 1e6)
    with pytest.raises(MetadataUnavailable):
        with_tools(ClusterOptions(metadata=silent), nothing)


@pytest.mark.parametrize(
    "words",
    [
        ("autorecovery", "status"), ("autorecovery", "list"), ("autorecovery", "disable"), ("ledger", "read", "1"),
        ("ledger", "recover", "1"), ("ledger", "delete", "1", "--yes"), ("bookie", "scrub", "b1"), ("fsck",),
        ("ring", "locate", "k"), ("cluster", "version"), ("partition", "list"), ("bookie", "list"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_each_command_reports_that_the_store_is_unavailable(
    soon: None,
    silent: str,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvstore", *words, "--metadata", silent])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code != 0
    assert f"no ZooKeeper answers at {silent}" in capsys.readouterr().err
