"""Runs the `kvstore` command and counts the calls of its event loop:
`python -m loadtest.bench.counted_node FILE node run --config …`.

SIGUSR1 begins a count, SIGUSR2 ends it and writes it to FILE as JSON: for each Python file and function how often
it was called, and how often it called something written in C, together.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType


def counts(profile: cProfile.Profile) -> Counter[str]:
    """Calls by Python file and function, those that it made of C among them."""
    calls: Counter[str] = Counter()
    for entry in profile.getstats():
        if isinstance(entry.code, str):
            continue
        name = f"{entry.code.co_filename}:{entry.code.co_qualname}"
        native = sum(each.callcount for each in entry.calls or () if isinstance(each.code, str))
        calls[name] += entry.callcount + native
    return calls


def install(file: Path) -> None:
    """Count between the two signals."""
    profile = cProfile.Profile()

    def begin(_signal: int, _frame: FrameType | None) -> None:
        profile.clear()
        profile.enable()

    def end(_signal: int, _frame: FrameType | None) -> None:
        profile.disable()
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(counts(profile)))
        new.rename(file)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)


if __name__ == "__main__":
    from kvstore.cli.main import main

    install(Path(sys.argv.pop(1)))
    main()
