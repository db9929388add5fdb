"""`scripts/setup.sh` names the Python that it uses, or all that it found, why each is unsuitable, and a remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.source import ROOT

SCRIPT = ROOT / "scripts" / "setup.sh"


def looked(
    tmp_path: Path, pythons: str, system: str = "ID=debian\nVERSION_ID=13\nPRETTY_NAME='Debian 13'\n"
) -> tuple[int, str]:
    """Return the exit code and the output of the script on such a system with these interpreters."""
    release = tmp_path / "os-release"
    release.write_text(system)
    environ = os.environ | {"PYTHON": pythons, "OS_RELEASE": str(release)}
    done = subprocess.run([SCRIPT, "--look"], capture_output=True, text=True, env=environ, check=False)
    return done.returncode, done.stdout + done.stderr


def interpreter(tmp_path: Path, name: str, version: str, *, has_venv: bool = True, is_optimised: bool = True) -> str:
    """Return a program that answers the script's questions to a Python interpreter."""
    path, minor = tmp_path / name, int(version.split(".")[1])
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  *print*) echo {version} ;;\n"
        f"  *version_info*) exit {int(not 11 <= minor <= 14)} ;;\n"
        f"  *ensurepip*) exit {int(not has_venv)} ;;\n"
        f"  *interpreter.py) exit {int(not is_optimised)} ;;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return str(path)


def test_setup_names_the_chosen_python(tmp_path: Path) -> None:
    old = interpreter(tmp_path, "old", "3.10.2")
    plain = interpreter(tmp_path, "plain", "3.12.1", is_optimised=False)
    good = interpreter(tmp_path, "good", "3.14.0")
    assert looked(tmp_path, f"{old} {plain} {good}") == (0, f"Python: {good} (3.14.0)\n")
    code, said = looked(tmp_path, f"{old} {plain}")
    assert (code, said) == (0, f"Python: {plain} (3.12.1), not profile-guided: some 15 to 20 % slower\n")
    assert looked(tmp_path, sys.executable)[0] == 0, "a real one"


def test_setup_names_each_unfit_python_with_the_reason(tmp_path: Path) -> None:
    old, new = interpreter(tmp_path, "old", "3.10.2"), interpreter(tmp_path, "new", "3.15.0")
    bare = interpreter(tmp_path, "bare", "3.13.5", has_venv=False)
    code, said = looked(tmp_path, f"{old} {new} {bare} {tmp_path}/nothing")
    assert code == 1
    assert re.findall(r"^  (.*)$", said, re.MULTILINE) == [
        f"{old} (3.10.2): expected 3.11 to 3.14",
        f"{new} (3.15.0): expected 3.11 to 3.14",
        f"{bare} (3.13.5): has no venv or ensurepip",
    ]
    assert "On Debian 13: sudo apt-get install -y python3 python3-venv" in said


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_ID='24.04'\n", "apt-get install -y python3 python3-venv"),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_ID='22.04'\n", "apt-get install -y python3.11 python3.11-venv"),
        ("ID=debian\nVERSION_ID='11'\n", "none that is new enough"),
        ("ID=rocky\nID_LIKE='rhel centos fedora'\nVERSION_ID='9.4'\n", "dnf install -y python3.12"),
        ("ID=opensuse-leap\nID_LIKE='suse opensuse'\n", "zypper install"),
        ("ID=arch\n", "pacman -S"),
        ("ID=alpine\n", "none for musl"),
        ("ID=other\nPRETTY_NAME='Other 1'\n", "On Other 1: install Python 3.11 to 3.14"),
        ("", "install Python 3.11 to 3.14"),
    ],
)
def test_setup_advice_fits_the_operating_system(tmp_path: Path, system: str, says: str) -> None:
    code, said = looked(tmp_path, "/nowhere/python3", system)
    assert code == 1
    assert says in said


def test_setup_script_and_project_accept_the_same_pythons() -> None:
    first, last = (int(number) for number in re.findall(r"^(?:first|last)_minor=(\d+)$", SCRIPT.read_text(), re.M))
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted == f">=3.{first},<3.{last + 1}"
    assert f"Python 3.{first} to 3.{last}" in (ROOT / "README.md").read_text()
