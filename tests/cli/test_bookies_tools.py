"""Commands that call bookies directly: they name their cluster and accept no unlimited rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from kvstore.cli import bookies, cluster, ledgers
from kvstore.cli.cluster import ClusterOptions, Tools
from kvstore.cli.recovery import standalone
from kvstore.env import Env
from kvstore.env.clock import SystemClock
from kvstore.env.nursery import TaskNursery
from kvstore.errors import InvalidRequest
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.wal import bookies as wal_bookies
from tests.commands import kvstore

STORE = ClusterOptions(metadata="127.0.0.1:1")


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the clusters that commands pass to bookies; each command ends there."""
    found: list[str] = []
    store = MemoryStore()

    class Seen:
        def __init__(self, *_: Any, cluster: str = "", **__: Any) -> None:
            found.append(cluster)
            raise InvalidRequest("seen")

    @asynccontextmanager
    async def tools(_: str) -> AsyncIterator[Tools]:
        nothing: Any = None
        nursery = TaskNursery("tool")
        try:
            yield Tools(Env(SystemClock(), Random(1), nothing, nothing, nursery, nothing), store)
        finally:
            await nursery.close()

    async def reachable(address: str) -> str:
        return address

    async def read(*_: Any) -> tuple[None, int]:
        return None, 0

    monkeypatch.setattr(cluster, "_tools", tools)
    monkeypatch.setattr(cluster, "_reachable", reachable)
    monkeypatch.setattr(LedgerStore, "read", read)
    for module in (wal_bookies, ledgers):
        monkeypatch.setattr(module, "BookieClients", Seen)
    asyncio.run(LayoutStore(store).ensure("c1"))
    return found


@pytest.mark.parametrize(
    "command",
    [
        lambda: bookies.list_bookies(cluster=STORE),
        lambda: ledgers.read(7, cluster=STORE),
        lambda: ledgers.recover(7, cluster=STORE),
        lambda: ledgers.give_up(7, cluster=STORE),
        lambda: standalone.run(cluster=STORE),
    ],
    ids=["bookie list", "ledger read", "ledger recover", "ledger give-up", "autorecovery run"],
)
def test_bookies_receive_the_cluster_of_a_command(
    clusters: list[str], command: Callable[[], None], loggers: None
) -> None:
    """docs/protocol.md, B32."""
    with pytest.raises(InvalidRequest, match="seen"):
        command()
    assert clusters == ["c1"]


@pytest.mark.parametrize(
    "words",
    [("bookie", "scrub", "b1"), ("bookie", "recover", "b1"), ("bookie", "decommission", "b1"), ("autorecovery", "run")],
    ids=" ".join,
)
@pytest.mark.parametrize("pace", ["inf", "nan", "0"])
def test_pace_that_is_none_is_wrong_usage(words: tuple[str, ...], pace: str) -> None:
    answer = kvstore(*words, "--bytes-per-s", pace, "--metadata", STORE)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "bytes-per-s" in answer.stderr
