"""Concurrent clients detect a lost acknowledged write, do not count failed calls as wrong, and end though no server
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.devcluster.zookeeper import free_ports
from loadtest.drills import crowds, nemesis
from loadtest.drills.mixed import Endpoint, NotDone, Unknown
from loadtest.drills.nemesis import FAULTS, Field
from tests.loadtest.drills.test_mixed import Store

COUNT = 30
CROWDS = ("large_values", "huge_pipelines", "huge_transactions")


class Forgetful(Store):
    """Acknowledges each write, and does only those before `until`."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self._until, self._writes = until, 0

    def _do(self, words: list[bytes]) -> bytes:
        self._writes += words[0] == b"SET"
        if words[0] == b"SET" and self._writes > self._until:
            return b"+OK\r\n"
        return super()._do(words)


class Refusing(Store):
    """Refuses every write with an error."""

    def _do(self, words: list[bytes]) -> bytes:
        return b"-LOADING later\r\n" if words[0] == b"SET" else super()._do(words)


class Unsure(Store):
    """Leaves the outcome of every write unknown; writes of some values are done."""

    def _do(self, words: list[bytes]) -> bytes:
        if words[0] == b"SET" and sum(words[2]) % 2:
            super()._do(words)
        return b"-UNKNOWN outcome\r\n" if words[0] == b"SET" else super()._do(words)


@pytest.fixture(autouse=True)
def small_crowds(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HOT_CALLERS": 2, "LASTS_S": 0.2, "LARGE_BYTES": 100, "LARGE_CALLERS": 1, "AT_ONCE": COUNT}
    for name, value in sizes.items():
        monkeypatch.setattr(crowds, name, value)


def field_at(address: tuple[str, int]) -> Field:
    cluster: Any = SimpleNamespace(ids=["n1"], address=lambda _node, _endpoint: address)
    load: Any = SimpleNamespace(tags=[b"tag"])
    return Field(cluster, Random(1), load)


async def wrong_of(crowd: str, store: Store) -> list[str]:
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    field = field_at(server.sockets[0].getsockname()[:2])
    await FAULTS[crowd](field)
    server.close()
    return field.wrong


@pytest.mark.parametrize(
    ("crowd", "until"),
    [
        *((crowd, 0) for crowd in CROWDS),
        ("huge_pipelines", 30 * COUNT),
        ("huge_transactions", 3 * COUNT),
    ],
)
async def test_lost_acknowledged_write_is_wrong(crowd: str, until: int) -> None:
    """Without the first writes the key is missing; without later ones it has the value before them."""
    assert await wrong_of(crowd, Forgetful(until)) != []


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("store", [Store, partial(Store, "broken"), Refusing, Unsure], ids=str)
async def test_refused_or_unknown_operation_is_not_wrong(crowd: str, store: Callable[[], Store]) -> None:
    assert await wrong_of(crowd, store()) == []


async def test_clients_end_with_one_line_where_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "PATIENCE_S", 0.0)
    field = field_at(("127.0.0.1", free_ports(1)[0]))
    await FAULTS["hot_key"](field)
    (line,) = field.wrong
    assert "nobody tells what is stored: not connected" in line


async def test_pipeline_returns_the_result_of_each_command() -> None:
    server = await asyncio.start_server(Refusing().serve, "127.0.0.1", 0)
    endpoint = Endpoint(server.sockets[0].getsockname()[:2])
    written, read = await endpoint.ask_all([b"SET", b"k", b"v"], [b"GET", b"k"], timeout_s=5)
    assert isinstance(written, NotDone)
    assert read is None
    with pytest.raises(NotDone, match="LOADING"):
        await endpoint.ask([b"SET", b"k", b"v"], timeout_s=5)
    endpoint.close()
    server.close()


def test_write_of_unknown_outcome_may_be_done_later() -> None:
    held = crowds.Held()
    held.note(b"1", Unknown("late"))
    held.note(b"2", b"OK")
    held.note(b"3", NotDone("refused"))
    assert [held.allows(each) for each in (b"1", b"2", b"3", None)] == [True, True, False, False]
