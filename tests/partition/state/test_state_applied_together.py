"""Entries applied together, in one batch of the engine, have the same result as one by one (docs/protocol.md, P3)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvstore.errors import Corrupted
from kvstore.partition.state import rows
from kvstore.partition.state import state as module
from kvstore.partition.state.engine import EngineBatch
from kvstore.partition.state.entry import Entry, EntryKind, decode
from kvstore.partition.state.state import ReplicaState
from kvstore.ring.hashing import KeyHash
from kvstore.types import Position, Seq
from kvstore.wal.ports import LogEntry
from tests.partition.effects import Writer, all_records, check_indexes, state_over
from tests.partition.state.engine_memory import MemoryEngine

every_seed = pytest.mark.parametrize("seed", range(30))
ENTRIES = 120


class Counting(MemoryEngine):
    """Counts the batches that it receives, and refuses them while it has no space."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.is_full = False

    def write(self, batch: EngineBatch) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no room")
        self.batches += 1
        super().write(batch)


def standing(state: ReplicaState) -> tuple[Any, ...]:
    """Return everything that a state is."""
    return (
        *(state.position, state.seq, state.epoch, state.record_time_ms, state.key_count, state.crc, state.released),
        *(state.fingerprint(), state.retries.rows(), state.checks, state.doubt, list(state._crcs)),
        state.engine.get(rows.META_KEY),
    )


def history(seed: int) -> tuple[Writer, list[LogEntry]]:
    """Make entries of all kinds, including lone puts, and checks of an undamaged state."""
    writer, random, reference = Writer(seed), Random(seed), state_over(MemoryEngine())
    log: list[LogEntry] = []
    for number in range(ENTRIES):
        logged = writer.put(**{f"k{random.randrange(20)}": "x"}) if random.random() < 0.5 else writer.any()
        entry = decode(logged.payload)
        if number and random.random() < 0.1 and entry.keys:
            entry.check_seq, entry.check_crc = random.choice(list(reference._crcs)[-9:])
            logged = LogEntry(logged.position, entry.encode())
        reference.apply(logged)
        log.append(logged)
    assert reference.doubt is None
    return writer, log


def chunks(log: list[LogEntry], random: Random) -> list[list[LogEntry]]:
    found, at = [], 0
    while at < len(log):
        size = random.randrange(1, 20)
        found.append(log[at : at + size])
        at += size
    return found


@every_seed
def test_grouped_entries_apply_like_single_ones(seed: int) -> None:
    _, log = history(seed)
    one_by_one, together = state_over(MemoryEngine()), state_over(MemoryEngine())
    for chunk in chunks(log, Random(seed)):
        for logged in chunk:
            one_by_one.apply(logged)
        together.apply_all(chunk)
        assert standing(together) == standing(one_by_one)
    check_indexes(together)


@every_seed
def test_crash_leaves_the_state_at_some_entry(seed: int) -> None:
    writer, log = history(seed)
    engine, random = MemoryEngine(), Random(seed)
    applied = 0
    while applied < ENTRIES:
        state = state_over(engine)
        for chunk in chunks(log[applied : applied + 30], random):
            state.apply_all(chunk)
        engine.crash(keep=random.randrange(9))
        state = state_over(engine)
        applied = 0 if state.position is None else state.position.entry + 1
        assert all_records(state) == writer.models[applied]
        check_indexes(state)
        state.apply_all(log[applied : applied + 12])
        applied = min(ENTRIES, applied + 12)
        engine.crash(keep=10_000)
    whole = state_over(MemoryEngine())
    whole.apply_all(log)
    assert standing(state_over(engine))[:9] == standing(whole)[:9]


def test_adjacent_puts_share_a_batch_and_control_records_do_not() -> None:
    writer, engine = Writer(0), Counting()
    state, before = state_over(engine), 0
    for _ in range(5):
        writer.put(a="1")
    writer.control(EntryKind.EMPTY)
    for _ in range(5):
        writer.put(b="1")
    before = engine.batches
    state.apply_all(writer.log)
    assert engine.batches - before == 3
    assert (state.seq, state.key_count) == (10, 2)


def test_entries_applied_before_are_ignored() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    log = [writer.put(a=str(number)) for number in range(6)]
    state.apply_all(log[:4])
    state.apply_all([*log[2:4], *log[3:6], *log])
    assert (state.seq, state.position) == (6, log[-1].position)
    assert all_records(state) == writer.model


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_entries_before_a_refused_one_are_applied(good: int) -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    log = [writer.put(a=str(number), b=str(number)) for number in range(good)]
    writer.put(b="lost")
    log += [writer.put(c=str(number)) for number in range(3)]
    for _ in range(2):  # again, as by the next reader
        with pytest.raises(Corrupted, match="the state is at"):
            state.apply_all(log)
        assert state.is_complete
        assert state.seq == 2 * good
        assert all_records(state) == writer.models[good]
        check_indexes(state)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_entries_before_an_undecodable_one_are_applied(good: int) -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    log = [writer.put(a=str(number)) for number in range(good)]
    with pytest.raises(Corrupted, match="cannot be decoded"):
        state.apply_all([*log, LogEntry(writer.put(c="1").position, b"\xff"), writer.put(d="1")])
    assert state.seq == good
    assert all_records(state) == writer.models[good]


def test_refused_engine_batch_changes_nothing_and_can_be_repeated() -> None:
    writer, engine = Writer(0), Counting()
    state = state_over(engine)
    state.apply_all([writer.put(a="1"), writer.put(b="1")])
    for _ in range(9):
        writer.any()
    engine.is_full = True
    with pytest.raises(OSError, match="no room"):
        state.apply_all(writer.log)
    assert not state.is_complete
    assert state.seq == 2
    engine.is_full = False
    state.recover()
    assert all_records(state) == writer.models[2]
    state.apply_all(writer.log)
    assert all_records(state) == writer.model
    check_indexes(state)


# ── broken ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Run = list[tuple[Position, Entry]]
Patch = pytest.MonkeyPatch


def leave_one_out(patch: Patch) -> None:
    """Lose the effects of one of several entries, and count its sequence."""
    change, calls = module.change, iter(range(1 << 30))

    def forgetful(batch: EngineBatch, entry: Entry, hash: KeyHash, data_keys: list[bytes], crc: int) -> tuple[int, int]:
        if next(calls) % 7 == 3:
            return 0, crc
        return change(batch, entry, hash, data_keys, crc)

    patch.setattr(module, "change", forgetful)


def write_the_position_ahead(patch: Patch) -> None:
    apply_run = ReplicaState.apply_run

    def ahead(self: ReplicaState, run: Run) -> None:
        if self.position is not None:
            at, entry = run[-1]
            batch = self.engine.batch()
            said = (at, Seq(entry.last_seq), entry.epoch, entry.time_ms, self.key_count, self.crc, False)
            batch.put(rows.META_KEY, rows.encode_meta(*said))
            self.engine.write(batch)
        apply_run(self, run)

    patch.setattr(ReplicaState, "apply_run", ahead)


def forget_the_request_ids(patch: Patch) -> None:
    apply_run = ReplicaState.apply_run

    def forgetful(self: ReplicaState, run: Run) -> None:
        for _, entry in run[:-1]:
            entry.requests = None
        apply_run(self, run)

    patch.setattr(ReplicaState, "apply_run", forgetful)


def forget_the_checksums_between(patch: Patch) -> None:
    stand_at = ReplicaState._set_progress

    def stand(self: ReplicaState, *values: Any) -> None:
        stand_at(self, *values)
        while len(self._crcs) > 1 and self._crcs[-2][0] > self.seq - 12:
            del self._crcs[-2]

    patch.setattr(ReplicaState, "_set_progress", stand)


def count_what_is_refused(patch: Patch) -> None:
    apply_run = ReplicaState.apply_run

    def careless(self: ReplicaState, run: Run) -> None:
        try:
            apply_run(self, run)
        except OSError:
            at, entry = run[-1]
            self._set_progress(at, entry.last_seq, entry.epoch, entry.time_ms, self.key_count, self.crc, False)
            raise

    patch.setattr(ReplicaState, "apply_run", careless)


def admit_every_run(patch: Patch) -> None:
    patch.setattr(ReplicaState, "_admit", lambda *_: None)


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (leave_one_out, lambda: test_grouped_entries_apply_like_single_ones(1)),
        (
            write_the_position_ahead,
            lambda: [test_crash_leaves_the_state_at_some_entry(each) for each in (1, 2)],
        ),
        (forget_the_request_ids, lambda: test_grouped_entries_apply_like_single_ones(1)),
        (forget_the_checksums_between, lambda: test_grouped_entries_apply_like_single_ones(1)),
        (count_what_is_refused, test_refused_engine_batch_changes_nothing_and_can_be_repeated),
        (admit_every_run, lambda: test_entries_before_a_refused_one_are_applied(2)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_state_is_detected(
    breakage: Callable[[Patch], None], sentence: Callable[[], object], monkeypatch: Patch
) -> None:
    sentence()
    breakage(monkeypatch)
    with pytest.raises((AssertionError, Corrupted, pytest.fail.Exception)):
        sentence()
