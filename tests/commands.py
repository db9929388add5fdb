"""Commands of `kvstore` in the process of the test, from the words of a line to its exit code. A process of its own for
each takes half a second of a processor to start; that a shell's do the same is shown where one is started:
tests/cluster/test_up.py, secure/test_up.py, and the walks of the docs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import NamedTuple
from unittest.mock import patch

from typer.testing import CliRunner

from kvstore.__main__ import main


class Done(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


def kvstore(*words: str, environ: Mapping[str, str | None] | None = None, stdin: str = "") -> Done:
    """Run a command line in this process. `environ` adds variables to the environment; None removes one. The command
    replaces the output and environment of the whole process, so no other thread of the test may run meanwhile."""
    assert threading.current_thread() is threading.main_thread(), "a command beside the test is a process of its own"
    with (
        CliRunner().isolation(stdin, env=environ) as (out, errors, _),
        patch.object(sys, "argv", ["kvstore", *words]),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        said, told = out.getvalue().decode(), errors.getvalue().decode()
    if isinstance(code, str):
        return Done(1, said, f"{told}{code}\n")
    return Done(code if isinstance(code, int) else 0, said, told)
