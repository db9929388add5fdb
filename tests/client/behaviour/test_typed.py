"""Values of an application's own types: a put value is returned, and an unsupported one is named in an error."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

from kvstore.client import (
    AsyncClient,
    AsyncTypedClient,
    Batch,
    Client,
    Layout,
    StoredMapping,
    TypedClient,
    TypedItem,
    bytes_codec,
    json_codec,
    typed_codec,
)  # fmt: skip
from kvstore.client.blocking import stored
from kvstore.client.core import codecs
from kvstore.client.core.codecs import Coding
from kvstore.client.core.retries import ATTEMPTS_MAX
from kvstore.client.core.values import Item, Replaced
from kvstore.errors import ConditionFailed, Corrupted, InvalidRequest, Overloaded
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


def test_docstring_examples_run(servers: Servers) -> None:
    tried = doctest.testmod(codecs)
    assert (tried.failed, tried.attempted) == (0, 8)
    with Client(servers.patient_url) as client:
        tried = doctest.testmod(stored, extraglobs={"client": client, "json_codec": json_codec})
    assert (tried.failed, tried.attempted) == (0, 11)


@pytest.mark.parametrize("layout", Layout)
def test_put_value_is_returned(servers: Servers, layout: Layout) -> None:
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


async def test_put_value_is_returned_on_asyncio(near_servers: Servers) -> None:
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


def test_value_that_cannot_be_encoded_is_named_and_not_sent(servers: Servers) -> None:
    with Client(servers.patient_url) as client:
        anything = TypedClient(client, json_codec())
        for value in (object(), {1: 2}, 1 << 70, "\ud800"):
            with pytest.raises(InvalidRequest, match="value of b'k'"):
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


def test_value_that_cannot_be_decoded_is_neither_deleted_nor_overwritten(servers: Servers) -> None:
    with Client(servers.patient_url) as client:
        visits = TypedClient(client, typed_codec(Visit))
        client.put(b"k", b"somebody else's")
        with pytest.raises(Corrupted, match="b'k', version"):
            visits.pop(b"k")
        with pytest.raises(Corrupted, match="b'k', version"):
            visits.replace(b"k", Visit("home"))
        found = client.get(b"k")
        assert found is not None
        assert found.value == b"somebody else's"


async def test_undecodable_value_is_neither_deleted_nor_overwritten_on_asyncio(near_servers: Servers) -> None:
    async with AsyncClient(near_servers.patient_url) as client:
        visits = AsyncTypedClient(client, typed_codec(Visit))
        await client.put(b"k", b"somebody else's")
        for call in (visits.pop(b"k"), visits.replace(b"k", Visit("home"))):
            with pytest.raises(Corrupted, match="b'k', version"):
                await call
        found = await client.get(b"k")
        assert found is not None
        assert found.value == b"somebody else's"


def test_conditions_of_pop_and_replace_hold(servers: Servers) -> None:
    with Client(servers.patient_url) as client:
        visits = TypedClient(client, typed_codec(Visit))
        assert not visits.replace(b"k", Visit("a"), if_present=True).applied
        first = visits.replace(b"k", Visit("a"), if_absent=True, ttl_s=1000.0)
        assert (first.applied, first.old) == (True, None)
        refused = visits.replace(b"k", Visit("b"), if_absent=True)
        assert (refused.applied, refused.version) == (False, first.version)
        assert not visits.replace(b"k", Visit("b"), if_version=first.version + 1).applied
        with pytest.raises(ConditionFailed):
            visits.pop(b"k", if_version=first.version + 1)
        with pytest.raises(ConditionFailed):
            visits.pop(b"absent", if_version=7)
        second = visits.replace(b"k", Visit("c"), if_present=True)
        assert second.old is not None
        assert (second.applied, second.old.value) == (True, Visit("a"))
        popped = visits.pop(b"k", if_version=second.version)
        assert popped is not None
        assert popped.value == Visit("c")


def test_concurrent_write_between_read_and_write_is_read_again() -> None:
    """The deleted version is the one that was decoded."""

    class Contended:
        """A client whose key others write between two calls."""

        def __init__(self) -> None:
            self.version, self.given = 5, []  # type: ignore[var-annotated]

        def get(self, key: bytes, *, timeout_s: float | None) -> Item:
            self.version += 1
            return Item(b"%d" % self.version, self.version, 1, 0, 0)

        def pop(self, key: bytes, *, if_version: int, timeout_s: float | None) -> None:
            self.given.append(if_version)
            if self.version < 8:
                raise ConditionFailed(self.version + 1)

        def replace(self, key: bytes, data: bytes, *, if_version: int, **more: Any) -> Replaced:
            self.given.append(if_version)
            return Replaced(self.version == 10, self.version, None)

    client = Contended()
    numbers: TypedClient[Any] = TypedClient(client, json_codec())  # type: ignore[arg-type]
    popped = numbers.pop(b"k")
    assert popped is not None
    assert (popped.value, client.given) == (8, [6, 7, 8])
    replaced = numbers.replace(b"k", 0)
    assert replaced.old is not None
    assert (replaced.old.value, client.given[3:]) == (10, [9, 10])
    client.version = -ATTEMPTS_MAX - 1
    with pytest.raises(Overloaded, match="changed by other clients"):
        numbers.pop(b"k")
    client.version = 5
    with pytest.raises(ConditionFailed):
        numbers.pop(b"k", if_version=6)


@dataclass
class Measured:
    at: tuple[float, ...]


class Weight(msgspec.Struct):
    kilos: float | None


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_numbers_that_json_does_not_have_are_refused(number: float) -> None:
    """Encoders write null for them."""
    values: list[tuple[Any, Any]] = [
        (json_codec(), number),
        (json_codec(), {"a": [None, {"b": (1.5, number)}]}),
        (json_codec(), Measured((1.0, number))),
        (typed_codec(Weight), Weight(number)),
    ]
    for codec, value in values:
        with pytest.raises(InvalidRequest, match=f"expected numbers that JSON has, got {number}"):
            Coding(codec).encode(b"k", value)
    assert json_codec().encode({"a": None, "b": "null"}) == b'{"a":null,"b":"null"}'
    assert typed_codec(Weight).encode(Weight(None)) == b'{"kilos":null}'
    packed = typed_codec(Weight, Layout.MSGPACK)
    assert str(packed.decode(packed.encode(Weight(number))).kilos) == str(number), "MessagePack has them"


def _blocking(text: str) -> str:
    for name in ("Client", "Transaction", "TypedClient", "TypedTransaction", "Iterator"):
        text = text.replace(f"Async{name}", name)
    return text


def test_both_typed_clients_have_the_same_interface() -> None:
    for name, call in vars(TypedClient).items():
        twin = vars(AsyncTypedClient)[name]
        if inspect.isfunction(call) and not name.startswith("_"):
            # the examples differ by `await`, and a test of the generator compares them
            blocking, asynchronous = (inspect.getdoc(each) or "" for each in (call, twin))
            assert blocking.split(">>>")[0] == _blocking(asynchronous.split(">>>")[0]), name
            assert str(inspect.signature(call)) == _blocking(str(inspect.signature(twin))), name


def step_of(random: Random) -> Callable[[MutableMapping[bytes, int]], object]:
    """Return a random operation of code that works with a dict."""
    key, value, other = b"%d" % random.randrange(5), random.randrange(100), b"%d" % random.randrange(5)
    steps: list[Callable[[MutableMapping[bytes, int]], object]] = [
        lambda mapping: mapping[key],
        lambda mapping: mapping.__setitem__(key, value),
        lambda mapping: mapping.__delitem__(key),
        lambda mapping: (key in mapping, len(mapping), bool(mapping)),
        lambda mapping: (mapping.get(key), mapping.get(other, -1)),
        lambda mapping: mapping.pop(key),
        lambda mapping: mapping.pop(key, None),
        lambda mapping: mapping.setdefault(key, value),
        lambda mapping: mapping.update({key: value, other: value + 1}),
        lambda mapping: mapping.update([(key, value), (key, value + 1)]),
        lambda mapping: (sorted(mapping), sorted(mapping.keys() & {key, other}), sorted(mapping.values())),
        lambda mapping: ((key, value) in mapping.items(), value in mapping.values(), dict(mapping.items())),
        lambda mapping: mapping == {key: value},
        lambda mapping: mapping.clear() if value < 20 else None,
    ]
    return random.choice(steps)


def test_stored_mapping_behaves_like_a_dict(servers: Servers) -> None:
    random, twin = Random(20), dict[bytes, int]()

    def done(mapping: MutableMapping[bytes, int], step: Callable[[MutableMapping[bytes, int]], object]) -> object:
        try:
            return step(mapping)
        except KeyError as error:
            return repr(error)

    with Client(servers.patient_url) as client:
        client.put_many({b"m": b"before", b"m0": b"behind", b"m/": b"7"})
        twin[b""] = 7
        mapping: MutableMapping[bytes, int] = StoredMapping(client, b"m/", json_codec())
        for _ in range(400):
            step = step_of(random)
            assert done(mapping, step) == done(twin, step)
            assert dict(mapping.items()) == twin
        mapping.update({b"b": 2, b"a": 1})
        assert [mapping.popitem() for _ in range(len(mapping))][-2:] == [(b"a", 1), (b"b", 2)], "the first key first"
        with pytest.raises(KeyError, match="no key begins with b'm/'"):
            mapping.popitem()
        assert sorted(client.keys()) == [b"m", b"m0"], "what does not begin so is not touched"


def test_mapping_reads_pages_and_not_each_key(servers: Servers) -> None:
    """Also when keys are deleted meanwhile: a dict would end there, and so would Python's own views."""
    with Client(servers.patient_url) as client:
        mapping = StoredMapping(client, b"m/", bytes_codec())
        mapping.update({b"%03d" % number: b"x" for number in range(500)})
        before = client.statistics()["frames"]
        found = dict(mapping.items())
        assert (len(found), found.keys(), list(mapping.values())) == (500, mapping.keys(), [b"x"] * 500)
        assert client.statistics()["frames"] - before < 60
        seen = 0
        for key, _ in mapping.items():
            seen += 1
            del mapping[key]
        assert (seen, bool(mapping)) == (500, False)


def test_one_client_gets_an_item_that_several_pop(servers: Servers) -> None:
    with Client(servers.patient_url) as client, Client(servers.patient_url) as other:
        mappings = [StoredMapping(each, b"m/", json_codec()) for each in (client, other)]
        mappings[0].update({b"%d" % number: number for number in range(40)})

        def drained(mapping: MutableMapping[bytes, int]) -> list[int]:
            taken = []
            while mapping:
                try:
                    taken.append(mapping.popitem()[1])
                except KeyError:
                    break
            return taken

        with ThreadPoolExecutor(4) as threads:
            taken = list(threads.map(drained, mappings * 2))
            assert sorted(number for each in taken for number in each) == list(range(40))
            agreed = set(threads.map(lambda number: mappings[number % 2].setdefault(b"k", number), range(8)))
        assert agreed == {mappings[0][b"k"]}


def test_mapping_refuses_wrong_keys_and_values(servers: Servers) -> None:
    with Client(servers.patient_url) as client:
        mapping: Any = StoredMapping(client, b"", bytes_codec())
        mapping[b"k"] = b"v"
        for call, reason in [
            (lambda: mapping["k"], "expected key to be bytes, got 'k'"),
            (lambda: 5 in mapping, "expected key to be bytes, got 5"),
            (lambda: mapping.update(k=b"v"), "expected keys to be bytes, got the name 'k'"),
            (lambda: mapping.setdefault(b"l"), "value of b'l': .* expected bytes, got None"),
            (lambda: mapping[b""], "expected a key of 1 to 4096 bytes"),
            (lambda: mapping[b"k" * 5000], "expected a key of 1 to 4096 bytes"),
            (mapping.clear, "prefix"),
        ]:
            with pytest.raises(InvalidRequest, match=reason):
                call()
        with pytest.raises(TypeError, match="unhashable"):
            hash(mapping)
        assert (dict(mapping.items()), repr(mapping)) == ({b"k": b"v"}, "StoredMapping(b'')")
        client.put(b"j/k", b"no json")
        with pytest.raises(Corrupted, match="b'j/k', version"):
            StoredMapping(client, b"j/", json_codec()).pop(b"k")
