"""Work beside a test ends with its block."""

from __future__ import annotations

import threading

import pytest

from tests import beside as module
from tests.beside import beside, in_time


@pytest.mark.parametrize("fails", [False, True])
def test_work_ends_with_its_block_when_the_block_fails_too(fails: bool) -> None:
    ended = []

    def work(over: threading.Event) -> None:
        over.wait()
        ended.append(True)

    try:
        with beside(work, work):
            assert ended == []
            assert not fails
    except AssertionError:
        assert fails
    assert ended == [True, True]


def test_work_can_end_before_its_block() -> None:
    ended = []
    with beside(lambda over: ended.append(over.wait())) as end:
        end()
        assert ended == [True]


def test_work_that_does_not_end_fails_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_S", 0.05)
    ends = threading.Event()

    def work_on(_: threading.Event) -> None:
        ends.wait()

    with pytest.raises(AssertionError, match=r"(?s)not over after 0\.05 s:.*work_on.*ends\.wait\(\)"), beside(work_on):
        pass
    ends.set()


def test_call_that_does_not_hang_returns_its_result() -> None:
    assert in_time(lambda: 4711) == 4711
