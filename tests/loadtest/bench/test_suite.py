"""The benchmark suite leaves no process and leaves out what a machine lacks. Its tables have medians and ratios."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import suite
from loadtest.bench.closed_loop import Figures
from loadtest.bench.suite import Cell, Load, Measured, Store

LOAD = Load("set", 50)


def measured(*rounds: tuple[float, float]) -> Measured:
    """Return a cell of rates per second, and processor milliseconds per 1,000 operations."""
    found = Measured()
    for rate, cpu_ms in rounds:
        found.add(Figures(rate, 1.0, 2.0, 1_000, {}), cpu_ms / 1_000)
    return found


def test_cells_have_medians_and_ratios_are_of_medians() -> None:
    table = {
        f"{LOAD.name}: {suite.RANDOM}": measured((3_000, 300), (9_000, 100), (1_000, 50)),
        f"{LOAD.name}: {suite.ETCD}": measured((1_500, 200), (2_000, 300), (2_500, 250)),
        f"{LOAD.name}: {suite.LED}": measured((8_000, 50)),
        f"{LOAD.name}: {suite.REDIS}": measured((60_000, 9.876)),
        f"{LOAD.name}: {suite.GRPC}": measured((500, 1_234.5)),
    }
    assert suite.figures_table(table).splitlines() == [
        "|  | SET, 50 |",
        "| --- | --- |",
        f"| {suite.LED} | 8,000; 50 |",
        f"| {suite.RANDOM} | 3,000; 100 |",
        f"| {suite.GRPC} | 500; 1,234 |",
        f"| {suite.ETCD} | 2,000; 250 |",
        f"| {suite.REDIS} | 60,000; 9.88 |",
    ]
    assert suite.ratios_table(table).splitlines() == [
        "| ratio | of medians | of rounds | wanted | met |",
        "| --- | --- | --- | --- | --- |",
        "| SET, 50: random keys, of etcd's | 1.50 | 0.40 to 4.50 | ≥ 1.5 | yes |",
        "| SET, 50: unary gRPC, of etcd's | 0.25 | 0.33 to 0.33 | ≥ 0.6 | no |",
        "| SET, 50: processor time of random keys, of led ones | 2.00 | 6.00 to 6.00 | ≤ 1.9 | no |",
    ]


def test_errors_are_in_the_table_and_a_failed_cell_has_no_ratio() -> None:
    failed = Measured()
    failed.add(Figures(0.0, 0.0, 0.0, 0, {"HTTP 429": 1_200}), 1.0)
    failed.add(Figures(0.0, 0.0, 0.0, 0, {"HTTP 429": 100, "lost": 1}), 1.0)
    table = {f"{LOAD.name}: {suite.HTTP}": measured((1, 1)), f"{LOAD.name}: {suite.GATEWAY}": failed}
    assert f"| {suite.GATEWAY} | 0; nan; 1,301 errors |" in suite.figures_table(table)
    assert len(suite.ratios_table(table).splitlines()) == 2


def test_every_ratio_is_of_cells_that_are_measured() -> None:
    names = {cell.name for cell in suite.cells("")}
    assert {f"{load.name}: {name}" for each in suite.RATIOS for load, name in (each.above, each.below)} <= names


def test_systems_take_turns_and_the_order_is_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def once(cell: Cell, _store: Any, _program: Any, _seconds: float, seed: int) -> tuple[Figures, float]:
        asked.append((cell.system.name, seed))
        return Figures(100.0 * seed, 1.0, 1.0, 1_000, {}), 0.25

    monkeypatch.setattr(suite, "_once", once)
    wanted = [cell for cell in suite.cells(f"{LOAD.name}: ") if cell.system.store == "floor"]
    store = Store({}, [])
    found = suite._measure(wanted, {"floor": store}, None, 3, 1.0)
    first, second = (cell.system.name for cell in wanted)
    assert asked == [(first, 1), (second, 1), (second, 2), (first, 2), (first, 3), (second, 3)]
    assert [(each.rate, each.cpu) for each in found.values()] == [(200.0, 250.0)] * 2


def test_cells_and_rounds_are_kept_when_a_run_adds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "_generator", lambda _folder: tmp_path)
    monkeypatch.setattr(suite, "_started", lambda *_: nullcontext(Store({}, [])))
    monkeypatch.setattr(
        suite, "_measure", lambda wanted, *_: {cell.name: measured((len(cell.load.name), 1)) for cell in wanted}
    )
    out = tmp_path / "bench.json"

    def run(only: str, *, is_adding: bool) -> set[str]:
        suite.run_suite(data_dir=None, runs=1, seconds=1.0, only=only, etcd="etcd", out=out, is_adding=is_adding)
        return set(json.loads(out.read_text())["cells"])

    one, two = f"SET, 1: {suite.LED}", f"SET, 50: {suite.LED}"
    assert run(one, is_adding=True) == {one}
    assert run(two, is_adding=True) == {one, two}
    assert "| kvstore, led keys | 6; 1 | 7; 1 |" in capsys.readouterr().out
    assert run(two, is_adding=True) == {one, two}
    assert json.loads(out.read_text())["cells"][two]["rates"] == [7, 7]
    assert run(two, is_adding=False) == {two}


def test_without_go_only_the_async_client_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = suite._generator(tmp_path)
    left = {cell.system.name for cell in suite.cells("") if suite._can_be_measured(cell, program, "etcd")}
    assert left == {suite.CLIENT}
    assert capsys.readouterr().err == "Go is not installed; only kvstore, AsyncClient is measured\n"


def test_stores_that_are_not_installed_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    wanted = suite.cells(LOAD.name)
    left = {each.system.store for each in wanted if suite._can_be_measured(each, tmp_path, str(tmp_path / "etcd"))}
    assert not left & {"etcd", "Redis"}
    assert f"{tmp_path}/etcd is not installed; left out: SET, 50: {suite.ETCD}" in capsys.readouterr().err
    for program in ("etcd", "redis-server"):
        (tmp_path / program).touch(0o755)
    assert all(suite._can_be_measured(each, tmp_path, str(tmp_path / "etcd")) for each in wanted)


def test_unknown_cells_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "_generator", lambda _folder: tmp_path)
    monkeypatch.setattr(sys, "argv", ["suite", "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "suite: no cell that can be measured here contains 'nothing' in its name\n"


@pytest.mark.parametrize("words", [["--runs", "0"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_suite_of_nothing_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", *words])
    monkeypatch.setattr(suite, "run_suite", lambda **_: pytest.fail("it was begun"))
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    assert "expected 1 run or more" in capsys.readouterr().err
