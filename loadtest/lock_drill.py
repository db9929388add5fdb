"""Locks under stops and kills of clients and leaders, on its own cluster: none is ever held twice.

    python -m loadtest.lock_drill [--acquisitions 10000] [--seed 1]

Processes record when they believed to hold a lock, and the drill compares the records. The exit code is 1 if two
processes held a lock at one moment, or in another order than that of their fencing tokens.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from loadtest.bench import peers
from loadtest.drills.contest import Contest
from tests.cluster.harness import running_cluster

LOCKS, HOLDERS = 3, 3
STRIKE_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acquisitions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="of the strikes")
    arguments = parser.parse_args()
    if arguments.acquisitions < 1:
        parser.error(f"--acquisitions: expected 1 or more, got {arguments.acquisitions}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes would stay
    began = time.monotonic()
    with peers.scratch() as folder, running_cluster(folder) as cluster:
        with Contest(cluster, folder, locks=LOCKS, holders=HOLDERS, seed=arguments.seed) as contest:
            contest.run(arguments.acquisitions, strikes_every_s=STRIKE_S)
        acquired, wrong = len(contest.acquired()), contest.held_twice()
    print(f"{acquired} acquisitions of {LOCKS} locks in {time.monotonic() - began:.0f} s, {dict(contest.struck)}")
    print(*wrong[:20], sep="\n", end="\n" if wrong else "")
    print(f"held twice: {len(wrong)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
