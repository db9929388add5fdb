"""Measure the cost of access control and of TLS: SET and GET with both, with access control alone, and with neither.

    python -m loadtest.bench.guarded [--rounds 5] [--out FILE]

Two clusters of three nodes run side by side, one with TLS and access control, the other without TLS. The one without
TLS is loaded three times in each round: with access control off; with access control on, by a user who may read and
write everything (`asked`); and by a user who may do so below a prefix (`prefix`). Access control is switched while the
cluster runs. All four are measured in turn, on the same machine in the same state, and only their ratios are
meaningful. A line is the median of all rounds: operations a second by 50 connections to the leader, and processor time
of all three nodes per operation. Clients log in once per connection, with a password that the node has verified before.

`calls` counts the calls of Python and C of the leader's event loop per operation. They do not depend on how busy the
machine is. The difference between on and off is the cost of authorization, including the logins of the connections.
`check` is the time of one check of a prefix, as a share of the processor time of a GET. The exit code is 1 if `asked`
adds over 2 % to the calls of a single GET, or if the check takes over 2 % of the time of a GET. The calls of a pipeline
differ by more from run to run, because some operations take the slow path.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import trustme
import uvloop

from kvstore.access import AddRole, AddUser, FoundAdmin, GrantRight, GrantRole, Right, Switch, encoded
from kvstore.access.changes import Change
from kvstore.cli.output import as_table
from kvstore.client import AsyncClient, ClientConfig
from kvstore.devcluster.layout import ClusterFile, NodePlace
from kvstore.env.files.private import write_private
from kvstore.env.tls import Tls
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.resp import AsyncRespConnection, ReplyError, connect
from kvstore.meta.connect import connect as connect_to_metadata
from kvstore.meta.tables.access import AccessStore
from kvstore.server.access.guard import all_begin_with
from loadtest.bench import peers
from loadtest.budget import CONNECT_S, Counted, Load, run_load, scheduled
from loadtest.figures import keep

ALL, TENANT, PASSWORD = "everything", "tenant", b"of this benchmark"
TAG = "guarded"
LOADS = (
    Load("SET, 50 connections", "SET", 50, 1, 5_000),
    Load("GET, 50 connections", "GET", 50, 1, 20_000),
    Load("GET, 50 connections, pipeline 16", "GET", 50, 16, 64_000),
)
PATIENCE_S = 60.0
SHARE_MAX = 0.02
"""Maximum share of the time of a GET that authorization may take."""


@dataclass(frozen=True)
class Spent:
    """The figures of one run of one load."""

    per_s: float
    cpu_us: float


class Side:
    """One of the two clusters, and how its clients connect."""

    def __init__(self, cluster: Counted, file: ClusterFile, tls: Tls | None) -> None:
        self._cluster, self.file = cluster, file
        self._context = None if tls is None else tls.client_context()
        self._tls = tls
        self.user = ""
        """The user as which its clients log in; empty: they do not log in."""
        self.lead: NodePlace

    async def connect(self, address: str) -> AsyncRespConnection:
        """Connect a client. Raises RuntimeError if the login is refused."""
        made = await connect(address, timeout_s=CONNECT_S, tls=self._context)
        if self.user:
            try:
                await made.ask(b"AUTH", self.user.encode(), PASSWORD, timeout_s=CONNECT_S)
            except ReplyError as error:
                raise RuntimeError(f"the login at {address}: {error}") from None
        return made

    def run(self, load: Load) -> Spent:
        before, began = self._cpu_s(), time.monotonic()
        uvloop.run(run_load(load, self.lead.resp, TAG, self.connect))
        took_s = time.monotonic() - began
        return Spent(load.operations / took_s, (self._cpu_s() - before) / load.operations * 1e6)

    def calls(self, load: Load) -> float:
        """Return the calls of the leader's event loop per operation, without those that it makes in the same time
        without a load."""
        began = time.monotonic()
        asked = self._counted(lambda: self.run(load))
        took_s = time.monotonic() - began
        return (asked.total() - self._counted(lambda: time.sleep(took_s)).total()) / load.operations

    def _counted(self, work: Callable[[], object]) -> Counter[str]:
        self._cluster.begin()
        work()
        return {node.id: self._cluster.end(node) for node in self.file.nodes}[self.lead.id]

    def change(self, *changes: Change) -> None:
        async def work() -> None:
            store = await connect_to_metadata(self.file.zookeeper)
            try:
                for each in changes:
                    await AccessStore(store).change(each)
            finally:
                await store.close()

        asyncio.run(work())

    def found(self) -> None:
        """Create the two users, who may read and write, and switch access control on."""
        hashed = encoded(PASSWORD, bytes(16))
        self.change(FoundAdmin(ALL, hashed), AddUser(TENANT, hashed))
        for user, prefix in ((ALL, b""), (TENANT, b"{guarded}")):
            rights = (GrantRight(user, each, prefix) for each in (Right.READ, Right.WRITE))
            self.change(AddRole(user), *rights, GrantRole(user, user))
        for user in (TENANT, ALL):
            self.ask(user)

    def ask(self, user: str) -> None:
        """Let clients log in as this user, or not at all if it is empty, and wait until every node applies the
        change."""
        self.change(Switch(bool(user)))
        self.user = user
        for node in self.file.nodes:
            _wait(lambda node=node: self._first_words(node.resp) == bool(user), f"{node.id} goes by the table")
        if user:
            for node in self.file.nodes:
                _wait(lambda node=node: self._is_let_in(node.resp), f"{node.id} knows the user")

    def find_lead(self) -> None:
        key = b"{%b}" % TAG.encode()
        endpoints = tuple(node.grpc for node in self.file.nodes)

        async def leader() -> str:
            config = ClientConfig(endpoints=endpoints, tls=self._tls, timeout_s=PATIENCE_S)
            async with AsyncClient(config) as client:
                await client.put(key, b"1")
                return str(client.cluster.leader_of(client.cluster.partition_of(key)))

        where = asyncio.run(leader())
        self.lead = next(node for node in self.file.nodes if node.grpc == where)

    def _first_words(self, address: str) -> bool:
        """Return True if a client without a login is refused."""

        async def ask() -> str:
            made = await connect(address, timeout_s=CONNECT_S, tls=self._context)
            try:
                await made.ask(b"GET", b"{guarded}", timeout_s=CONNECT_S)
            except ReplyError as error:
                return str(error)
            finally:
                made.close()
            return ""

        return asyncio.run(ask()).startswith("NOAUTH")

    def _is_let_in(self, address: str) -> bool:
        async def ask() -> bool:
            made = await self.connect(address)
            try:
                return bool(await made.ask(b"SET", b"{guarded}", b"1", timeout_s=CONNECT_S) == b"OK")
            finally:
                made.close()

        try:
            return asyncio.run(ask())
        except (OSError, RuntimeError, ReplyError):
            return False

    def _cpu_s(self) -> float:
        return sum(scheduled(node)[0] for node in self.file.nodes)


def _wait(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.05)


def issue(folder: Path) -> Tls:
    """Issue a CA, and a certificate for this machine."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    found = Tls(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    authority.cert_pem.write_to_path(str(found.ca))
    issued.cert_chain_pems[0].write_to_path(str(found.cert))
    write_private(found.key, issued.private_key_pem.bytes())
    return found


def secure(cluster: Counted, file: ClusterFile, tls: Tls) -> ClusterFile:
    """Restart the nodes with TLS. The caller waits until they serve."""
    for node in file.nodes:
        process = psutil.Process(node.pid)
        process.terminate()
        process.wait(PATIENCE_S)
    for node in file.nodes:
        with Path(node.config).open("a") as config:
            config.write(f'\n[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n')
        cluster.start_node(node.id)
    return cluster.load()


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    with ExitStack() as stack:
        sides = []
        for _ in range(2):
            cluster, file = stack.enter_context(peers.kvstore(Counted))
            tls = issue(cluster.data_dir.parent) if sides else None
            sides.append(Side(cluster, file if tls is None else secure(cluster, file, tls), tls))
        plain, secured = sides
        for side in sides:
            side.find_lead()
            side.found()
        return [_row(load, plain, secured, rounds) for load in LOADS]


def _row(load: Load, plain: Side, secured: Side, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Spent]] = {"neither": [], "asked": [], "prefix": [], "TLS, asked": []}
    calls: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, side, user in (
            ("neither", plain, ""),
            ("asked", plain, ALL),
            ("prefix", plain, TENANT),
            ("TLS, asked", secured, ALL),
        ):
            if side is plain:
                side.ask(user)
            if number:
                found[name].append(side.run(load))
            else:  # which also warms it up
                side.run(load)
                calls[name] = side.calls(load)
    rates = {name: median(each.per_s for each in spent) for name, spent in found.items()}
    cpu = {name: median(each.cpu_us for each in spent) for name, spent in found.items()}
    row: dict[str, Any] = {"load": load.name}
    for name in found:
        row |= {f"{name}: ops/s": round(rates[name]), f"{name}: CPU us/op": round(cpu[name], 1)}
        row |= {f"{name}: calls/op": round(calls[name], 2)}
    row |= {"asked: calls more": round(calls["asked"] / calls["neither"] - 1, 4)}
    row |= {"prefix: calls more": round(calls["prefix"] - calls["neither"], 2)}
    if load.command == "GET":
        row |= {"prefix: check": round(check_us(load.pipeline) / cpu["neither"], 4)}
    row |= {"TLS, asked: rate": round(rates["TLS, asked"] / rates["neither"], 2)}
    return row | {"TLS, asked: CPU": round(cpu["TLS, asked"] / cpu["neither"], 2)}


def check_us(together: int) -> float:
    """Return the processor time of checking a key in a batch of this size, for a user with two prefixes, as the Redis
    listener does. It is the minimum of several attempts, because other processes use the processor too."""
    keys, readable, count = [b"{guarded}1234567"] * together, (b"other/", b"{guarded}"), 20_000 // together
    attempts = []
    for _ in range(20):
        began = time.process_time_ns()
        for _ in range(count):
            if together == 1:
                may_read = readable is None or keys[0].startswith(readable)
            else:
                may_read = readable is None or all_begin_with(readable, keys)
            if not may_read:
                raise AssertionError("they have the prefix")
        attempts.append(time.process_time_ns() - began)
    return min(attempts) / (count * together) / 1e3


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=path_word, default=Path("reports/guarded.json"))
    options = parser.parse_args(words)
    rows = measure(options.rounds)
    for row in rows:
        print(as_table([{"of": name, "is": value} for name, value in row.items()]), end="\n\n")
    keep(options.out, rows)
    gets = [row for row in rows if "prefix: check" in row]
    too_much = [
        row["load"]
        for row in gets
        if row["prefix: check"] > SHARE_MAX or ("pipeline" not in row["load"] and row["asked: calls more"] > SHARE_MAX)
    ]
    if too_much:
        sys.exit(f"authorization takes more than {SHARE_MAX:.0%} of {' and of '.join(too_much)}")


if __name__ == "__main__":
    main()
