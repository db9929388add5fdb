"""Runs Apache BookKeeper's shell on our bookies, and records the frames on the wire.

    python -m tests.interop.apache [--install] [--record]

`--install` fetches the jars by Maven into .interop/ first; `--record` writes the frames that Java sent to
tests/proto/golden/, where plain unit tests read them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kvstore.types import LedgerId, LedgerState
from tests.interop import java
from tests.interop.cluster import Cluster
from tests.interop.java import Output, Programs
from tests.interop.processes import Processes
from tests.waiting import wait_until

T = TypeVar("T")
GOLDEN = Path(__file__).parent.parent / "proto" / "golden"


COUNTED = ("adds", "reads", "fences", "bad_requests", "refused_unknown", "syncs")


class Failed(Exception):
    """Apache's program behaved differently from its behaviour on Apache's bookies."""


def expect(output: Output, *texts: str) -> None:
    """Raise Failed unless the program succeeded and printed all of `texts`."""
    missing = [text for text in texts if text not in output.text]
    if output.code != 0 or missing:
        raise Failed(f"exit code {output.code}, missing {missing}:\n{output.text[-4000:]}")


async def simpletest(programs: Programs, ensemble: int, write: int, ack: int) -> None:
    """Create, write, read unconfirmed, close, open, read, delete."""
    quorum = ("-e", str(ensemble), "-w", str(write), "-a", str(ack))
    expect(await programs.shell("simpletest", *quorum, "-n", "200"), "200 entries written to ledger")


async def keep_a_ledger(cluster: Cluster, programs: Programs) -> LedgerId:
    """Return a ledger that Java has written and left open: simpletest's client is killed before it can close it."""
    before = set(await cluster.ledgers.list_ids())
    process = await asyncio.create_subprocess_exec(
        *programs.command(java.SHELL, "-conf", str(programs.conf), "simpletest", "-w", "3", "-n", "1000000"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        made: list[LedgerId] = []

        async def has_written() -> bool:
            made[:] = [each for each in await cluster.ledgers.list_ids() if each not in before]
            held = [b.storage.inventory.ledgers.get(each) for b in cluster.bookies for each in made]
            return bool(held) and all(ledger is not None and ledger.lac > 100 for ledger in held)

        await wait_until(has_written, timeout_s=java.TIMEOUT_S, what="Java writes a ledger")
        return made[0]
    finally:
        process.kill()
        await process.wait()


async def killed_writer(cluster: Cluster | Processes) -> tuple[LedgerId, int]:
    """Return a ledger whose writer, our client, was killed, and the last entry that was confirmed to the writer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.interop.python_client",
        "write",
        cluster.zookeeper.address,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    confirmed, ledger = -1, LedgerId(-1)
    async with asyncio.timeout(java.TIMEOUT_S):
        while confirmed < 300:
            word, number = (await process.stdout.readline()).decode().split()[:2]
            if word == "ledger":
                ledger = LedgerId(int(number))
            elif word == "confirmed":
                confirmed = int(number)
            else:
                raise Failed(f"our writer says {word} {number}")
        process.kill()
        while line := (await process.stdout.readline()).decode().split():
            confirmed = max(confirmed, int(line[1]))  # what it had said before it died
        await process.wait()
    return ledger, confirmed


async def java_recovers(cluster: Cluster | Processes, programs: Programs) -> None:
    """Let Java fence, recover and close a ledger of ours. The length that it writes includes entries of a bookie beyond
    the end, if it takes these for the end of the ledger."""
    ledger, confirmed = await killed_writer(cluster)
    reading = ["readledger", "-l", str(ledger), "-fe", "0", "-le", str(confirmed), "-r"]
    expect(await programs.shell(*reading), java.entry(confirmed))
    metadata, _ = await cluster.ledgers.read(ledger)
    if metadata.state is not LedgerState.CLOSED or metadata.last_entry < confirmed:
        raise Failed(f"entry {confirmed} was confirmed; Java's recovery left {metadata}")
    if metadata.length < sum(20 * len(f"entry {entry} ") for entry in range(metadata.last_entry + 1)):
        raise Failed(f"the length is less than that of the entries: {metadata}")


async def python_recovers(cluster: Cluster | Processes, ledger: LedgerId) -> None:
    """Recover a ledger of Java's with our client."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.interop.python_client",
        "recover",
        cluster.zookeeper.address,
        str(ledger),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    metadata, _ = await cluster.ledgers.read(ledger)
    if metadata.state is not LedgerState.CLOSED or metadata.last_entry < 100:
        raise Failed(f"our recovery said {out!r} and left {metadata}")


async def run_shell(cluster: Cluster, programs: Programs) -> None:
    """Run every command that this project promises to support."""
    ids = sorted(bookie.id for bookie in cluster.bookies)
    shown = [f"BookieID:{each}," for each in ids]
    for quorum in ((3, 3, 2), (3, 2, 2)):
        await step(f"simpletest {quorum}", simpletest(programs, *quorum))
    await step("listbookies", says(programs, ["listbookies", "-rw"], *shown))
    await step("listbookies -a", says(programs, ["listbookies", "-a"], *shown))
    await step("bookieinfo", says(programs, ["bookieinfo"], *shown))
    ledger = await step("a writer is killed", keep_a_ledger(cluster, programs))
    await step("ledgermetadata", says(programs, ["ledgermetadata", "-l", str(ledger)], "state=OPEN", *ids))
    reading = ["readledger", "-l", str(ledger), "-fe", "0", "-le", "20", "-r"]
    await step("readledger with recovery", says(programs, reading, java.entry(20)))
    metadata, _ = await cluster.ledgers.read(ledger)
    if metadata.state is not LedgerState.CLOSED or metadata.last_entry < 100:
        raise Failed(f"Java's recovery left {metadata}")
    await step(
        "readledger", says(programs, ["readledger", "-l", str(ledger), "-fe", "90", "-le", "95"], java.entry(95))
    )
    for bookie in ids:
        raw = ["readledger", "-l", str(ledger), "-fe", "1", "-le", "5", "-b", bookie]
        await step(f"readledger -b {bookie}", says(programs, raw, java.entry(4, by_bookie=True)))
    await step("Java recovers a ledger whose Python writer was killed", java_recovers(cluster, programs))
    theirs = await keep_a_ledger(cluster, programs)
    await step("Python recovers a ledger whose Java writer was killed", python_recovers(cluster, theirs))
    await step(
        "Java reads it", says(programs, ["readledger", "-l", str(theirs), "-fe", "0", "-le", "100"], java.entry(100))
    )
    await step("listledgers", says(programs, ["listledgers", "-m"], java.listed(ledger)))
    await step("deleteledger", says(programs, ["deleteledger", "-l", str(ledger), "-f"]))
    if ledger in await cluster.ledgers.list_ids():
        raise Failed(f"ledger {ledger} is still there")


async def says(programs: Programs, arguments: list[str], *texts: str) -> None:
    expect(await programs.shell(*arguments), *texts)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def step(name: str, work: Awaitable[T]) -> T:
    """Do one step and print its name."""
    result = await work
    say(f"ok  {name}")
    return result


async def on_our_bookies(directory: Path, then: Callable[[Cluster], None]) -> None:
    """Start ZooKeeper and three bookies, and run the shell on them."""
    async with Cluster(directory) as cluster:
        programs = Programs(directory / "java", cluster.zookeeper.address)
        await run_shell(cluster, programs)
        for bookie in cluster.bookies:
            figures = bookie.statistics()
            say(bookie.id + "".join(f" {name}={figures[name]}" for name in COUNTED))
        then(cluster)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if arguments.install or not java.is_installed():
        java.install()

    def record(cluster: Cluster) -> None:
        source = f"Apache BookKeeper {java.VERSION}'s shell (requests) and our bookies (responses)"
        if arguments.record:
            cluster.recording.write(GOLDEN / "shell.hex", source)

    with tempfile.TemporaryDirectory(prefix="interop-") as directory:
        try:
            asyncio.run(on_our_bookies(Path(directory), record))
        except Failed as error:
            sys.exit(f"failed: {error}")


if __name__ == "__main__":
    main()
