"""The etcd driver without a server: keys of nodes, bytes of values, and where its watch stream continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown, UndecodableNode
from kvstore.meta import paths
from kvstore.meta.address import Address, MetadataKind, parse
from kvstore.meta.etcd import values
from kvstore.meta.etcd.keys import EtcdKeys, KeySpan
from kvstore.meta.etcd.link import EtcdLink
from kvstore.meta.etcd.plan import TransactionPlan
from kvstore.meta.etcd.session import EtcdSession
from kvstore.meta.etcd.watches import EtcdWatches
from kvstore.meta.memory_tree import TreeNode
from kvstore.meta.store import Create
from kvstore.proto.etcd_pb2 import Compare, Event, KeyValue, TxnRequest, WatchResponse
from kvstore.types import BookieId, LedgerId
from tests.meta.drivers import Hint

KEYS = EtcdKeys("kv")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/", b"/kv/"),
        ("/servers/n1", b"/kv/servers/n1"),
        (paths.LAYOUT, b"/kv/ledgers/LAYOUT"),
        (paths.INSTANCE_ID, b"/kv/ledgers/INSTANCEID"),
        (paths.cookie(BookieId("b1")), b"/kv/ledgers/cookies/b1"),
        (paths.AVAILABLE, b"/kv/ledgers/available"),
        (paths.available(BookieId("b1")), b"/kv/ledgers/available/readwrite/b1"),
        (paths.READONLY, b"/kv/ledgers/available/readonly"),
        (paths.readonly(BookieId("b1")), b"/kv/ledgers/available/readonly/b1"),
        ("/ledgers/00", b"/kv/ledgers/00"),
        ("/ledgers/00/0000", b"/kv/ledgers/00/0000"),
        (paths.ledger(LedgerId(7)), b"/kv/ledgers/ledgers/0000000000000000007"),
        (paths.ledger(LedgerId(2**31 - 2)), b"/kv/ledgers/ledgers/0000000002147483646"),
        (paths.ledger(LedgerId(2**31 - 1)), b"/kv/ledgers/ledgers/0000000002147483647"),
        (paths.ledger(LedgerId(2**63 - 1)), b"/kv/ledgers/ledgers/9223372036854775807"),
    ],
)
def test_each_node_has_the_documented_key(path: str, key: bytes) -> None:
    assert (KEYS.key(path), KEYS.path_or_none(key)) == (key, path)
    assert EtcdKeys("").key(path) == key.removeprefix(b"/kv")
    assert EtcdKeys("").path_or_none(key.removeprefix(b"/kv")) == path
    assert KEYS.everything().start <= key < KEYS.everything().end


@pytest.mark.parametrize(
    "key",
    [
        KEYS.session(255),
        KEYS.births("/servers"),
        b"/kv/ledgers/available/b1",
        b"/kv/servers/",
        b"/kv/\xff",
    ],
)
def test_key_of_no_node_is_none(key: bytes) -> None:
    assert KEYS.path_or_none(key) is None


def test_sessions_and_counters_have_keys_that_no_path_has() -> None:
    assert KEYS.session(255) == b"/kv//sessions/00000000000000ff"
    assert KEYS.births("/servers") == b"/kv//births/servers"


def test_prefix_ignores_slashes_around_it() -> None:
    assert [EtcdKeys(prefix).key("/a") for prefix in ("", "/", "a/b", "/a/b/")] == [b"/a", b"/a", b"/a/b/a", b"/a/b/a"]


def test_parent_of_ledgers_finds_only_its_own() -> None:
    short, long = "/ledgers/21/4748", "/ledgers/000/0000/0021/4748"
    keys = [KEYS.key(paths.ledger(LedgerId(number))) for number in (2147483646, 2147483647, 2147480000)]
    for path in (short, long):
        assert KEYS.spans(path)[1] == KeySpan(
            b"/kv/ledgers/ledgers/0000000002147480000", b"/kv/ledgers/ledgers/0000000002147490000"
        )
    assert [KEYS.child_or_none(short, key) for key in keys] == ["L3646", None, "L0000"]
    assert [KEYS.child_or_none(long, key) for key in keys] == [None, "L3647", None]


def test_value_has_the_documented_bytes() -> None:
    node = TreeNode(b"data", created=7, owner=3, modified_ms=1_700_000_000_000, version=2)
    data = bytes.fromhex("01 00000002 0000000000000007 0000018bcfe56800") + b"data"
    assert values.encode(node) == data
    assert values.decode(KeyValue(key=b"k", value=data, lease=3, mod_revision=9)) == node


def test_node_created_by_its_value_has_that_values_revision() -> None:
    data = values.encode(TreeNode(b"", created=values.OWN_REVISION, owner=0, modified_ms=1))
    assert values.decode(KeyValue(value=data, mod_revision=9)).created == 9


@pytest.mark.parametrize(
    ("value", "fault"), [(b"\2" + bytes(20), "has format 2"), (b"\1", "expected a header of 21 bytes")]
)
def test_malformed_value_is_refused(value: bytes, fault: str) -> None:
    with pytest.raises(UndecodableNode, match=fault):
        values.decode(KeyValue(key=b"k", value=value))


def test_too_many_changes_are_refused_before_they_are_sent() -> None:
    with pytest.raises(
        MetadataError, match="expected at most 128 etcd operations in one call, got 131 for 130 changes"
    ):
        TransactionPlan(KEYS, [Create(f"/n{number}") for number in range(130)]).reads()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("z:1", Address(MetadataKind.ZOOKEEPER, ("z:1",), "")),
        ("z:1,[::1]:2/a/b/", Address(MetadataKind.ZOOKEEPER, ("z:1", "[::1]:2"), "a/b")),
        ("zookeeper://z:1/a", Address(MetadataKind.ZOOKEEPER, ("z:1",), "a")),
        ("etcd://e:1,f:2/a", Address(MetadataKind.ETCD, ("e:1", "f:2"), "a")),
    ],
)
def test_address_names_the_kind_of_store(text: str, found: Address) -> None:
    assert parse(text) == found
    assert parse(found.connection).hosts == found.hosts


class ScriptedLink:
    """Answers each watch with the next list of answers, and breaks when there are no more."""

    endpoint = "scripted"

    def __init__(self, *script: list[WatchResponse]) -> None:
        self.script = list(script)
        self.asked: list[int] = []
        self.broken = asyncio.Event()
        self.guard = Compare(key=KEYS.session(1))

    async def watch(self, span: KeySpan, revision: int) -> AsyncGenerator[WatchResponse, None]:
        self.asked.append(revision)
        for answer in self.script.pop(0):
            yield answer
        if not self.script:
            self.give_up()

    def give_up(self) -> None:
        self.broken.set()


def changed(path: str, revision: int) -> WatchResponse:
    kv = KeyValue(key=KEYS.key(path), mod_revision=revision, version=2)
    return WatchResponse(events=[Event(type=Event.PUT, kv=kv)])


async def followed(link: ScriptedLink, watches: EtcdWatches) -> EtcdSession:
    session = EtcdSession(
        ["127.0.0.1:1"], 6, tls=None, login=None, keys=KEYS, watches=watches, changed=lambda state: None
    )
    any_link: Any = link
    await session._follow(any_link, 5)
    return session


async def test_ended_stream_is_restarted_where_it_was() -> None:
    watches, hint = EtcdWatches(KEYS), Hint()
    watches.add("/a", hint)
    link = ScriptedLink([WatchResponse(created=True), changed("/b", 8)], [changed("/a", 9)])
    session = await followed(link, watches)
    assert link.asked == [5, 8], "revision 8 may have had more to tell"
    await hint.wait()
    await session.close()


async def test_all_watches_are_called_after_a_compaction() -> None:
    watches, hint = EtcdWatches(KEYS), Hint()
    watches.add("/never-changed", hint)
    link = ScriptedLink(
        [WatchResponse(created=True), WatchResponse(canceled=True, compact_revision=40)], [WatchResponse(created=True)]
    )
    session = await followed(link, watches)
    assert link.asked == [5, 40]
    await hint.wait()
    await session.close()


async def test_refused_stream_ends_the_connection() -> None:
    """A watch that is requested again at once would be refused as often as this process can ask."""
    link = ScriptedLink([WatchResponse(canceled=True, cancel_reason="permission denied")], [], [])
    session = await followed(link, EtcdWatches(KEYS))
    assert (link.asked, link.broken.is_set()) == ([5], True)
    await session.close()


@pytest.mark.parametrize(
    ("details", "kind"),
    [("etcdserver: mvcc: database space exceeded", MetadataUnavailable), ("Bandwidth exhausted", MetadataUnknown)],
)
async def test_refusal_that_is_not_etcds_own_leaves_the_outcome_unknown(
    details: str, kind: type[MetadataError]
) -> None:
    async def refuse(_: TxnRequest, **_options: Any) -> None:
        raise AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), details)

    link = EtcdLink("127.0.0.1:1", None)
    link._kv = SimpleNamespace(Txn=refuse)
    with pytest.raises(kind, match=details):
        await link.txn(TxnRequest())
    assert link.broken.is_set() is (kind is MetadataUnknown)
    await link.close()
