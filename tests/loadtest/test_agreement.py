"""Programs are judged by the difference that their own time does not explain."""

from __future__ import annotations

from typing import Any

from loadtest.agreement import Figure, is_too_far, judged


def rows(**p50s_ms: tuple[list[float], list[float]]) -> dict[str, dict[str, Any]]:
    """Return for each program its rounds against the store and against the server that does nothing."""
    taken = {
        (name, place): [Figure(p50_ms, 100.0) for p50_ms in rounds]
        for name, both in p50s_ms.items()
        for place, rounds in enumerate(both)
    }
    return {row["by"]: row for row in judged({"endpoint": "resp"}, list(p50s_ms), taken)}


def test_first_program_agrees_with_itself() -> None:
    row = rows(c=([2.0], [0.1]), python=([9.0], [0.1]))["c"]
    assert (row["apart"], row["left"], is_too_far(row)) == (0.0, 0.0, False)


def test_programs_own_time_explains_that_it_is_slower() -> None:
    row = rows(c=([1.0], [0.1]), python=([1.5], [0.6]))["python"]
    assert (row["apart"], row["left"], is_too_far(row)) == (0.5, 0.0, False)


def test_difference_not_explained_by_service_time_is_too_large() -> None:
    found = rows(c=([1.0], [0.1]), near=([1.2], [0.16]), far=([1.3], [0.13]), below=([0.8], [0.1]))
    assert found["near"]["left"] == 0.14
    assert {name for name, row in found.items() if is_too_far(row)} == {"far", "below"}


def test_matching_figures_need_no_explanation() -> None:
    row = rows(c=([1.0], [0.01]), python=([1.1], [0.3]))["python"]
    assert (row["apart"], row["left"], is_too_far(row)) == (0.1, -0.19, False)


def test_calls_of_different_kinds_are_shown_and_not_judged() -> None:
    row = rows(c=([1.0], [0.1]), python=([2.0], [0.1]))["python"]
    assert is_too_far(row)
    assert not is_too_far({**row, "endpoint": "grpc"})


def test_best_round_of_each_counts() -> None:
    row = rows(c=([7.0, 1.0, 3.0], [0.1, 5.0]), python=([1.1, 8.0], [9.0, 0.1]))["python"]
    assert (row["p50_ms"], row["own_ms"], row["apart"]) == (1.1, 0.1, 0.1)
