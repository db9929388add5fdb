"""Every place that names the version names the same one, and the upgrade test starts from the release before it."""

from __future__ import annotations

import re
import tomllib

import yaml

from kvstore.server.app import VERSION
from tests.source import ROOT, tracked_texts
from tests.upgrade.base import RELEASE


def test_every_file_names_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((ROOT / "packaging" / "helm" / "kvstore" / "Chart.yaml").read_text(encoding="utf-8"))
    assert {project["version"], chart["version"], chart["appVersion"]} == {VERSION}
    wheels = {
        (path, version)
        for path, text in tracked_texts().items()
        if path.endswith(".md")
        for version in re.findall(r"kvstore_log-([\d.]+)-py3", text)
    }
    assert len(wheels) > 2
    assert {(path, version) for path, version in wheels if version != VERSION} == set()


def test_upgrades_start_from_the_release_before_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)$", changelog, re.MULTILINE)[:2] == [VERSION, RELEASE]
