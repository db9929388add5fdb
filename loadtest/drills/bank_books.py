"""The books of a bank whose transfers are transactions over several partitions: the keys, the entries of the ledgers,
and whether the contents of all keys can be those of one moment. Decides only.

An account's key has its balance as a decimal number. Each transfer appends one and the same entry to a ledger of both
accounts. So the contents of one moment prove themselves: the sum of all balances is constant, each balance is the
opening balance and the amounts of the account's entries, and each entry is exactly once in both of its ledgers. A
transfer that is carried out twice, by half or not at all contradicts one of these.

An account has several ledgers, one for each period, so that no value grows without a limit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

ACCOUNTS, OPENING = 100, 1_000
"""Number of accounts, and the balance with which each begins."""
BRANCHES = 10
"""Number of branches. A transfer stays within a branch, so that the sum of each branch is constant, too. Readers of all
accounts meet a change almost always when the machine is busy; readers of a branch do not."""

WRONG_SUM = "wrong sum of accounts"
WRONG_BALANCE = "balance that contradicts its ledgers"
DOUBLED = "doubled"
HALF = "in one of two ledgers"
LOST = "lost"
UNDEAD = "refused and yet carried out"
INVENTED = "never sent and yet carried out"
CORRUPT = "not readable"
PROBLEMS = (WRONG_SUM, WRONG_BALANCE, DOUBLED, HALF, LOST, UNDEAD, INVENTED, CORRUPT)
"""Violations that a drill counts."""


class Entry(NamedTuple):
    """One transfer, as it is in the ledgers of both accounts."""

    id: str
    source: int
    target: int
    amount: int
    period: int
    """The period of both ledgers."""

    @property
    def value(self) -> bytes:
        return b"%s %d %d %d %d;" % (self.id.encode(), *self[1:])

    def of(self, account: int) -> int:
        """Return the amount by which the transfer changes the balance of an account."""
        return self.amount * ((account == self.target) - (account == self.source))


def entries_of(ledger: bytes) -> list[Entry]:
    """Return the entries of a ledger in their order. Raises ValueError if the value is not one of ledgers."""
    if not ledger:
        return []
    *texts, rest = ledger.decode().split(";")
    if rest:
        raise ValueError(f"expected a ledger that ends with ;, got {ledger[-80:]!r}")
    found = []
    for text in texts:
        name, *numbers = text.split(" ")
        source, target, amount, period = map(int, numbers)
        found.append(Entry(name, source, target, amount, period))
    return found


class BankKeys(NamedTuple):
    """The keys of a bank."""

    prefix: bytes

    def account(self, number: int) -> bytes:
        return b"%baccount-%03d" % (self.prefix, number)

    def ledger(self, number: int, period: int) -> bytes:
        return b"%bledger-%03d-%d" % (self.prefix, number, period)

    def accounts(self) -> list[bytes]:
        return [self.account(number) for number in range(ACCOUNTS)]

    def branch(self, branch: int) -> list[bytes]:
        """Return the accounts of a branch."""
        return [self.account(number) for number in range(branch, ACCOUNTS, BRANCHES)]

    def ledgers(self, periods: Iterable[int]) -> list[bytes]:
        """Return the ledgers of all accounts in these periods."""
        return [self.ledger(number, period) for period in periods for number in range(ACCOUNTS)]


class Findings:
    """Violations, counted by kind, with the first ones in words."""

    SHOWN = 20

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: list[str] = []

    def add(self, kind: str, what: str) -> None:
        """Add a violation."""
        self.counts[kind] += 1
        if len(self.first) < self.SHOWN:
            self.first.append(f"{kind}: {what}")

    def check_sum(self, values: Sequence[bytes | None], where: str) -> None:
        """Check the balances of all accounts, or of all accounts of a branch, read at one moment."""
        try:
            found = sum(int(each or b"") for each in values)
        except ValueError:
            self.add(CORRUPT, f"{where}: {values}")
            return
        if found != len(values) * OPENING:
            self.add(WRONG_SUM, f"{where}: {found} in {len(values)} accounts, expected {len(values) * OPENING}")

    def check_account(self, number: int, balance: bytes | None, ledgers: Iterable[bytes | None], where: str) -> None:
        """Check an account and all of its ledgers, read at one moment."""
        try:
            entries = [entry for ledger in ledgers for entry in entries_of(ledger or b"")]
            found = int(balance or b"")
        except ValueError as error:
            self.add(CORRUPT, f"{where}: account {number}: {error}")
            return
        expected = OPENING + sum(entry.of(number) for entry in entries)
        if found != expected:
            self.add(WRONG_BALANCE, f"{where}: account {number} has {found}, its ledgers say {expected}")
        for name, count in Counter(entry.id for entry in entries).items():
            if count > 1:
                self.add(DOUBLED, f"{where}: transfer {name} is {count} times in the ledgers of account {number}")

    def check_moment(self, keys: BankKeys, rows: Mapping[bytes, bytes], where: str) -> dict[str, Entry]:
        """Check the contents of all keys at one moment. Return the transfers that the ledgers have, by id."""
        for branch in range(BRANCHES):
            self.check_sum([rows.get(each) for each in keys.branch(branch)], f"{where}, branch {branch}")
        ledgers: defaultdict[int, list[bytes]] = defaultdict(list)
        prefix = keys.prefix + b"ledger-"
        for key, value in sorted(rows.items()):
            if key.startswith(prefix):
                ledgers[int(key.removeprefix(prefix).partition(b"-")[0])].append(value)
        places: defaultdict[str, list[int]] = defaultdict(list)
        found: dict[str, Entry] = {}
        for number in range(ACCOUNTS):
            self.check_account(number, rows.get(keys.account(number)), ledgers[number], where)
            try:
                entries = [entry for ledger in ledgers[number] for entry in entries_of(ledger)]
            except ValueError:  # which check_account has counted
                continue
            for entry in entries:
                places[entry.id].append(number)
                found[entry.id] = entry
        for name, numbers in places.items():
            if set(numbers) != {found[name].source, found[name].target}:
                self.add(HALF, f"{where}: {found[name]} is in the ledgers of {sorted(set(numbers))} only")
        return found

    def check_outcomes(
        self, found: Collection[str], *, acknowledged: Collection[str], refused: Collection[str], sent: Collection[str]
    ) -> None:
        """Check the ids in the ledgers after the last transfer against the answers that the clients received."""
        for name in acknowledged:
            if name not in found:
                self.add(LOST, f"transfer {name} was acknowledged and is in no ledger")
        for name in refused:
            if name in found:
                self.add(UNDEAD, f"transfer {name} was refused and is in the ledgers")
        for name in found:
            if name not in sent:
                self.add(INVENTED, f"transfer {name}")
