"""Values of an application's own types: what was put comes back, and what a codec does not know is said by name."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from kvstore.client import (
    AsyncClient,
    AsyncTypedClient,
    Batch,
    Client,
    Layout,
    TypedClient,
    TypedItem,
    json_codec,
    typed_codec,
)  # fmt: skip
from kvstore.client.core import codecs
from kvstore.errors import ConditionFailed, Corrupted, InvalidRequest
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving, serving_in_a_thread


class Visit(msgspec.Struct):
    page: str
    seconds: int = 0


@pytest.fixture
def servers() -> Iterator[Servers]:
    with serving_in_a_thread(ModelCluster()) as running:
        yield running


@pytest.fixture
async def near_servers() -> AsyncIterator[Servers]:
    async with serving(ModelCluster()) as running:
        yield running


def test_the_examples_are_true() -> None:
    tried = doctest.testmod(codecs)
    assert (tried.failed, tried.attempted) == (0, 7)


@pytest.mark.parametrize("layout", Layout)
def test_what_was_put_comes_back(servers: Servers, layout: Layout) -> None:
    with Client(servers.patient_url) as client:
        visits = TypedClient(client, typed_codec(Visit, layout))
        version = visits.put(b"v/1", Visit("home", 7))
        found = visits.get(b"v/1")
        assert found is not None
        assert (found.value, found.version) == (Visit("home", 7), version)
        assert visits.get(b"v/0") is None
        visits.put_many({b"v/2": Visit("a"), b"v/3": Visit("b")})
        assert {key: each.value.page for key, each in visits.get_many([b"v/2", b"v/3", b"v/4"]).items()} == {
            b"v/2": "a",
            b"v/3": "b",
        }
        assert [(key, each.value.page) for key, each in visits.scan(prefix=b"v/", limit=2)] == [
            (b"v/1", "home"),
            (b"v/2", "a"),
        ]
        replaced = visits.replace(b"v/1", Visit("new"), if_version=version)
        assert replaced.applied
        assert replaced.old == found
        with pytest.raises(ConditionFailed):
            visits.put(b"v/1", Visit("newer"), if_version=version)
        popped = visits.pop(b"v/1")
        assert popped is not None
        assert popped.value == Visit("new")
        assert visits.pop(b"v/1") is None
        client.batch(Batch().put(b"v/5", visits.encoded(b"v/5", Visit("batched"))))
        raw = client.get(b"v/5")
        assert raw is not None
        assert visits.decoded(b"v/5", raw).value == Visit("batched")


async def test_the_same_in_an_event_loop(near_servers: Servers) -> None:
    async with AsyncClient(near_servers.patient_url) as client:
        anything = AsyncTypedClient(client, json_codec())
        await anything.put(b"k", {"a": [1, None]})
        found = await anything.get(b"k")
        assert isinstance(found, TypedItem)
        assert found.value == {"a": [1, None]}
        await anything.put_many({b"l": 2})
        assert {key: each.value for key, each in (await anything.get_many([b"k", b"l"])).items()} == {
            b"k": {"a": [1, None]},
            b"l": 2,
        }
        assert [(key, each.value) async for key, each in anything.scan(b"l")] == [(b"l", 2)]
        replaced = await anything.replace(b"l", 3)
        assert replaced.old is not None
        assert replaced.old.value == 2
        popped = await anything.pop(b"l")
        assert popped is not None
        assert popped.value == 3


def test_what_a_codec_does_not_know_is_said_with_the_key_and_not_sent(servers: Servers) -> None:
    with Client(servers.patient_url) as client:
        anything = TypedClient(client, json_codec())
        for value in (object(), {1: 2}, 1 << 70, "\ud800"):
            with pytest.raises(InvalidRequest, match="the value for b'k'"):
                anything.put(b"k", value)
        with pytest.raises(InvalidRequest, match="b'bad'"):
            anything.put_many({b"good": 1, b"bad": object()})
        assert client.count() == 0
        client.put(b"k", b"\xff")
        client.put(b"v", b'{"seconds":1}')
        with pytest.raises(Corrupted, match="b'k', version"):
            anything.get(b"k")
        for layout in Layout:
            visits: TypedClient[Any] = TypedClient(client, typed_codec(Visit, layout))
            with pytest.raises(Corrupted, match="b'v', version"):
                visits.get(b"v")
        with pytest.raises(Corrupted, match="b'k', version"):
            list(anything.scan())


def test_both_are_one_interface() -> None:
    for name, call in vars(TypedClient).items():
        twin = vars(AsyncTypedClient)[name]
        if inspect.isfunction(call) and name != "__init__":
            assert inspect.getdoc(call) == inspect.getdoc(twin), name
            assert inspect.signature(call).parameters == inspect.signature(twin).parameters, name
