"""The calls that a node under a count counts."""

from __future__ import annotations

from pathlib import Path

from loadtest.bench.counted_node import Calls


def test_calls_of_c_count_for_their_caller() -> None:
    def outer() -> int:
        return inner() + len("abc") + len("d")

    def inner() -> int:
        return ord("a")

    calls = Calls()
    calls.begin()
    for _ in range(10):
        outer()
    counted = calls.end()
    outer()
    file = Path(__file__)
    named = {name.rpartition(".")[2]: number for name, number in counted.items() if name.startswith(str(file))}
    assert named == {"outer": 30, "inner": 20}
