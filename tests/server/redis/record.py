"""Writes the replies of a redis-server into the scripts in golden/: `python -m tests.server.redis.record [FILE ...]`.

Commands, comments and declared differences stay as they are. So does an earlier reply that differs only in what the
comparison ignores, such as the remaining time of a key. Needs a redis-server on the PATH.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.server.redis.compare import redis_server, same
from tests.server.redis.script import END, GOLDEN, Script, gist, read, reply, written

QUIET_S = 0.1
"""Seconds after which no further reply is expected to bytes that may not be a complete command."""


async def record(script: Script, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"*1\r\n$8\r\nFLUSHALL\r\n")
    await reply(reader)
    for step in script.steps:
        writer.write(step.data)
        found = [await reply(reader)] if step.words else await replies(reader)
        if step.is_loose:
            found = [gist(each) for each in found]
        if not (step.theirs and await same(step, found, step.theirs)):
            step.theirs = found
    writer.close()


async def replies(reader: asyncio.StreamReader) -> list[bytes]:
    found: list[bytes] = []
    while not found or found[-1] != END:
        try:
            async with asyncio.timeout(QUIET_S):
                found.append(await reply(reader))
        except TimeoutError:
            break
    return found


async def main(paths: list[Path]) -> None:
    async with redis_server() as port:
        for path in paths:
            scripts = read(path)
            for script in scripts:
                await record(script, port)
            path.write_text(written(scripts))


if __name__ == "__main__":
    asyncio.run(main([Path(each) for each in sys.argv[1:]] or sorted(GOLDEN.glob("redis_*.txt"))))
