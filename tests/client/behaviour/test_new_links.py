"""A connection that cannot be opened for a moment: certificate or password files are being replaced, or the process has
too many open files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import AsyncClient, Client, FeedReader
from kvstore.client.aio import link as aio_link
from kvstore.client.aio import stream as aio_stream
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.blocking import link as blocking_link
from kvstore.client.blocking import stream as blocking_stream
from kvstore.client.blocking.watch import Watch
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.watching import WatchCursor, WatchedKeys
from kvstore.env.library_env import library_env
from kvstore.errors import ConfigError, Unavailable
from tests.client.model import ModelCluster
from tests.client.serving import serving, serving_in_a_thread

ERRORS = [FileNotFoundError("ca.pem"), ConfigError("no password")]


def away(error: Exception, open_channel: Callable[..., Any]) -> Callable[..., Any]:
    """Make the first two connections fail."""
    left = [error, error]

    def opens(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return open_channel(*args, **options)

    return opens


NO_CA = "expected certificate and key files that can be read, got .*No such file or directory: '/nosuch'"


def test_client_without_its_ca_file_reports_what_it_expected() -> None:
    with pytest.raises(ConfigError, match=NO_CA), Client("kvs://127.0.0.1:1?ca=/nosuch"):
        pass
    with FeedReader("kvs://127.0.0.1:1?ca=/nosuch") as feed, pytest.raises(Unavailable, match=NO_CA):
        feed.positions(timeout_s=0.1)


async def test_asyncio_client_without_its_ca_file_reports_what_it_expected() -> None:
    with pytest.raises(ConfigError, match=NO_CA):
        async with AsyncClient("kvs://127.0.0.1:1?ca=/nosuch"):
            pass


@pytest.mark.parametrize("error", ERRORS)
def test_call_waits_for_a_connection_that_cannot_be_opened_yet(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with serving_in_a_thread(ModelCluster(1, 1)) as servers, Client(servers.patient_url) as client:
        assert client._engine is not None
        for link in list(client._engine._links.values()):
            link.close()
            client._engine._absorb(link, ())
        monkeypatch.setattr(blocking_link, "open_channel", away(error, blocking_link.open_channel))
        client.put(b"k", b"v")


@pytest.mark.parametrize("error", ERRORS)
async def test_asyncio_call_waits_for_a_connection_that_cannot_be_opened_yet(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with serving(ModelCluster(1, 1)) as servers, AsyncClient(servers.patient_url) as client:
        assert client._engine is not None
        monkeypatch.setattr(aio_link, "aio_opener", away(error, aio_link.aio_opener))
        for link in client._engine.links.all():
            link.disconnect("the test says so")
        await client.put(b"k", b"v")


@pytest.mark.parametrize("error", ERRORS)
async def test_watch_continues_at_the_next_server(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(aio_stream, "open_aio_channel", fail)
    monkeypatch.setattr(blocking_stream, "open_channel", fail)
    config, asked = ClientConfig(endpoints=("a:1",), timeout_s=0.2), list[str]()

    def addresses() -> list[str]:
        asked.append("a:1")
        return ["a:1"]

    with pytest.raises(Unavailable, match="cannot connect to a:1: "):
        await AsyncWatch(library_env("watch"), config, WatchCursor(WatchedKeys(b"", b""), None, {}), addresses).ready()
    assert len(asked) > 1
    asked.clear()
    with pytest.raises(Unavailable, match="cannot connect to a:1: "):
        Watch(library_env("watch"), config, WatchCursor(WatchedKeys(b"", b""), None, {}), addresses).ready()
    assert len(asked) > 1


def test_opening_a_client_reports_unusable_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_USER", "ann")
    with pytest.raises(ConfigError), Client("kv://127.0.0.1:1"):
        pass
