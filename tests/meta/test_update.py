from collections.abc import Awaitable, Callable

import pytest

from kvstore.errors import LedgerFenced, MetadataUnavailable, MetadataUnknown, VersionConflict
from kvstore.meta import update as module
from kvstore.meta.update import until_known, update


class Cell:
    """A versioned number whose writes fail on demand: `faults` has what happens before each one."""

    def __init__(self, *faults: Callable[["Cell"], None], reads: tuple[type[Exception], ...] = ()) -> None:
        self.value, self.version = 0, 0
        self.faults, self.read_errors = list(faults), list(reads)
        self.writes = 0

    async def read(self) -> tuple[int, int]:
        if self.read_errors:
            raise self.read_errors.pop(0)()
        return self.value, self.version

    async def write(self, value: int, version: int) -> int:
        self.writes += 1
        if self.faults:
            self.faults.pop(0)(self)
        if version != self.version:
            raise VersionConflict("cell")
        self.value, self.version = value, version + 1
        return self.version

    def add(self, amount: int) -> Awaitable[tuple[int, int]]:
        return update(self.read, self.write, lambda value: value + amount)

    def raise_to(self, value: int) -> Awaitable[tuple[int, int]]:
        return update(self.read, self.write, lambda current: max(current, value))


def another_writer(cell: Cell) -> None:
    cell.value, cell.version = cell.value + 10, cell.version + 1


def done_but_unknown(cell: Cell) -> None:
    cell.value, cell.version = 5, cell.version + 1
    cell.read_errors = [MetadataUnavailable, MetadataUnknown]
    raise MetadataUnknown


def lost_and_unknown(cell: Cell) -> None:
    cell.read_errors = [MetadataUnavailable]
    raise MetadataUnknown


def lost_for_good(cell: Cell) -> None:
    cell.read_errors = [MetadataUnavailable] * 1000
    raise MetadataUnknown


def lost(_: Cell) -> None:
    raise MetadataUnknown


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECONNECT_DELAY_S", 0)


async def test_losing_writer_decides_again_on_the_winners_value() -> None:
    cell = Cell(another_writer, another_writer)
    assert await cell.add(1) == (21, 3)


async def test_change_that_changes_nothing_writes_nothing() -> None:
    cell = Cell()
    assert await cell.add(0) == (0, 0)
    assert cell.writes == 0


async def test_write_that_was_done_after_all_is_recognised() -> None:
    cell = Cell(done_but_unknown)
    assert await cell.raise_to(5) == (5, 1)
    assert cell.writes == 1


async def test_write_that_was_not_done_is_repeated() -> None:
    cell = Cell(lost_and_unknown)
    assert await cell.raise_to(5) == (5, 1)
    assert cell.writes == 2


async def test_outcome_not_learned_in_time_is_unknown_and_never_unavailable() -> None:
    with pytest.raises(MetadataUnknown):
        await Cell(lost_for_good).add(1)


async def test_unavailable_after_unknown_stays_unknown() -> None:
    def unavailable(_: Cell) -> None:
        raise MetadataUnavailable

    with pytest.raises(MetadataUnknown):
        await Cell(lost, *[unavailable] * 100).add(1)


async def test_unavailable_at_first_is_raised_at_once() -> None:
    cell = Cell(reads=(MetadataUnavailable,))
    with pytest.raises(MetadataUnavailable):
        await cell.add(1)


async def test_broken_first_read_leaves_nothing_unknown() -> None:
    with pytest.raises(MetadataUnavailable):
        await Cell(reads=(MetadataUnknown,)).add(1)


async def test_attempts_of_an_update_are_bounded() -> None:
    cell = Cell(*[another_writer] * 100)
    with pytest.raises(VersionConflict):
        await cell.add(1)
    assert cell.writes == module.ATTEMPTS_MAX


async def test_change_may_abandon_the_update() -> None:
    cell = Cell()

    def refuse(_: int) -> int:
        raise LedgerFenced

    with pytest.raises(LedgerFenced):
        await update(cell.read, cell.write, refuse)
    assert cell.writes == 0


async def test_call_is_repeated_while_its_outcome_is_unknown() -> None:
    answers: list[Exception | int] = [MetadataUnknown(), MetadataUnavailable(), MetadataUnknown(), 7]

    async def call() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await until_known(call) == 7
    answers[:] = [MetadataUnavailable(), 7]
    with pytest.raises(MetadataUnavailable):
        await until_known(call)
