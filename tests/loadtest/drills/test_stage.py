"""The report of a drill keeps the other drills' sections of its file."""

from __future__ import annotations

import json
from pathlib import Path

from loadtest.drills.stage import Report


def test_section_is_replaced_and_other_sections_stay(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.json"
    Report().write(out, "ring", seed=1)
    bank = Report()
    bank.add("transfers", 0, least=1)
    bank.write(out, "bank")
    bank.add_safety("transfers lost", 2)
    bank.write(out, "bank")
    found = json.loads(out.read_text())
    assert found["ring"]["seed"] == 1
    assert [found[each]["safe"] for each in ("ring", "bank")] == [True, False]
    assert [row["what"] for row in found["bank"]["figures"]] == ["transfers", "transfers lost"]
    Report().write(out)
    assert "ring" not in json.loads(out.read_text())


def test_verdict_distinguishes_safety_from_figures() -> None:
    report = Report()
    report.add("transfers", 0, least=1)
    assert report.verdict == "safety: kept; figures: NOT all met"
    report.add_safety("transfers lost", 1)
    assert report.verdict == "safety: BROKEN; figures: NOT all met"
