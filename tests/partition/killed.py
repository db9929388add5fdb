"""A process that applies a log to RocksDB until it is killed: python -m tests.partition.killed DIRECTORY SEED.

It writes a line for each sequence that it has made durable.
"""

import asyncio
import sys

from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.state import ReplicaState
from tests.partition.effects import Writer, state_over

KEYS = 300
ENTRIES_PER_FLUSH = 400


def open_engine(path: str) -> RocksEngine:
    """With a buffer so small that the engine makes files by itself all the time."""
    return RocksEngine(path, write_buffer_bytes=64 << 10)


async def flush(state: ReplicaState) -> None:
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    state.submit_flush(done.set_result)
    assert await done is None
    sys.stdout.write(f"{state.durable_seq}\n")
    sys.stdout.flush()


async def apply_for_ever(path: str, seed: int) -> None:
    state = state_over(open_engine(path))
    writer = Writer(seed, KEYS, remembers_models=False)
    flushing: asyncio.Task[None] | None = None
    while True:
        entry = writer.any()
        state.apply(entry)
        if entry.position.entry % ENTRIES_PER_FLUSH == 0 and (flushing is None or flushing.done()):
            flushing = asyncio.create_task(flush(state))
        if entry.position.entry % 20 == 0:
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(apply_for_ever(sys.argv[1], int(sys.argv[2])))
