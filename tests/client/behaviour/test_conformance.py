"""The behaviour of every client with every cluster: {asyncio, blocking} × {a model behind real endpoints, the same with
gRPC only, real processes}."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.client import AsyncClient, Batch, ClientConfig, Deleted, Item, Level, Page
from kvstore.client.core.config import parse_url
from kvstore.errors import ConditionFailed, InvalidRequest, Unavailable
from tests.client.faces import FACES, Face
from tests.client.model import ModelCluster
from tests.client.serving import PATIENT, serving
from tests.cluster.harness import running_cluster
from tests.waiting import PATIENCE_S


@dataclass
class Subject:
    client: Face
    other: Face
    """A second client of the same cluster."""


@pytest.fixture(scope="module")
def real_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster.url


@pytest.fixture(params=["model", "grpc", pytest.param("cluster", marks=pytest.mark.cluster)])
def world(request: pytest.FixtureRequest) -> str:
    """The kind of cluster: a model, the same without Redis ports, or the address of a real one, which needs a thread
    without an event loop to start."""
    kind: str = request.param
    return request.getfixturevalue("real_cluster") if kind == "cluster" else kind


@pytest.fixture
async def endpoints(world: str) -> AsyncIterator[str]:
    if world not in ("model", "grpc"):
        await empty(world)
        yield world
        return
    async with serving(ModelCluster(), has_streams=world == "model") as servers:
        yield servers.url


async def empty(url: str) -> None:
    """Delete what the previous test left in the real cluster."""
    async with AsyncClient(url + PATIENT) as client:
        keys = [key async for key in client.keys(b"")]
        await asyncio.gather(*(client.delete(key) for key in keys))


@pytest.fixture(params=FACES.keys())
async def subject(request: pytest.FixtureRequest, endpoints: str) -> AsyncIterator[Subject]:
    # A write that is retried because a node paused would be unknown if its condition failed.
    config: ClientConfig = parse_url(f"{endpoints}{PATIENT}&silence={PATIENCE_S:g}s")
    client, other = await FACES[request.param](config).open(), await FACES[request.param](config).open()
    yield Subject(client, other)
    await client.close()
    await other.close()


@pytest.fixture
def client(subject: Subject) -> Face:
    return subject.client


async def test_put_value_is_returned_with_its_version(client: Face) -> None:
    version = await client.call("put", b"k", b"v")
    item: Item = await client.call("get", b"k")
    assert (item.value, item.version, item.created, item.expires_ms) == (b"v", version, version, 0)


async def test_values_may_be_empty_and_any_bytes(client: Face) -> None:
    for key, value in [(b"\x00\xff", b""), (b"k" * 4096, bytes(range(256))), ("ключ".encode(), b"v" * (1 << 20))]:
        await client.call("put", key, value)
        assert (await client.call("get", key)).value == value


async def test_versions_rise_and_the_creation_stays(client: Face) -> None:
    first = await client.call("put", b"k", b"1")
    second = await client.call("put", b"k", b"2")
    item = await client.call("get", b"k")
    assert first < second == item.version
    assert item.created == first


async def test_absent_key_is_none(client: Face) -> None:
    assert await client.call("get", b"nothing") is None
    assert await client.call("meta", b"nothing") is None
    assert await client.call("pop", b"nothing") is None
    assert await client.call("delete", b"nothing") == 0
    assert await client.call("expire", b"nothing", 5) is False


async def test_every_level_but_stale_reads_own_writes(client: Face) -> None:
    await client.call("put", b"k", b"v")
    for level in (Level.LINEARIZABLE, Level.STRICT, Level.SESSION):
        assert (await client.call("get", b"k", level=level)).value == b"v"
    stale = await client.call("get", b"k", level=Level.STALE)
    assert stale is None or stale.value == b"v"


async def test_client_reads_as_far_as_the_token_of_another(subject: Subject) -> None:
    await subject.client.call("put", b"k", b"v")
    token = subject.client.client.token
    assert token[subject.client.client.cluster.partition_of(b"k")] > 0
    subject.other.client.absorb(token)
    assert (await subject.other.call("get", b"k", level=Level.SESSION)).value == b"v"


async def test_second_writer_at_one_version_gets_the_version_found(subject: Subject) -> None:
    version = await subject.client.call("put", b"k", b"0")
    newer = await subject.client.call("put", b"k", b"1", if_version=version)
    with pytest.raises(ConditionFailed) as caught:
        await subject.other.call("put", b"k", b"2", if_version=version)
    assert caught.value.version == newer
    assert (await subject.other.call("get", b"k")).value == b"1"


async def test_presence_and_absence_are_conditions(client: Face) -> None:
    with pytest.raises(ConditionFailed):
        await client.call("put", b"k", b"v", if_present=True)
    version = await client.call("put", b"k", b"v", if_absent=True)
    with pytest.raises(ConditionFailed) as caught:
        await client.call("put", b"k", b"w", if_absent=True)
    assert caught.value.version == version
    assert await client.call("put", b"k", b"w", if_present=True) > version


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_s": 5, "keep_ttl": True},
        {"if_absent": True, "if_present": True},
        {"if_absent": True, "if_version": 1},
        {"if_present": True, "if_version": 0},
    ],
    ids=lambda options: "+".join(options),
)
async def test_put_refuses_contradictory_options(client: Face, options: dict[str, Any]) -> None:
    for value in (b"absent", b"present"):
        with pytest.raises(InvalidRequest, match="expected"):
            await client.call("put", b"k", value, **options)
        item = await client.call("get", b"k")
        assert item is None or (item.value, item.expires_ms) == (b"kept", 0)
        await client.call("put", b"k", b"kept")


async def test_delete_accepts_a_version(client: Face) -> None:
    version = await client.call("put", b"k", b"v")
    with pytest.raises(ConditionFailed):
        await client.call("delete", b"k", if_version=version + 1)
    assert await client.call("delete", b"k", if_version=version) > version
    assert await client.call("get", b"k") is None


async def test_replace_returns_the_old_item(client: Face) -> None:
    first = await client.call("replace", b"k", b"1")
    assert (first.applied, first.old) == (True, None)
    second = await client.call("replace", b"k", b"2")
    assert (second.old.value, second.old.version) == (b"1", first.version)
    refused = await client.call("replace", b"k", b"3", if_absent=True)
    assert (refused.applied, refused.old.value) == (False, b"2")
    assert (await client.call("pop", b"k")).value == b"2"


async def test_increment_adds_to_a_number(client: Face) -> None:
    assert await client.call("increment", b"n") == 1
    assert await client.call("increment", b"n", -11) == -10
    assert (await client.call("get", b"n")).value == b"-10"
    await client.call("put", b"n", b"no number")
    with pytest.raises(InvalidRequest):
        await client.call("increment", b"n")


async def test_append_lengthens_a_value(client: Face) -> None:
    assert await client.call("append", b"k", b"ab") == 2
    assert await client.call("append", b"k", b"c") == 3
    assert (await client.call("meta", b"k")).length == 3


async def test_expiry_can_be_set_and_removed(client: Face) -> None:
    await client.call("put", b"k", b"v", ttl_s=1000)
    item = await client.call("get", b"k")
    assert 990_000 < item.expires_ms - item.written_ms <= 1_000_000
    assert await client.call("expire", b"k", None) is True
    assert (await client.call("meta", b"k")).expires_ms == 0
    assert await client.call("expire", b"k", 50) is True
    assert (await client.call("meta", b"k")).expires_ms > 0


async def test_batch_is_atomic_and_returns_each_result(client: Face) -> None:
    await client.call("put", b"{t}n", b"1")
    batch = Batch().put(b"{t}a", b"A").increment(b"{t}n", 4).append(b"{t}a", b"B").get(b"{t}a").delete(b"{t}x")
    put, number, length, item, deleted = await client.call("batch", batch)
    assert (number, length, item.value, deleted) == (5, 2, b"AB", 0)
    assert put > 0
    assert (await client.call("get", b"{t}a")).value == b"AB"


async def test_batch_with_a_failing_operation_does_nothing(client: Face) -> None:
    version = await client.call("put", b"{t}a", b"1")
    with pytest.raises(ConditionFailed):
        await client.call("batch", Batch().put(b"{t}b", b"2").put(b"{t}a", b"2", if_version=version + 1))
    assert await client.call("get", b"{t}b") is None
    assert (await client.call("get", b"{t}a")).value == b"1"


async def test_batch_accepts_conditions_on_keys_it_does_not_write(client: Face) -> None:
    version = await client.call("put", b"{t}a", b"1")
    conditions = Batch().check(b"{t}a", version=version).check(b"{t}none", version=0).check(b"{t}a", present=True)
    checked = await client.call("batch", conditions.put(b"{t}b", b"2"))
    assert checked[:3] == [version, 0, version]
    for refused in (Batch().check(b"{t}a", version=version + 1), Batch().check(b"{t}a", present=False)):
        with pytest.raises(ConditionFailed):
            await client.call("batch", refused.put(b"{t}b", b"3"))
    assert (await client.call("get", b"{t}b")).value == b"2"
    with pytest.raises(InvalidRequest, match="expected either a version or whether the key is present"):
        Batch().check(b"{t}a")


@pytest.mark.parametrize(
    ("method", "arguments", "options", "match"),
    [
        ("batch", ([b"k"],), {}, "expected a Batch, got list"),
        ("batch", ([Batch().put(b"k", b"v")],), {}, "expected a Batch, got list"),
        ("batch", (None,), {}, "expected a Batch, got NoneType"),
        ("put_many", ([(b"k", b"v")],), {}, "expected items to be a mapping of keys to values, got list"),
        ("put_many", ({b"k": 1},), {}, "as bytes, got int"),
        ("get_many", (b"key",), {}, "expected keys to be an iterable of bytes, got bytes"),
        ("get_many", (5,), {}, "expected keys to be an iterable of bytes, got int"),
        ("get_many", ([[b"k"]],), {}, "expected keys to be an iterable of bytes, got list"),
        ("get", (b"k",), {"timeout_s": 0}, "expected timeout_s to be more than 0"),
        ("put", (b"k", b"v"), {"timeout_s": -1}, "expected timeout_s to be more than 0"),
        ("put_many", ({b"k": b"v"},), {"timeout_s": 0}, "expected timeout_s to be more than 0"),
        ("page", (), {"limit": "9"}, "expected a limit of 1 to 10000 keys a page, got '9'"),
        ("put", (b"k", b"v"), {"if_absent": 2}, "expected if_absent to be True or False, got int 2"),
        ("increment", (b"k", True), {}, "expected delta to be an integer"),
    ],
)
async def test_argument_of_a_wrong_type_is_refused(
    client: Face, method: str, arguments: tuple[Any, ...], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        await client.call(method, *arguments, **options)
    assert await client.call("count") == 0


@pytest.mark.parametrize("wrong", [5, "p1", [("p1", 1)], {"p1": "1"}, 0])
async def test_position_that_is_no_mapping_is_refused(client: Face, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"expected after to be a mapping of partitions|expected `after` as"):
        client.client.watch(after=wrong)
    with pytest.raises(InvalidRequest, match=r"expected token to be a mapping of partitions|expected `token` as"):
        client.client.absorb(wrong)


@pytest.mark.parametrize("wrong", ["5", None, 0])
async def test_heartbeat_that_is_no_time_is_refused(client: Face, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected heartbeat_s to be more than 0"):
        client.client.watch(heartbeat_s=wrong)


async def test_batch_over_two_partitions_is_refused_and_names_both(client: Face) -> None:
    owners = {client.client.cluster.partition_of(b"k%d" % i): b"k%d" % i for i in range(100)}
    (one, first), (two, second), *_ = sorted(owners.items())
    with pytest.raises(InvalidRequest) as caught:
        await client.call("batch", Batch().put(first, b"v").put(second, b"v"))
    assert one in str(caught.value)
    assert two in str(caught.value)


async def test_many_keys_are_put_and_got(client: Face) -> None:
    items = {b"key-%04d" % i: b"value-%d" % i for i in range(3000)}
    versions = await client.call("put_many", items)
    assert versions.keys() == items.keys()
    found = await client.call("get_many", [*items, b"absent"])
    assert {key: item.value for key, item in found.items()} == items
    assert await client.call("count") == 3000


async def test_scan_returns_keys_in_order_within_its_bounds(client: Face) -> None:
    keys = [b"a-%04d" % i for i in range(2500)]
    await client.call("put_many", dict.fromkeys([*keys, b"b", b"a"], b"v"))
    assert [key for key, _ in await client.scan()] == [b"a", *keys, b"b"]
    assert [key for key, _ in await client.scan(prefix=b"a-")] == keys
    assert [key for key, _ in await client.scan(keys[7], keys[2300])] == keys[7:2300]
    assert [key for key, _ in await client.scan(keys[7], limit=11)] == keys[7:18]
    assert await client.scan(prefix=b"zz") == []


# docs/protocol.md P37
async def test_range_is_read_backwards_as_keys_alone_and_counted(client: Face) -> None:
    keys = [b"a-%04d" % number for number in range(2300)]
    await client.call("put_many", dict.fromkeys([*keys, b"a", b"b", b"\xff\xff"], b"v"))
    assert [key for key, _ in await client.scan(reverse=True)] == [b"\xff\xff", b"b", *keys[::-1], b"a"]
    assert [key for key, _ in await client.scan(keys[7], keys[2100], reverse=True)] == keys[7:2100][::-1]
    ((key, item),) = await client.scan(prefix=b"a", limit=1, reverse=True, keys_only=True)
    assert (key, item.value) == (keys[-1], b"")
    assert item.version > 0
    assert await client.keys(prefix=b"a-") == keys
    assert await client.keys(prefix=b"a-", reverse=True, limit=5) == keys[:-6:-1]
    assert await client.keys(prefix=b"zz") == []
    assert await client.call("count", prefix=b"a-") == 2300
    assert await client.call("count", keys[5], keys[1905]) == 1900
    assert await client.call("count", b"zz") == 1
    assert await client.call("count", prefix=b"zz") == 0


async def pages_of(client: Face, **options: Any) -> list[list[bytes]]:
    pages: list[list[bytes]] = []
    token: str | None = None
    while not pages or token is not None:
        page: Page = await client.call("page", token, **options)
        pages.append([key for key, _ in page.items])
        token = page.token
    return pages


# docs/protocol.md P37
async def test_pages_continue_by_token_at_any_client(subject: Subject) -> None:
    keys = [b"a-%03d" % number for number in range(25)]
    await subject.client.call("put_many", dict.fromkeys([*keys, b"b"], b"v"))
    assert await pages_of(subject.client, prefix=b"a-", limit=10) == [keys[:10], keys[10:20], keys[20:]]
    assert await pages_of(subject.client, prefix=b"a-", limit=10, reverse=True) == [
        keys[:14:-1],
        keys[14:4:-1],
        keys[4::-1],
    ]
    first: Page = await subject.client.call("page", prefix=b"a-", limit=20, reverse=True, keys_only=True)
    await subject.client.call("delete", keys[4])
    second: Page = await subject.other.call("page", first.token)
    assert [key for key, _ in second.items] == keys[3::-1]
    assert second.token is None
    assert await subject.client.call("page", prefix=b"zz") == ([], None)
    for wrong in ({"prefix": b"b"}, {"start": b"a-1"}, {"end": b"a-00"}):
        with pytest.raises(InvalidRequest, match="expected a page token of keys from"):
            await subject.client.call("page", first.token, **wrong)
    for options in ({"token": "nonsense"}, {"limit": 0}, {"limit": 10_001}):
        with pytest.raises(InvalidRequest):
            await subject.client.call("page", **options)


async def test_page_of_large_values_ends_early_with_a_token(client: Face) -> None:
    await client.call("put_many", {b"big-%d" % number: b"v" * (1 << 19) for number in range(6)})
    pages = await pages_of(client, prefix=b"big-", limit=1000)
    assert [key for page in pages for key in page] == [b"big-%d" % number for number in range(6)]
    assert len(pages) > 1


async def test_prefix_is_deleted_in_batches_with_progress(subject: Subject) -> None:
    keys = [b"gone/%05d" % number for number in range(2300)]
    kept = [b"gone", b"gone.", b"gone0"]
    await subject.client.call("put_many", dict.fromkeys([*keys, *kept], b"v"))
    told: list[Deleted] = []

    def stop_after_the_first(progress: Deleted) -> None:
        told.append(progress)
        raise KeyError

    with pytest.raises(KeyError):
        await subject.client.call("delete_prefix", b"gone/", on_progress=stop_after_the_first)
    assert told[0].total == 1000
    assert await subject.client.call("count", prefix=b"gone/") == 1300
    with pytest.raises(InvalidRequest):
        await subject.client.call("delete_prefix", b"other/", token=told[0].token)
    told.clear()
    assert await subject.other.call("delete_prefix", b"gone/", token=None, on_progress=told.append) == 1300
    assert [each.total for each in told] == [1000, 1300]
    assert [each.token is None for each in told] == [False, True]
    assert await subject.client.keys() == kept
    assert await subject.client.call("delete_prefix", b"gone/") == 0
    with pytest.raises(InvalidRequest, match="got an empty one, which matches every key"):
        await subject.client.call("delete_prefix", b"")


async def test_deletion_continues_by_its_token(subject: Subject) -> None:
    keys = [b"gone/%05d" % number for number in range(1500)]
    await subject.client.call("put_many", dict.fromkeys(keys, b"v"))
    told: list[Deleted] = []
    with pytest.raises(ZeroDivisionError):
        await subject.client.call("delete_prefix", b"gone/", on_progress=lambda each: told.append(each) or 1 / 0)
    assert await subject.other.call("delete_prefix", b"gone/", token=told[0].token) == 500
    assert await subject.client.keys() == []


async def test_scan_of_large_values_comes_in_pages(client: Face) -> None:
    items = {b"big-%d" % i: bytes([i]) * 400_000 for i in range(12)}
    await client.call("put_many", items)
    assert {key: item.value for key, item in await client.scan(prefix=b"big-")} == items


async def test_many_concurrent_calls_are_all_done_once(client: Face) -> None:
    results = await asyncio.gather(*(client.call("increment", b"n-%d" % (i % 7)) for i in range(700)))
    assert sorted(results) == sorted(list(range(1, 101)) * 7)


@pytest.mark.parametrize(
    ("key", "value"), [(b"", b"v"), (b"k" * 4097, b"v"), (b"k", b"v" * ((1 << 20) + 1))], ids=["empty", "key", "value"]
)
async def test_invalid_calls_are_refused(client: Face, key: bytes, value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        await client.call("put", key, value)


async def test_closed_client_refuses_calls(client: Face) -> None:
    await client.close()
    with pytest.raises(InvalidRequest):
        await client.call("get", b"k")


@pytest.mark.parametrize("face", FACES.values(), ids=FACES.keys())
async def test_absent_cluster_is_unavailable(face: type[Face]) -> None:
    with pytest.raises(Unavailable):
        await face(ClientConfig(endpoints=("127.0.0.1:1",), timeout_s=0.3)).open()
