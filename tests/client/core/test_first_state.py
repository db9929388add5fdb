"""A watch that begins with the state: nothing missed, nothing twice, whatever is written and moved while it is read."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.client.core import first_state
from kvstore.client.core.first_state import FirstState
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.operations import Part
from kvstore.client.core.routing import PartitionRoute, Routing
from kvstore.client.core.session import ClientState
from kvstore.client.core.values import Item
from kvstore.client.core.watching import Change, WatchCursor, WatchedKeys
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.proto import kv_pb2

KEYS = [b"k%d" % number for number in range(12)]


class Ring(Routing):
    """Owners of keys, set by the test."""

    owner_of: dict[bytes, str]

    def partition_of(self, key: bytes) -> str:
        return self.owner_of[key]


class Store:
    """Two partitions whose keys are written and moved, and everything that they log."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.seen = ClientState(random)
        self.ring = self.seen.routing = Ring(
            ring_version=1, partitions={each: PartitionRoute() for each in ("p1", "p2")}, owners=["p1", "p2"]
        )
        self.ring.owner_of = {key: random.choice(("p1", "p2")) for key in KEYS}
        self.sequences = {"p1": random.randint(0, 50), "p2": 0}
        self.held: dict[bytes, int] = {}
        self.log: list[Change] = []

    def write(self) -> None:
        key = self.random.choice(KEYS)
        partition = self.ring.owner_of[key]
        self.sequences[partition] += 1
        sequence, item = self.sequences[partition], None
        if self.random.random() < 0.3:
            if self.held.pop(key, None) is None:
                return
        else:
            self.held[key] = sequence
            item = Item(b"v", sequence, 1, 5, 0)
        self.log.append(Change(key, item, sequence, 5, partition, False))

    def move(self) -> None:
        """The next owner's sequences begin above the former one's (docs/protocol.md M9)."""
        target = self.random.choice(("p1", "p2"))
        key = self.random.choice(KEYS)
        self.ring.owner_of[key] = target
        self.sequences[target] = max(self.sequences.values()) + 1
        self.ring.ring_version += 1

    def answer(self, op: ClientOperation) -> Part:
        end = op.value or b"\xff"
        keys = [key for key in sorted(self.held) if self.ring.owner_of[key] == op.partition and op.key <= key < end]
        page = self.random.randint(1, 3)
        self.seen.absorb({op.partition: self.sequences[op.partition]})
        items = [(key, Item(b"v", self.held[key], 1, 5, 0)) for key in keys[:page]]
        return Part(items, keys[page] if len(keys) > page else None, 0)


# docs/protocol.md F8
@pytest.mark.parametrize("moves", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(150))
def test_state_and_later_changes_come_exactly_once(seed: int, moves: float) -> None:
    random = Random(seed)
    store = Store(random)
    for _ in range(15):
        store.write()
    state = FirstState(WatchedKeys(b"", b""), store.seen, store.seen.absorb)
    if random.random() < moves:
        store.move()
    begun, behind = dict(store.sequences), len(store.log)
    before = dict(store.held)
    state.begin(begun)
    given: list[Change] = []
    while not state.is_over:
        wanted = state.wanted() if state.is_short else []
        for _ in range(random.randint(0, 4)):
            store.write()
        if wanted:
            answers = [store.answer(op) for op in wanted]
            if random.random() < moves:
                store.move()
            state.take(answers)
        elif state.has_more:
            given.append(state.give())
    shown = {change.key: change.version for change in given}
    for _ in range(5):
        store.write()
    position = dict(begun)
    for change in store.log[behind:]:
        position[change.partition] = change.version
        if state.is_news(change, position):
            given.append(change)
    assert [change.key for change in given[: len(shown)]] == sorted(shown)
    expected = [change for change in store.log[behind:] if change.version > shown.get(change.key, 0)]
    assert given[len(shown) :] == expected, "each change that the state has not, once"
    for key, version in before.items():
        assert shown.get(key, 0) >= version or any(
            change.key == key and change.item is None for change in store.log[behind:]
        ), "each key that existed is returned, unless it was deleted meanwhile"
    copy: dict[bytes, int] = {}
    for change in given:
        copy.pop(change.key, None)
        if change.item is not None:
            copy[change.key] = change.version
    assert copy == store.held


def test_remembered_keys_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(Random(1))
    state = FirstState(WatchedKeys(b"", b""), store.seen, store.seen.absorb)
    state.begin(store.sequences)
    for _ in range(40):
        store.write()
    while state.is_short:
        state.take([store.answer(op) for op in state.wanted()])
        while state.has_more and not state.is_over:
            state.give()
    assert state._versions
    late = Change(b"other", None, max(store.sequences.values()), 5, "p1", False)
    assert state.is_news(late, {each: max(store.sequences.values()) for each in store.sequences})
    assert not state._versions
    monkeypatch.setattr(first_state, "REMEMBERED_MAX", 2)
    state = FirstState(WatchedKeys(b"", b""), store.seen, store.seen.absorb)
    state.begin({"p1": 0, "p2": 0})
    answers = [store.answer(op) for op in state.wanted()]
    with pytest.raises(Overloaded, match="more than 2 keys were written while the state was read"):
        read_on(state, store, answers)


def read_on(state: FirstState, store: Store, answers: list[Part]) -> None:
    while True:
        state.take(answers)
        answers = [store.answer(op) for op in state.wanted()]


def test_state_together_with_a_position_is_refused() -> None:
    seen = ClientState(Random(1))
    with pytest.raises(InvalidRequest, match="got both"):
        FirstState.of(WatchedKeys(b"", b""), {"p1": 3}, seen, seen.absorb)


def test_key_that_moves_to_an_unfollowed_partition_is_remembered() -> None:
    """The watch of one key has only its owner's position. A watch of everything has the position of a new partition
    only once it follows it. Either still has all of that partition's log before it."""
    seen = ClientState(Random(1))
    ring = seen.routing = Ring(
        ring_version=1, partitions={each: PartitionRoute() for each in ("p1", "p2")}, owners=["p1", "p2"]
    )
    ring.owner_of = {b"k": "p1"}
    state, reading = (
        FirstState(WatchedKeys(b"k", b"k\0"), seen, seen.absorb),
        WatchCursor(WatchedKeys(b"k", b"k\0"), None, {}),
    )
    reading.take(kv_pb2.WatchResponse(positions={"p1": 80}))
    state.begin(reading.position)
    ring.ring_version, ring.owner_of = 2, {b"k": "p2"}
    wanted = state.wanted()
    seen.absorb({"p1": 80, "p2": 600})
    here = [(b"k", Item(b"v", 500, 1, 5, 0))]
    state.take([Part(here if op.partition == "p2" else [], None, 0) for op in wanted])
    given = [state.give().version]
    for partition, versions in (("p1", (90,)), ("p2", (450, 500, 501))):
        changes = [kv_pb2.Change(key=b"k", sequence=each, record=kv_pb2.Record(version=each)) for each in versions]
        reading.take(kv_pb2.WatchResponse(partition=partition, sequence=versions[-1], changes=changes))
        while reading.has_more:
            change = reading.give()
            if state.is_news(change, reading.position):
                given.append(change.version)
    assert given == [500, 501]


# docs/protocol.md F8
def test_client_that_learns_the_ring_by_its_first_read_remembers_no_more() -> None:
    """The client was idle while the ring changed: nothing has moved since the watch began."""
    store = Store(Random(3))
    for _ in range(40):
        store.write()
    state = FirstState(WatchedKeys(b"", b""), store.seen, store.seen.absorb)
    begun = dict(store.sequences)
    state.begin(begun)
    answers = [store.answer(op) for op in state.wanted()]
    store.ring.ring_version += 1
    state.take(answers)
    assert state.should_restart()
    assert not state.should_restart(), "it has no positions yet"
    state.begin(begun)
    while not state.is_over:
        if state.is_short:
            state.take([store.answer(op) for op in state.wanted()])
            assert not state.should_restart()
        state.give()
    assert not state._versions


def test_watch_restarts_a_bounded_number_of_times() -> None:
    store = Store(Random(3))
    state = FirstState(WatchedKeys(b"", b""), store.seen, store.seen.absorb)
    times = 0
    while True:
        state.begin(store.sequences)
        store.ring.ring_version += 1
        if not state.should_restart():
            break
        times += 1
    assert times == first_state.RESTARTS_MAX
