"""The writer under any order of events, for striped and plain ensembles: what Hypothesis may not break.

The bookies here are sets of entries; what the writer sends is stored, or not, acknowledged, or not, in any order.
Ensembles are recorded as the writer asks, with any spare bookie, or the change is given up.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.types import BookieId, EntryId, Fragment, LedgerMetadata, Quorum
from kvstore.wal.placement import swaps
from kvstore.wal.writer import (
    AddFailed,
    AddStored,
    Append,
    ChangeFailed,
    Command,
    Confirm,
    EnsembleChanged,
    ReplaceBookies,
    Returned,
    Spares,
    Store,
    WriterState,
)
from tests.wal.ledgers import LEDGER, CheckedWriter, e, pack

NAMES = tuple(BookieId(f"b{i}-x") for i in range(9))
QUORUMS = st.sampled_from([Quorum(n, w, a) for n in range(1, 7) for w in range(1, n + 1) for a in range(1, w + 1)])


class World:
    """One writer, and where its entries really are."""

    def __init__(self, quorum: Quorum, data: st.DataObject) -> None:
        self.data = data
        self.quorum = quorum
        self.recorded = LedgerMetadata(LEDGER, quorum, (Fragment(e(0), NAMES[: quorum.ensemble]),))
        self.writer = CheckedWriter(self.recorded, pack)
        self.disks: dict[BookieId, set[EntryId]] = {name: set() for name in NAMES}
        self.on_the_way: list[tuple[EntryId, BookieId]] = []
        """Sent and not stored."""
        self.unanswered: list[tuple[EntryId, BookieId]] = []
        """Stored and not acknowledged."""
        self.down: set[BookieId] = set()
        self.confirmed: list[EntryId] = []
        self.first = e(0)

    def perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Store(entry, _, bookies):
                    self.on_the_way += [(entry, bookie) for bookie in bookies]
                case Confirm(entry):
                    self.check_confirmed(entry)
                case ReplaceBookies():
                    self.first = self.writer.next_fragment  # what the driver writes, some time later
                case _:
                    continue

    def check_confirmed(self, entry: EntryId) -> None:
        assert entry == len(self.confirmed), "entries are confirmed in order, once"
        holders = [bookie for bookie in self.recorded.write_set(entry) if entry in self.disks[bookie]]
        assert len(holders) >= self.quorum.ack, f"entry {entry} is on {holders} of {self.recorded}"
        self.confirmed.append(entry)

    def append(self) -> None:
        self.perform(self.writer.handle(Append(b"x", 0.0)))

    def store(self) -> None:
        entry, bookie = self.pick(self.on_the_way)
        if bookie not in self.down:
            self.disks[bookie].add(entry)
            self.unanswered.append((entry, bookie))

    def acknowledge(self) -> None:
        self.perform(self.writer.handle(AddStored(*self.pick(self.unanswered))))

    def fail(self) -> None:
        """A connection breaks: what is on the way or not acknowledged is lost."""
        bookie = self.data.draw(st.sampled_from(self.recorded.fragments[-1].ensemble))
        self.down.add(bookie)
        self.on_the_way = [each for each in self.on_the_way if each[1] != bookie]
        self.unanswered = [each for each in self.unanswered if each[1] != bookie]
        self.perform(self.writer.handle(AddFailed(bookie)))

    def come_back(self) -> None:
        bookie = self.data.draw(st.sampled_from(sorted(self.down)))
        self.down.discard(bookie)
        self.perform(self.writer.handle(Returned(bookie)))

    def offer_spares(self) -> None:
        up = frozenset(set(NAMES) - self.down)
        self.perform(self.writer.handle(Spares(self.data.draw(st.sampled_from((up, frozenset()))))))

    def end_change(self) -> None:
        if self.data.draw(st.booleans()):
            self.perform(self.writer.handle(ChangeFailed()))
            return
        ensemble = self.recorded.fragments[-1].ensemble
        up = dict.fromkeys(sorted(set(NAMES) - self.down), "")
        swapped = swaps(ensemble, self.writer.failed, up, self.data.draw(st.randoms(use_true_random=False)))
        changed = tuple(swapped.get(bookie, bookie) for bookie in ensemble)
        self.recorded = self.recorded.with_ensemble(self.first, changed)
        self.perform(self.writer.handle(EnsembleChanged(self.recorded, frozenset(swapped))))

    def pick(self, pending: list[tuple[EntryId, BookieId]]) -> tuple[EntryId, BookieId]:
        return pending.pop(self.data.draw(st.integers(0, len(pending) - 1)))

    def steps(self) -> list[str]:
        """What can happen now."""
        found = ["append", "offer_spares", "fail"]
        found += ["store"] * 3 if self.on_the_way else []
        found += ["acknowledge"] * 3 if self.unanswered else []
        found += ["come_back"] * 2 if self.down else []
        found += ["end_change"] * 2 if self.writer.state is WriterState.CHANGING else []
        return found

    def settle(self) -> None:
        """Everything comes back and is delivered."""
        for _ in range(3):
            if self.writer.state is WriterState.CHANGING:
                self.perform(self.writer.handle(ChangeFailed()))
            for bookie in sorted(self.down | self.writer.failed):
                self.down.discard(bookie)
                self.perform(self.writer.handle(Returned(bookie)))
            while self.on_the_way:
                entry, bookie = self.on_the_way.pop(0)
                self.disks[bookie].add(entry)
                self.unanswered.append((entry, bookie))
            while self.unanswered:
                self.perform(self.writer.handle(AddStored(*self.unanswered.pop(0))))


@settings(max_examples=300)
@given(QUORUMS, st.data())
def test_confirmed_entries_stay_on_an_ack_quorum_of_their_write_set(quorum: Quorum, data: st.DataObject) -> None:
    world = World(quorum, data)
    for _ in range(data.draw(st.integers(0, 60))):
        getattr(world, data.draw(st.sampled_from(world.steps())))()
    world.settle()
    assert world.writer.unconfirmed == 0, "with all bookies back every entry is confirmed"
    for entry in world.confirmed:
        holders = [bookie for bookie in world.recorded.write_set(entry) if entry in world.disks[bookie]]
        assert len(holders) >= quorum.ack
