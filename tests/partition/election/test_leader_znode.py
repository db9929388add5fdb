"""A partition's election znodes: who may create them, and whose they may remove."""

import pytest

from kvstore.errors import MetadataUnavailable, MetadataUnknown
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Create
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord, Published
from kvstore.types import PartitionId, Seq, ServerId
from tests.meta.drivers import ClosedStore, LaggingStore

P = PartitionId("p1")
A, B = ServerId("a"), ServerId("b")
FIRST, SECOND = LeaderRecord(A, 1, "one"), LeaderRecord(B, 2, "two")


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


async def claims_of(tree: MemoryTree, server: ServerId) -> tuple[Claims, MemoryStore]:
    store = MemoryStore(tree)
    claims = Claims(store, P, server)
    await claims.prepare()
    return claims, store


async def test_first_of_two_claims_wins(tree: MemoryTree) -> None:
    a, _ = await claims_of(tree, A)
    b, _ = await claims_of(tree, B)
    assert await a.claim(FIRST)
    assert not await b.claim(SECOND)
    assert await b.leader() == FIRST


async def test_leader_znode_ends_with_its_session(tree: MemoryTree) -> None:
    a, store = await claims_of(tree, A)
    b, _ = await claims_of(tree, B)
    await a.claim(FIRST)
    store.expire()
    assert await b.leader() is None
    assert await b.claim(SECOND)


async def test_stale_leader_is_removed_but_never_its_successor(tree: MemoryTree) -> None:
    a, store = await claims_of(tree, A)
    b, _ = await claims_of(tree, B)
    await a.claim(FIRST)
    await b.remove_stale(FIRST)
    assert await b.leader() is None
    await b.claim(SECOND)
    await a.remove_stale(FIRST)
    await a.release(FIRST)
    assert await b.leader() == SECOND
    assert store.session


# docs/protocol.md P24
async def test_remover_with_an_old_term_removes_nothing(tree: MemoryTree, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = await claims_of(tree, A)
    b, store = await claims_of(tree, B)
    await a.claim(FIRST)
    read = store.get
    reborn = LeaderRecord(A, 5, "reborn")

    async def get(path: str) -> object:
        found = await read(path)
        if path == paths.partition_leader(P):  # the remover has read both; now the znode gets another owner
            await a.release(FIRST)
            await a.claim(reborn)
        return found

    monkeypatch.setattr(store, "get", get)
    await b.remove_stale(FIRST)
    assert await a.leader() == reborn


async def test_claim_of_unknown_outcome_is_recognised_as_own(tree: MemoryTree, monkeypatch: pytest.MonkeyPatch) -> None:
    a, store = await claims_of(tree, A)
    multi = store.multi

    async def executed_but_unanswered(changes: object) -> None:
        await multi(changes)  # type: ignore[arg-type]
        raise MetadataUnknown("the connection broke")

    monkeypatch.setattr(store, "multi", executed_but_unanswered)
    assert await a.claim(FIRST)


async def test_claim_that_never_arrived_is_not_taken_for_own(tree: MemoryTree, monkeypatch: pytest.MonkeyPatch) -> None:
    a, store = await claims_of(tree, A)

    async def lost(changes: object) -> None:
        raise MetadataUnknown("the connection broke")

    monkeypatch.setattr(store, "multi", lost)
    assert not await a.claim(FIRST)


async def test_claim_of_an_earlier_session_is_not_taken_for_own(
    tree: MemoryTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The znode goes with that session: the leader would serve, and no server would learn of it."""
    a, store = await claims_of(tree, A)
    former, _ = await claims_of(tree, A)
    assert await former.claim(FIRST)

    async def lost(changes: object) -> None:
        raise MetadataUnknown("the connection broke")

    monkeypatch.setattr(store, "multi", lost)
    assert not await a.claim(FIRST)
    monkeypatch.undo()
    assert await a.claim(FIRST)
    _, stat = await store.get(paths.partition_leader(P))
    assert stat.owner == store.session


# docs/protocol.md P23
async def test_claim_of_unknown_outcome_is_withdrawn_from_a_lagging_server(
    tree: MemoryTree,
) -> None:
    store = LaggingStore(tree)
    claims = Claims(store, P, A)
    await claims.prepare()
    store.lag()
    await MemoryStore.multi(store, [Create(paths.partition_leader(P), FIRST.encode(), ephemeral=True)])
    assert await claims.leader() is None
    await claims.withdraw(FIRST)
    assert await claims.leader() is None
    assert paths.partition_leader(P) not in tree.paths()


async def test_published_progress_is_readable_and_ends_with_the_replica(tree: MemoryTree) -> None:
    a, store = await claims_of(tree, A)
    b, _ = await claims_of(tree, B)
    await a.publish(Published(Seq(7), Seq(5), 1, "one"))
    await a.publish(Published(Seq(8), Seq(5), 1, "one"))
    assert await b.published() == {A: Published(Seq(8), Seq(5), 1, "one")}
    assert await b.published_by(A) == Published(Seq(8), Seq(5), 1, "one")
    assert await b.published_by(B) is None
    store.expire()
    assert await b.published() == {}
    assert await b.published_by(A) is None


# docs/protocol.md P34
async def test_publication_for_another_user_only_hides_no_other() -> None:
    """Otherwise no replica of the partition could rank itself and run for election."""
    store = ClosedStore()
    await LayoutStore(store).initialise("id")
    b = Claims(store, P, B)
    await b.prepare()
    for server in (A, B):
        await Claims(MemoryStore(store.tree), P, server).publish(Published(Seq(7), Seq(5), 1, "one"))
    store.closed = frozenset({paths.partition_replica(P, A)})
    assert await b.published() == {B: Published(Seq(7), Seq(5), 1, "one")}


async def test_restarted_replica_replaces_its_former_publication(tree: MemoryTree) -> None:
    former, _ = await claims_of(tree, A)
    await former.publish(Published(Seq(7), Seq(5), 1, "one"))
    again, store = await claims_of(tree, A)
    await again.publish(Published(Seq(5), Seq(5), 1, "two"))
    _, stat = await store.get(paths.partition_replica(P, A))
    assert stat.owner == store.session


async def test_nothing_is_claimed_without_a_connection(tree: MemoryTree) -> None:
    a, store = await claims_of(tree, A)
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        await a.claim(FIRST)


async def test_successor_replaces_leader_znode_without_a_gap(tree: MemoryTree) -> None:
    a, _ = await claims_of(tree, A)
    b, _ = await claims_of(tree, B)
    await a.claim(FIRST)
    seen: list[bytes | None] = []
    tree.observers.append(lambda path, old, new: seen.append(new) if path == a.leader_path else None)
    assert await b.replace_leader(await a.term(), SECOND)
    assert await a.leader() == SECOND
    assert await b.leader_seen(SECOND.nonce) == (SECOND, False)


async def test_offer_is_void_after_any_claim(tree: MemoryTree) -> None:
    a, _ = await claims_of(tree, A)
    b, _ = await claims_of(tree, B)
    await a.claim(FIRST)
    offered = await a.term()
    assert await a.claim(FIRST), "it stays leader and withdraws the offer"
    assert not await b.replace_leader(offered, SECOND)
    assert await a.leader() == FIRST


async def test_process_recreates_its_znode_of_a_lost_session(tree: MemoryTree) -> None:
    former, _ = await claims_of(tree, A)
    await former.claim(FIRST)
    a, _ = await claims_of(tree, A)
    assert await a.leader_seen(FIRST.nonce) == (FIRST, True)
    assert await a.leader_seen("another process") == (FIRST, False)
    assert await a.claim(FIRST)
    assert await a.leader_seen(FIRST.nonce) == (FIRST, False)
    assert not await a.claim(LeaderRecord(A, 1, "another process")), "which belongs to another"
