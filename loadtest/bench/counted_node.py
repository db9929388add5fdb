"""Runs the `kvstore` command and counts the calls of its event loop:
`python -m loadtest.bench.counted_node FILE node run --config …`.

SIGUSR1 begins a count. SIGUSR2 ends it and writes it to FILE as JSON: for each Python file and function, the number
of calls of the function plus the number of C functions that it called.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType


class Calls:
    """Counts the calls of the thread that begins the count, and of all threads from Python 3.12 on.

    cProfile counts in C. A function of sys.setprofile has the interpreter copy the local variables of every frame to a
    dict and back, and a node under such a count has crashed in Python 3.11.2."""

    def begin(self) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def end(self) -> Counter[str]:
        """End the count. Return the number of calls by Python file and function, including the C functions that each
        called."""
        self._profile.disable()
        found: Counter[str] = Counter()
        for entry in self._profile.getstats():
            if isinstance(entry.code, CodeType):
                name = f"{entry.code.co_filename}:{entry.code.co_qualname}"
                found[name] += entry.callcount + sum(
                    each.callcount for each in entry.calls or () if isinstance(each.code, str)
                )
        return found


def install(file: Path) -> None:
    """Begin and end counts on the two signals."""
    calls = Calls()

    def begin(_signal: int, _frame: FrameType | None) -> None:
        calls.begin()

    def end(_signal: int, _frame: FrameType | None) -> None:
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(calls.end()))
        new.rename(file)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)


if __name__ == "__main__":
    from kvstore.cli.main import main

    install(Path(sys.argv.pop(1)))
    main()
