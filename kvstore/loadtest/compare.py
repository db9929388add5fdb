"""Compare a run with a stored baseline, or store a run as the baseline.

    python -m kvstore.loadtest.compare reports/loadtest.json loadtest/baseline.json [--save]

Exit codes: 0 no figure got worse; 1 a figure got worse, or the run itself failed; 2 the two cannot be compared, or the
run cannot be stored; 3 the load generator's machine spoiled the run, so its figures say nothing about the store.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.loadtest.generator.options import path_word, read_json
from kvstore.loadtest.report.baseline import Comparison, Tolerance, baseline_of, compare, differences
from kvstore.loadtest.report.spoiled import EXIT
from kvstore.tables import as_table


def main(words: Sequence[str] | None = None) -> None:
    default = Tolerance()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=path_word, help="the JSON file that a run wrote")
    parser.add_argument("baseline", type=path_word)
    parser.add_argument("--save", action="store_true", help="store this run as the baseline")
    parser.add_argument("--rate-tolerance", type=float, default=default.rate, help="allowed drop of rates, from 0 to 1")
    parser.add_argument(
        "--latency-tolerance",
        type=float,
        default=default.latency,
        help="allowed rise of latencies; 1 allows twice as long",
    )
    arguments = parser.parse_args(words)
    try:
        tolerance = Tolerance(rate=arguments.rate_tolerance, latency=arguments.latency_tolerance)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_compare(arguments.results, arguments.baseline, tolerance, save=arguments.save))


def run_compare(results: Path, baseline: Path, tolerance: Tolerance, *, save: bool = False) -> int:
    """Compare the two files, or store the baseline. Return the exit code."""
    try:
        document = read_json(results)
        if save:
            baseline.write_text(json.dumps(baseline_of(document), indent=2) + "\n", encoding="utf-8")
            print(f"baseline stored in {baseline}")
            return 0
        reasons = [] if document["verdict"]["is_met"] else document["verdict"]["reasons"]
        spoiled = document["verdict"].get("spoiled", [])
        if spoiled and not reasons:
            print(f"not compared with {baseline}: the run was spoiled: {'; '.join(spoiled)}", file=sys.stderr)
            return EXIT
        stored = read_json(baseline)
        unlike = differences(stored, document)
        comparison = Comparison([], []) if unlike else compare(stored, document, tolerance)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        what = f"cannot store {results} in" if save else f"cannot compare {results} with"
        print(f"{what} {baseline}: {reason}", file=sys.stderr)
        return 2
    if unlike:
        print(f"not compared with {baseline}: {'; '.join(unlike)}", file=sys.stderr)
    else:
        print(as_table([line.row() for line in comparison.lines]))
    for line in (*comparison.notes, *(f"the run failed: {reason}" for reason in reasons), *comparison.falls):
        print(line, file=sys.stderr)
    if reasons or comparison.falls:
        return 1
    return 2 if unlike else 0


if __name__ == "__main__":
    main()
