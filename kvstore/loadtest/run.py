"""`kvstore-loadtest`: load tests of a running cluster with Locust.

    kvstore-loadtest [--data-dir DIR | --store kv://host:port --resp host:port] [any option below] [GrpcUser|RespUser]
    kvstore-loadtest -f shop.py --data-dir data Shop        # a custom workload: docs/how-to/run-load-tests.md
    kvstore-loadtest --web --data-dir data                  # start any number of runs from Locust's web pages

The report is reports/loadtest.html. Exit codes: 0 the run met all its goals; 1 it did not, and the last lines say why;
2 wrong usage, or no cluster; 3 the run was spoiled: the load generator itself was late or starved of processor time, so
the figures say nothing about the store.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.loadtest.generator.options import Options, add_options, options_of, path_word
from kvstore.loadtest.generator.workloads import Draws
from kvstore.standard_streams import prepare_standard_streams

LOCUSTFILE = Path(__file__).parent / "locustfile.py"


def main() -> None:
    prepare_standard_streams()
    parser = argparse.ArgumentParser(
        prog="kvstore-loadtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = parser.add_argument_group("how to run")
    own.add_argument(
        "-f", "--locustfile", type=path_word, default=LOCUSTFILE, help="Use a Locust file with custom users."
    )
    own.add_argument(
        "--web",
        action="store_true",
        help="Serve Locust's web pages on port 8089, on loopback unless --web-host is given.",
    )
    add_options(parser)
    options = checked(parser, sys.argv[1:])
    mine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    mine.add_argument("-f", "--locustfile", type=Path, default=LOCUSTFILE)
    mine.add_argument("--web", action="store_true")
    asked, words = mine.parse_known_args(sys.argv[1:])
    try:
        if not asked.locustfile.is_file():
            raise ValueError(f"--locustfile: file {asked.locustfile} does not exist")
        if not options.store and not options.resp and "--worker" not in words:
            options.node_ids()  # fails if there is no such cluster
    except (ValueError, OSError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_locust(words, file=asked.locustfile, has_pages=asked.web))


def checked(parser: argparse.ArgumentParser, words: Sequence[str]) -> Options:
    """Return the options, or exit with code 2 before anything is started. Locust checks its own options."""
    try:
        options = options_of(parser.parse_known_args(words)[0])
        for workload in options.workloads:
            Draws(workload, 1)
        options.check_paths()
    except ValueError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        sys.exit(2)
    return options


def run_locust(
    words: Sequence[str], *, file: Path = LOCUSTFILE, has_pages: bool = False, is_quiet: bool = False
) -> int:
    """Run Locust and return its exit code. Locust also writes its report after SIGINT or SIGTERM."""
    output = subprocess.DEVNULL if is_quiet else None
    frame = () if has_pages else ("--headless", "--only-summary")
    command = [sys.executable, "-Pm", "locust", "-f", str(file), *frame, *words]
    # A shell starts background jobs with SIGINT ignored, and Locust would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A separate session: a terminal's Ctrl-C reaches Locust only through us, and only once.
    process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
    try:
        return process.wait()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        return process.wait()
    finally:  # on a second interrupt: end Locust before the cluster may be stopped
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
