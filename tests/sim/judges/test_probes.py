"""Paths that were not taken are found."""

import pytest

from tests.sim.judges import probes


def test_declared_path_is_missed_until_taken() -> None:
    probes.declare("test.path", "test.other")
    assert probes.missed("test.path") == ["test.path"]
    probes.probe("test.path")
    assert probes.missed("test.") == ["test.other"]
    probes.probe("test.other")
    assert probes.missed("test.") == []


def test_undeclared_path_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not declared"):
        probes.probe("test.nowhere")


def test_method_calls_can_be_watched() -> None:
    class Code:
        def rare(self, number: int) -> int:
            return number + 1

    original = Code.rare
    with probes.watch("test.rare", Code, "rare"):
        assert probes.missed("test.rare") == ["test.rare"]
        assert Code().rare(1) == 2
    assert probes.missed("test.rare") == []
    assert Code.rare is original
