"""Recognition of the Python that runs this."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.env import interpreter
from kvstore.env.interpreter import is_profile_guided


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (("'--prefix=/usr/local' '--enable-optimizations' '--with-lto'", "", ""), True),
        (("'--prefix=/usr'", "-I../Include -Wdate-time -D_FORTIFY_SOURCE=2", "-g"), True),  # Debian 12
        (("'--prefix=/usr'", "-I../Include", "-Wdate-time -D_FORTIFY_SOURCE=2 -g"), True),  # Debian 13
        (("'--prefix=/opt/python'", "-I/opt/include", "-std=c11 -Wextra"), False),
        (("", "", ""), False),
    ],
)
def test_profile_guided_build_is_recognised(told: tuple[str, str, str], expected: bool) -> None:
    assert is_profile_guided(*told) is expected


def test_setup_tests_a_candidate_by_running_the_file() -> None:
    """The file runs alone: nothing is installed yet when setup runs it."""
    asked = subprocess.run([sys.executable, "-I", str(Path(interpreter.__file__))], check=False)
    assert asked.returncode == (0 if interpreter.is_this_profile_guided() else 1)
    assert interpreter.interpreter().startswith(f"{platform.python_version()} (")
