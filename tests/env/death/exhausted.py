"""A process that has too few free file descriptors for a death watch, for tests: `python -m tests.env.death.exhausted
FREE`. Prints how many descriptors are open before and after some attempts, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Iterator

import uvloop

from kvstore.env.death.watch import WatchedProcess

LIMIT = 100
ATTEMPTS = 3


async def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = list(_all_free())
    for _ in range(int(sys.argv[1])):
        os.close(held.pop())
    before, failures = _opened(), 0
    for _ in range(ATTEMPTS):
        try:
            await WatchedProcess()._watch()
        except OSError:
            failures += 1
    print(json.dumps({"before": before, "after": _opened(), "failures": failures}))  # noqa: T201 - the test reads it


def _all_free() -> Iterator[int]:
    try:
        while True:
            yield os.dup(0)
    except OSError:
        return


def _opened() -> int:
    return sum(_is_open(file) for file in range(LIMIT))


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
