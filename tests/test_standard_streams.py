"""Closed standard descriptors, and output encodings other than UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.shell import run_by_shell

OPENS = """
import os, sys
from kvstore.standard_streams import prepare_standard_streams

prepare_standard_streams()
number = os.open("/dev/zero", os.O_RDONLY)
assert number > 2, number
assert sys.stdin.read() == ""
print("out")
print("err", file=sys.stderr)
sys.stdout.flush()
sys.stderr.flush()
os._exit(7)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_files_never_get_closed_standard_descriptors(closed: tuple[int, ...]) -> None:
    command = run_by_shell("".join(f"exec {number}>&-; " for number in closed), [sys.executable, "-c", OPENS])
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    shown = (b"" if 1 in closed else b"out\n", b"" if 2 in closed else b"err\n")
    assert (done.returncode, done.stdout, done.stderr) == (7, *shown)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_command_with_closed_standard_descriptor_succeeds(closed: int) -> None:
    command = run_by_shell(f"exec {closed}>&-; ", [sys.executable, "-m", "kvstore", "--version"])
    assert subprocess.run(command, capture_output=closed != 1).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_escapes_what_its_encoding_lacks(encoding: str) -> None:
    text = "\u00e9 \u65e5 \U0001f600"
    program = (
        "import json, sys\n"
        "from kvstore.standard_streams import prepare_standard_streams\n"
        "prepare_standard_streams()\n"
        f"print(json.dumps({text!r}, ensure_ascii=False))\n"
        f"print({text!r}, file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout.decode(encoding)) == text
    assert done.stderr
