"""Runs the `kvstore` command and counts the calls of its event loop:
`python -m loadtest.bench.counted_node FILE node run --config …`.

SIGUSR1 begins a count. SIGUSR2 ends it and writes it to FILE as JSON: for each Python file and function, the number
of calls of the function plus the number of C functions that it called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FrameType

COUNTED = frozenset({"call", "c_call"})


class Calls:
    """Counts the calls of the thread that begins the count. cProfile counts the calls of all threads from Python
    3.12 on."""

    def __init__(self) -> None:
        self._counts: defaultdict[CodeType, int] = defaultdict(int)

    def begin(self) -> None:
        self._counts.clear()
        counts = self._counts

        def count(frame: FrameType, event: str, _: object) -> None:
            if event in COUNTED:  # of what is written in C the frame is its caller's
                counts[frame.f_code] += 1

        sys.setprofile(count)

    def end(self) -> Counter[str]:
        """End the count. Return the number of calls by Python file and function, including the C functions that each
        called."""
        sys.setprofile(None)
        found: Counter[str] = Counter()
        for code, calls in self._counts.items():
            found[f"{code.co_filename}:{code.co_qualname}"] += calls
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
