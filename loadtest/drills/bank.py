"""The clients of a bank: transfers by transactions over several partitions, readers that check the books meanwhile, and
transactions that append to lists, for a checker of cycles.

Clients judge at once what they read. The transfers are judged at the end, when none is in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from kvstore.client import AsyncClient
from kvstore.errors import ConditionFailed, Conflict, Refused, RequestExpired, StoreError
from loadtest.drills.bank_books import ACCOUNTS, BRANCHES, OPENING, BankKeys, Entry, Findings, entries_of
from loadtest.drills.bank_fronts import Front, Step, Values, Verb
from tests.sim.judges import cycles

CALLERS, AUDITORS, BRANCH_AUDITORS, ACCOUNT_AUDITORS, FOLLOWERS, APPENDERS = 20, 2, 2, 2, 2, 5
"""Numbers of clients: those that transfer; those that read all accounts at one moment, or those of a branch, or one
account and its ledgers; those that follow a transfer from one ledger to the other by single reads; and those that
append to lists."""
PAUSE_S = 0.15
"""Average pause of a client between two transactions, in seconds."""
PERIOD_S, PERIODS_MAX = 30.0, 40
"""Time in seconds after which transfers use new ledgers, and the maximum number of ledgers of an account. One read
transaction must be able to read all of them."""
LISTS, LISTS_S = 6, 20.0
"""Number of lists to which clients append at one time, and the seconds after which they use new ones."""
TIMEOUTS_S = (0.1, 1.0, 5.0, 10.0)
"""Timeouts of transfers. Clients that give up early leave transactions that nobody waits for."""
AMOUNT_MAX = 100
HALF_VISIBLE = "half visible"
STALE = "own commit not visible"
CYCLES = "cycles of dependencies"
READ_PROBLEMS = (HALF_VISIBLE, STALE, CYCLES)
"""Violations that readers find, in addition to those of the books."""


def is_refused(error: StoreError) -> bool:
    """Return True if a transaction that ended with this error was certainly not carried out."""
    return isinstance(error, Refused) and not isinstance(error, RequestExpired)


class Bank:
    """The accounts and their clients. `open` creates the accounts; the clients run from `start` to `stop`."""

    def __init__(
        self,
        client: AsyncClient,
        front: Callable[[Random], Front],
        *,
        seed: int,
        prefix: bytes,
        seconds: float,
        rests: float = 1.0,
    ) -> None:
        """`front` makes a client. `seconds` is the expected duration. `rests`: factor of the usual pauses."""
        self._client, self._front, self._pauses = client, front, rests
        self._random = Random(seed)
        self.keys = BankKeys(prefix)
        self.findings = Findings()
        self.acknowledged: set[str] = set()
        self.refused: set[str] = set()
        self.unknown: set[str] = set()
        self.commits: list[float] = []
        """The times of acknowledged transfers, in order."""
        self.errors: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        """Successful read transactions and comparisons, by kind."""
        self.in_flight: dict[str, tuple[str, frozenset[str]]] = {}
        """Home and participants of the transfers that are being carried out, by id."""
        self._period_s = max(PERIOD_S, seconds / PERIODS_MAX)
        self._began = time.monotonic()
        self._lists: dict[int, list[cycles.Transaction]] = {}
        """Transactions that append to lists, by the number of the lists' generation."""
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Create the accounts. Raises StoreError."""
        await self._client.put_many(dict.fromkeys(self.keys.accounts(), b"%d" % OPENING), timeout_s=60)
        self._began = time.monotonic()

    def start(self) -> None:
        kinds: tuple[tuple[int, Callable[[Front, Random, str], Awaitable[None]]], ...] = (
            (CALLERS, self._transfer),
            (AUDITORS, self._audit),
            (BRANCH_AUDITORS, self._audit_branch),
            (ACCOUNT_AUDITORS, self._audit_account),
            (FOLLOWERS, self._follow),
            (APPENDERS, self._append),
        )
        for count, kind in kinds:
            for number in range(count):
                self._tasks.append(asyncio.create_task(self._repeat(kind, f"{kind.__name__[1:]}{number}")))

    async def stop(self) -> None:
        """Stop the clients, and wait for the transactions in flight."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def check_running(self) -> None:
        """Raise the error of a client that has ended by itself."""
        for task in self._tasks:
            if task.done():
                task.result()

    @property
    def sent(self) -> set[str]:
        return self.acknowledged | self.refused | self.unknown

    @property
    def period(self) -> int:
        """The period of transfers that begin now."""
        return min(PERIODS_MAX - 1, int((time.monotonic() - self._began) / self._period_s))

    def home_of(self, entry: Entry) -> tuple[str, frozenset[str]]:
        """Return the partitions of a transfer: its home, and the others."""
        partition_of = self._client.cluster.partition_of
        home, *others = (partition_of(step.key) for step in self._steps(entry))
        return home, frozenset(others) - {home}

    async def verify(self) -> None:
        """Judge the contents of all keys after the last transfer, and the order of the appends. Raises StoreError."""
        keys = [*self.keys.accounts(), *self.keys.ledgers(range(self.period + 1))]
        found = await self._client.get_many(keys, timeout_s=60)
        rows = {key: item.value for key, item in found.items()}
        entries = self.findings.check_moment(self.keys, rows, "at the end")
        self.findings.check_outcomes(entries, acknowledged=self.acknowledged, refused=self.refused, sent=self.sent)
        for history in self._lists.values():
            try:
                await asyncio.to_thread(cycles.check_cycles, history)
            except cycles.Cycle as error:
                self.findings.add(CYCLES, str(error))

    @property
    def appends(self) -> int:
        """Number of recorded transactions on lists."""
        return sum(map(len, self._lists.values()))

    # ── clients ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _repeat(self, work: Callable[[Front, Random, str], Awaitable[None]], name: str) -> None:
        """Do the work again and again by its own client."""
        random = Random(self._random.getrandbits(64))
        front = self._front(random)
        for number in itertools.count(1):
            if self._stopping:
                break
            await work(front, random, f"{name}-{number}")
            await asyncio.sleep(PAUSE_S * self._pauses * 2 * random.random())
        await front.close()

    async def _transfer(self, front: Front, random: Random, name: str) -> None:
        source, target = random.sample(range(random.randrange(BRANCHES), ACCOUNTS, BRANCHES), 2)
        entry = Entry(name, source, target, random.randint(1, AMOUNT_MAX), self.period)
        timeout_s = random.choice(TIMEOUTS_S)
        self.in_flight[name] = self.home_of(entry)
        try:
            if random.random() < 0.5:
                await front.write(self._steps(entry), timeout_s)
            else:
                await self._transfer_if_unchanged(front, entry, timeout_s)
        except StoreError as error:
            self._failed("transfer", error)
            (self.refused if is_refused(error) else self.unknown).add(name)
        else:
            self.acknowledged.add(name)
            self.commits.append(time.perf_counter())
        finally:
            del self.in_flight[name]
        if name in self.acknowledged and random.random() < 0.2:
            await self._check_own(front, entry)

    def _steps(self, entry: Entry) -> list[Step]:
        return [
            Step(Verb.ADD, self.keys.account(entry.source), b"%d" % -entry.amount),
            Step(Verb.ADD, self.keys.account(entry.target), b"%d" % entry.amount),
            Step(Verb.APPEND, self.keys.ledger(entry.source, entry.period), entry.value),
            Step(Verb.APPEND, self.keys.ledger(entry.target, entry.period), entry.value),
        ]

    async def _transfer_if_unchanged(self, front: Front, entry: Entry, timeout_s: float) -> None:
        """Transfer by new values, which hold only if nobody has changed the old ones."""
        keys = [step.key for step in self._steps(entry)]

        def decide(found: Values) -> Sequence[Step]:
            source, target, *ledgers = (value or b"" for value in found)
            new = [b"%d" % (int(source) - entry.amount), b"%d" % (int(target) + entry.amount)]
            new += [ledger + entry.value for ledger in ledgers]
            return [Step(Verb.PUT, key, value) for key, value in zip(keys, new, strict=True)]

        await front.rewrite(keys, decide, timeout_s)

    async def _check_own(self, front: Front, entry: Entry) -> None:
        """Check that session reads of the client that made a transfer show it, in both ledgers."""
        for number in (entry.source, entry.target):
            try:
                found = await front.get(self.keys.ledger(number, entry.period), session=True)
            except StoreError as error:
                self._failed("session read", error)
                continue
            self.reads["session reads of own transfers"] += 1
            if entry.value not in (found or b""):
                self.findings.add(STALE, f"{entry} is not in the ledger of {number}, which its own session read")

    async def _audit(self, front: Front, random: Random, name: str) -> None:
        await self._check_sum(front, self.keys.accounts(), "reads of all accounts", name)

    async def _audit_branch(self, front: Front, random: Random, name: str) -> None:
        await self._check_sum(front, self.keys.branch(random.randrange(BRANCHES)), "reads of a branch", name)

    async def _check_sum(self, front: Front, keys: Sequence[bytes], what: str, name: str) -> None:
        try:
            found = await front.read(keys)
        except StoreError as error:
            self._failed(what, error)
            return
        self.reads[what] += 1
        self.findings.check_sum(found, f"read transaction {name}")

    async def _audit_account(self, front: Front, random: Random, name: str) -> None:
        number = random.randrange(ACCOUNTS)
        ledgers = [self.keys.ledger(number, period) for period in range(self.period + 1)]
        try:
            balance, *found = await front.read([self.keys.account(number), *ledgers])
        except StoreError as error:
            self._failed("reads of an account and its ledgers", error)
            return
        if len(ledgers) == self.period + 1:  # otherwise a transfer may have begun that uses the next ones
            self.reads["reads of an account and its ledgers"] += 1
            self.findings.check_account(number, balance, found, f"read transaction {name}")

    async def _follow(self, front: Front, random: Random, name: str) -> None:
        """Read a ledger and then, by a read that begins later, the other ledger of each of its last transfers."""
        number, period = random.randrange(ACCOUNTS), self.period
        try:
            entries = entries_of(await front.get(self.keys.ledger(number, period)) or b"")
            for entry in entries[-3:]:
                other = entry.target if entry.source == number else entry.source
                found = await front.get(self.keys.ledger(other, period))
                self.reads["transfers followed to the other ledger"] += 1
                if entry.value not in (found or b""):
                    self.findings.add(HALF_VISIBLE, f"{name}: {entry} was in the ledger of {number}, then not in both")
        except StoreError as error:
            self._failed("single read", error)

    async def _append(self, front: Front, random: Random, name: str) -> None:
        generation = int((time.monotonic() - self._began) / LISTS_S)
        history = self._lists.setdefault(generation, [])
        steps = []
        for place in range(random.randint(2, 4)):
            key = b"%blist-%d-%d" % (self.keys.prefix, generation, random.randrange(LISTS))
            item = b"%b.%d;" % (name.encode(), place)
            steps.append(Step(Verb.APPEND, key, item) if random.random() < 0.5 else Step(Verb.GET, key))
        is_read = all(step.verb is Verb.GET for step in steps)
        found: Values | None = None
        ended, is_aborted, began = float("inf"), False, time.perf_counter()
        try:
            if is_read:
                found = await front.read([step.key for step in steps])
            else:
                found = await front.write(steps, random.choice(TIMEOUTS_S))
            ended = time.perf_counter()
        except StoreError as error:
            self._failed("append", error)
            is_aborted = is_refused(error)
        history.append(
            cycles.Transaction(name=name, steps=_seen(steps, found), began=began, ended=ended, is_aborted=is_aborted)
        )

    def _failed(self, what: str, error: StoreError) -> None:
        kind = "conflict" if isinstance(error, Conflict | ConditionFailed) else type(error).__name__
        self.errors[f"{what}: {kind}"] += 1


def _seen(steps: Sequence[Step], found: Values | None) -> list[cycles.Step]:
    """Return the steps of a transaction on lists with what it read; `found` is None if its answer is unknown."""
    values = iter(found or ())
    seen: list[Any] = []
    for step in steps:
        if step.verb is Verb.APPEND:
            seen.append(cycles.Step(step.key, item=step.value))
        elif found is not None:
            items = tuple(each + b";" for each in (next(values) or b"").split(b";")[:-1])
            seen.append(cycles.Step(step.key, items=items))
    return seen
