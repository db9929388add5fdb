"""A process with a death watch, for tests: `python -m tests.env.death.watched ADDRESS MESSAGE`. Prints the process id
of its watcher, then waits forever."""

from __future__ import annotations

import asyncio
import sys

from kvstore.env.death.watch import WatchedProcess


async def main() -> None:
    death = WatchedProcess()
    death.leave(b"former words", ["127.0.0.1:1"])
    death.leave(sys.argv[2].encode(), [sys.argv[1]])
    watching = asyncio.create_task(death.run())
    await death.started.wait()
    print(death.watcher_pid, flush=True)  # noqa: T201 - the test reads it
    await watching


if __name__ == "__main__":
    asyncio.run(main())
