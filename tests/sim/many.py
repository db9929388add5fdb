"""Play many seeds of the whole cluster and count the faults that struck: `python -m tests.sim.many [SEEDS] [FIRST]`, or
`make sims`. `python -m tests.sim.many relist` rewrites the list of branches that are not taken. With `--transactions`,
play runs of transactions instead (tests/sim/transacting/swarm.py).

Exits with 1 if a promise was broken. Each line of a failure has the command that replays it. Also exits with 1 if
enough seeds never reached an operation, a path or a fault that they should (tests/sim/judges/reach.py), or if the
branches that BRANCH_SEEDS do not take differ from the list.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import get_context

from kvstore.env.parent import be_killed_with_parent
from tests.sim.judges import branches, reach
from tests.sim.judges.operations import Status
from tests.sim.run import Outcome, run
from tests.sim.strikes.faults import FAULTS
from tests.sim.transacting import swarm

SEEDS_PER_TASK = 5
TASKS_AHEAD = 4
"""Tasks queued per process, so that an interrupted run has not queued all tasks."""
REPORT_EVERY_S = 60.0
BRANCH_SEEDS = range(60)
"""The seeds that judge the branches of the machines. They are fixed, so that the list of branches that are not taken
(tests/sim/judges/unreached.toml) is either right or wrong."""


@dataclass(slots=True)
class Tally:
    """The results of many runs."""

    seeds: int = 0
    virtual_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    """Number of seeds in which a fault struck at least once."""
    strikes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[Status] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    """Answered operations and taken paths (tests/sim/judges/reach.py)."""
    arcs: branches.Arcs = field(default_factory=dict)
    """The arcs of the machines, if branches are measured."""
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.virtual_s += other.virtual_s
        self.struck += other.struck
        self.strikes += other.strikes
        self.statuses += other.statuses
        self.asked += other.asked
        self.paths += other.paths
        self.failures += other.failures
        branches.merge(self.arcs, other.arcs)


def play(seeds: range, run: Callable[[int], Outcome] = run, replay: str = "make sim SEED=") -> Tally:
    """Play each seed. A failure becomes a line of the tally, which begins with `replay` and the seed."""
    logging.getLogger("kvstore").setLevel(logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()  # the collections after each run need not traverse the loaded code
    tally, before = Tally(), reach.taken()
    for seed in seeds:
        tally.seeds += 1
        try:
            outcome = run(seed)
        except Exception as error:  # noqa: BLE001 - whatever is wrong is counted
            first = f"{type(error).__name__}: {error}".partition("\n")[0]
            tally.failures.append(f"{replay}{seed}  {first[:300]}")
            continue
        tally.virtual_s += outcome.virtual_s
        tally.struck.update(outcome.struck.keys())
        tally.strikes += outcome.struck
        tally.statuses += outcome.statuses
        tally.asked += outcome.asked
    tally.paths = reach.taken() - before
    return tally


def play_transactions(seeds: range) -> Tally:
    """Play each seed as a run of transactions."""
    return play(seeds, swarm.run, "python -m tests.sim.transacting.swarm ")


def play_measured(seeds: range) -> Tally:
    """Play each seed and measure the branches of the machines. Costs about three times as much as `play`."""
    with branches.measuring() as measured:
        tally = play(seeds)
    tally.arcs = measured.arcs
    return tally


def tallies(seeds: range, play: Callable[[range], Tally] = play) -> Iterator[Tally]:
    """Yield the tallies of groups of seeds, in order, played on all processors."""
    chunks = iter(seeds[at : at + SEEDS_PER_TASK] for at in range(0, len(seeds), SEEDS_PER_TASK))
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=be_killed_with_parent) as pool:
        waiting = [pool.submit(play, chunk) for chunk in islice(chunks, processes * TASKS_AHEAD)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(play, chunk) for chunk in [next(chunks, None)] if chunk is not None]


def split(seeds: range) -> tuple[range, range]:
    """Return the seeds that judge branches, if `seeds` contains all of them, and the remaining seeds."""
    if seeds.start > BRANCH_SEEDS.start or seeds.stop < BRANCH_SEEDS.stop:
        return range(0), seeds
    return BRANCH_SEEDS, range(BRANCH_SEEDS.stop, seeds.stop)


def table(tally: Tally, expected: reach.Expected) -> str:
    """Return a table of the faults with the number of seeds and strikes, and of the expected operations and paths,
    rarest first."""
    width = max(map(len, FAULTS))
    lines = [f"{name:{width}}  {tally.struck[name]:6} seeds  {tally.strikes[name]:7} times" for name in sorted(FAULTS)]
    for names, taken in ((expected.operations, tally.asked), (expected.paths, tally.paths)):
        lines += ["", *(f"{taken[name]:9} times  {name}" for name in sorted(names, key=lambda name: taken[name]))]
    counts = ", ".join(f"{status.value} {count}" for status, count in sorted(tally.statuses.items()))
    return "\n".join([*lines, f"operations: {counts}; {tally.virtual_s / 3600:.1f} simulated hours"])


def main(count: int, first: int, *, transactions: bool = False) -> int:
    """Play `count` seeds from `first` on and print the results. With `transactions`, play runs of transactions."""
    total, began = Tally(), time.monotonic()
    reported = began
    measured, others = split(range(first, first + count))
    if transactions:
        measured, others = range(0), range(first, first + count)
    work, expected = (play_transactions, reach.TRANSACTING) if transactions else (play, reach.PLAIN)
    for tally in chain(tallies(measured, play_measured), tallies(others, work)):
        total.add(tally)
        for failure in tally.failures:
            print(failure, flush=True)
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"{total.seeds} seeds in {reported - began:.0f} s, {len(total.failures)} violations", flush=True)
    print(table(total, expected))
    is_enough = total.seeds >= expected.seeds
    missed = expected.missed(total.asked, total.paths, total.struck) if is_enough else []
    if measured:
        new, gone, taken = branches.judged(total.arcs)
        machines = len(branches.machines())
        print(f"{taken} branches of {machines} machines were taken by seeds 0 to {measured.stop - 1}")
        missed += [f"branch: {name}" for name in new]
        missed += [
            f"branch that is listed in {branches.LISTED.name} and was taken, or is gone: {name}" for name in gone
        ]
    for name in missed:
        print(f"never reached: {name}")
    print(f"{total.seeds} seeds from {first} on: {len(total.failures)} violations in {time.monotonic() - began:.0f} s")
    return 1 if total.failures or missed else 0


def relist() -> int:
    """Rewrite the list of branches after a change of the code. Reasons are kept."""
    total = Tally()
    for tally in tallies(BRANCH_SEEDS, play_measured):
        total.add(tally)
    branches.LISTED.write_text(branches.relisted(total.arcs))
    return 1 if total.failures else 0


def seeds_or_relist(text: str) -> int | None:
    """Return the number of seeds, or None for the word relist. Raises ValueError."""
    return None if text == "relist" else int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.sim.many", description="Play many simulated runs.")
    parser.add_argument(
        "seeds", nargs="?", default=5000, type=seeds_or_relist, help="how many (default: 5000); or relist"
    )
    parser.add_argument("first", nargs="?", default=0, type=int, help="the first seed (default: 0)")
    parser.add_argument("--transactions", action="store_true", help="play runs of transactions over partitions")
    words = parser.parse_args()
    sys.exit(relist() if words.seeds is None else main(words.seeds, words.first, transactions=words.transactions))
