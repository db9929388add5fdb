"""The engine on disk under a real kill -9: position and data agree, and synced rows are present."""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.partition.effects import Writer, all_records, check_indexes, state_over
from tests.partition.killed import KEYS, open_engine
from tests.partition.state.engine_memory import MemoryEngine

ROOT = Path(__file__).parents[3]


def run_and_kill(path: Path, seed: int, lines: int) -> int:
    """Let the process make `lines` syncs, kill it a moment later, and return the last sequence that it reported as
    durable."""
    command = [sys.executable, "-m", "tests.partition.killed", str(path), str(seed)]
    durable = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for _ in range(lines):
                durable = int(process.stdout.readline())
        finally:
            process.kill()
        for line in process.stdout.read().split():
            durable = int(line)
    return durable


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_engine_holds_the_log_up_to_its_position_after_kill_9(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    for _ in range(3):
        durable = run_and_kill(tmp_path / "engine", seed, random.randint(1, 6))
        engine = open_engine(str(tmp_path / "engine"))
        state = state_over(engine)
        assert state.position is not None
        assert state.seq >= durable
        writer = Writer(seed, KEYS, remembers_models=False)
        reference = state_over(MemoryEngine())
        while len(writer.log) <= state.position.entry:
            reference.apply(writer.any())
        assert all_records(state) == writer.model
        assert (state.seq, state.crc, state.epoch) == (reference.seq, reference.crc, reference.epoch)
        assert state.fingerprint() == reference.fingerprint()
        assert state.retries.rows() == reference.retries.rows()
        check_indexes(state)
        engine.close()
