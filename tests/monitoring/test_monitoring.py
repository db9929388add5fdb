"""Alerting rules and boards: they name metrics that nodes or `kvstore snapshot` publish, and promtool accepts
them. Tests that need promtool are skipped if it is not installed (Debian's package prometheus)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.cli.snapshot_metrics import METRICS
from kvstore.server.http.metric_table import DECLARED
from scripts import boards
from tests.source import ROOT

FOLDER = ROOT / "docs" / "monitoring"
RULES = (FOLDER / "rules.yml").read_text(encoding="utf-8")
UNIT_TESTS = (FOLDER / "rules_test.yml").read_text(encoding="utf-8")
PUBLISHED = {f"kvstore_{name}" for name in DECLARED} | METRICS.keys()
METRIC = re.compile(r"\b(?:kvstore|process)_[a-z0-9_]+\b")
OF_PROMETHEUS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
PROMTOOL = shutil.which("promtool", path=f"{os.environ['PATH']}{os.pathsep}{ROOT}/build/tools")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def documents() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("boards/*.json"))}


def expressions() -> list[str]:
    return [
        target["expr"]
        for document in documents().values()
        for panel in document["panels"]
        for target in panel.get("targets", ())
    ]


def metrics_in(text: str) -> set[str]:
    """Return the metrics that an expression names, with the parts of a histogram as the histogram."""
    found = set()
    for name in METRIC.findall(text):
        whole = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(whole if whole in PUBLISHED else name)
    return found


def alerts() -> dict[str, str]:
    """Return the expression of each alert."""
    found = re.findall(r"- alert: (\w+)\n\s+expr: (?:>-\n\s+)?(.*)\n", RULES)
    return dict(found)


def test_rules_and_boards_use_only_published_metrics() -> None:
    named = metrics_in(" ".join([*alerts().values(), *expressions()]))
    assert len(named) > 60
    assert sorted(named - PUBLISHED - OF_PROMETHEUS) == []


def test_each_alert_has_a_severity_and_advice() -> None:
    assert len(alerts()) == RULES.count("- alert: ") > 30
    for alert in RULES.split("- alert: ")[1:]:
        assert re.search(r"labels: \{severity: (page|ticket)\}", alert), alert
        assert re.search(r"\n {10}summary: .+\n {10}do: .+\n {10}runbook: .+", alert), alert


def headings(page: str) -> set[str]:
    """Return the anchors of the headings of a guide, as the site makes them."""
    titles = re.findall(r"^##+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_runbook_of_each_alert_is_a_guide_and_a_heading_in_it() -> None:
    runbooks = re.findall(r"\n {10}runbook: (.+)", RULES)
    assert len(runbooks) == len(alerts())
    for runbook in runbooks:
        path, _, anchor = runbook.partition("#")
        assert re.fullmatch(r"docs/how-to/[\w-]+\.md", path), runbook
        assert not anchor or anchor in headings((ROOT / path).read_text(encoding="utf-8")), runbook


def test_each_alert_has_unit_tests_with_and_without_firing() -> None:
    quiet = set(
        re.findall(r'alertname="(\w+)", alertstate="firing"\}\)\', eval_time: \w+, exp_samples: \[\]', UNIT_TESTS)
    )
    fires = set(re.findall(r'\{alertname="(\w+)", alertstate="firing"\}\', value: 1', UNIT_TESTS))
    assert quiet == fires == set(alerts())


def test_healthy_series_cover_all_rules() -> None:
    """A rule about a series that is missing in the first unit test would not fire there in any case."""
    well = UNIT_TESTS.partition("input_series:")[2].partition("promql_expr_test:")[0]
    assert sorted(metrics_in(" ".join(alerts().values())) - metrics_in(well)) == []


def test_boards_match_the_output_of_the_script() -> None:
    assert documents() == {name: json.loads(text) for name, text in boards.written().items()}


def test_boards_can_be_loaded_together() -> None:
    found = documents().values()
    assert len({each["uid"] for each in found}) == len({each["title"] for each in found}) == 3
    for board in found:
        variables = {each["name"] for each in board["templating"]["list"]} | {"__rate_interval"}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in board["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24
            for target in panel.get("targets", ()):
                assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= variables
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
        assert len(places) == len(ids), "no chart lies over another"


def strays(board: dict[str, Any]) -> list[str]:
    """Return the parts of a board that Grafana's own types for boards lack or take for something else."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    return list(_differences(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))))


def _differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from _differences(value, theirs[name], f"{place}.{name}") if name in theirs else [f"{place}.{name}"]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{place}[{number}]")
    elif ours != theirs:
        yield place


@pytest.mark.parametrize("name", sorted(documents()))
def test_boards_match_the_schema_of_grafana(name: str) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    assert strays(documents()[name]) == []


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"title": "t", "refreshes": "30s"}, ".refreshes"),
        ({"panels": [{"type": "timeseries", "gridPosition": {}}]}, ".panels[0].gridPosition"),
        ({"panels": [{"type": "timeseries", "fieldConfig": {"defaults": {"custom": {"line": 1}}, "overrides": []}}]},
         ".panels[0].fieldConfig.defaults.custom.line"),
        ({"panels": [{"type": "timeseries", "datasource": {"type": "prometheus"}, "targets": [{"query": "up"}]}]},
         ".panels[0].targets[0].query"),
        ({"templating": {"list": [{"name": "n", "type": "query", "querry": "q"}]}}, ".templating.list[0].querry"),
    ],
)  # fmt: skip
def test_board_of_another_form_is_detected(wrong: dict[str, Any], place: str) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    assert place in strays(wrong)


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    answer = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(FOLDER / "rules.yml"))


@needs_promtool
def test_unit_tests_of_the_rules_pass() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(FOLDER / "rules_test.yml"))


@needs_promtool
def test_wrong_rule_fails_its_unit_test(tmp_path: Path) -> None:
    document = yaml.safe_load(UNIT_TESTS)
    document["tests"] = [each for each in document["tests"] if "KvstoreBookieFull" in json.dumps(each)][-1:]
    (tmp_path / "rules_test.yml").write_text(json.dumps(document))  # JSON is YAML
    (tmp_path / "rules.yml").write_text(RULES)
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "rules_test.yml"))
    (tmp_path / "rules.yml").write_text(RULES.replace("kvstore_bookie_readonly == 1", "kvstore_bookie_readonly == 2"))
    with pytest.raises(AssertionError, match="KvstoreBookieFull"):
        promtool("test", "rules", str(tmp_path / "rules_test.yml"))


@needs_promtool
def test_promtool_accepts_the_expressions_of_the_boards(tmp_path: Path) -> None:
    rules = [
        {"record": f"board:{place}", "expr": re.sub(r"\$\w+", ".*", each.replace("$__rate_interval", "5m"))}
        for place, each in enumerate(expressions())
    ]
    file = tmp_path / "boards.yml"
    file.write_text(json.dumps({"groups": [{"name": "boards", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", str(file))
