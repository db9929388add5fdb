"""Commands wait until a server reports a result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.cli import admin
from kvstore.errors import InvalidRequest, StoreError, Unavailable

NOBODY = "nobody says whether it is done"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "POLL_S", 0.0)


def waited(answers: Iterator[int | str | StoreError], timeout_s: float = 60.0) -> int:
    def ask() -> int | str:
        answer = next(answers)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    return admin.wait_until(ask, NOBODY, timeout_s=timeout_s)


def test_wait_ends_with_the_first_result() -> None:
    assert waited(iter(["not yet", Unavailable("away"), "not yet", 7])) == 7


@pytest.mark.parametrize(("answer", "text"), [("not yet", "not yet"), (Unavailable("away"), NOBODY)])
def test_wait_says_at_its_end_what_is_missing(answer: str | StoreError, text: str) -> None:
    with pytest.raises(Unavailable, match=f"^{text} within 0 s$"):
        waited(iter([answer]), timeout_s=0.0)


def test_wait_ends_with_a_permanent_error() -> None:
    with pytest.raises(InvalidRequest):
        waited(iter(["not yet", InvalidRequest("no such partition")]))
