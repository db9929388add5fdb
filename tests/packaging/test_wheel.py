"""The files of a release, and the wheel in an environment that has nothing else."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.cluster.harness import OFFSETS, claim_ports
from tests.source import ROOT

LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)


def build(source: Path, to: Path) -> dict[str, str]:
    """Build the wheel and the source distribution. Return their hashes by name."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(to)]
    environ = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, cwd=source, env=environ, check=True, capture_output=True, timeout=100)
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in to.iterdir()}


def copied(to: Path) -> Path:
    """Copy the files that a build reads. The copies have other dates and permissions."""
    to.mkdir()
    for name in ("kvstore", "pyspark_kvstore"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, to / name)
    for path in to.rglob("*.py"):
        path.chmod(0o600)
    return to


def test_release_files_are_reproducible(tmp_path: Path) -> None:
    first = build(copied(tmp_path / "a"), tmp_path / "from-a")
    second = build(copied(tmp_path / "b"), tmp_path / "from-b")
    assert first == second
    assert {name[-4:] for name in first} == {".whl", "r.gz"}


def alone(tmp_path: Path) -> Path:
    """Make an environment with the wheel and the packages of requirements-local.lock, and return its interpreter. The
    packages are links to those of this environment, so that nothing is fetched."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=100)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    for name in LOCKED.findall((ROOT / "requirements-local.lock").read_text()):
        try:
            found = distribution(name)
        except ModuleNotFoundError:
            continue  # for another Python or system
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).unlink(missing_ok=True)  # of pip, which venv has installed
                os.link(source, site / file)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-index", f"{wheel}[node,local]"]
    subprocess.run(install, check=True, capture_output=True, text=True, timeout=100)
    return python


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.needs_zookeeper
def test_wheel_starts_a_local_cluster_in_an_empty_environment(tmp_path: Path) -> None:
    build(ROOT, tmp_path / "dist")
    kvstore = alone(tmp_path).with_name("kvstore")
    offset, claim = next((each, claim) for each in OFFSETS if (claim := claim_ports(each)) is not None)

    def run(*words: str) -> str:
        command = [str(kvstore), *words, "--data-dir", str(tmp_path / "data")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        run("up", "--detach", "--port-offset", str(offset))
        run("put", "greeting", "hello")
        assert run("get", "greeting").strip() == "hello"
    finally:
        run("down")
        os.close(claim)
