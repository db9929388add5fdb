"""Is a history of transactions strictly serializable? The evidence is lists to which transactions append, as in Elle
(Kingsbury and Alvaro, 2020). This checker knows nothing of versions, logs or partitions.

Each item is appended once. So the longest answer of a key gives the order of its appends, and each answer is a prefix
of it. Transactions depend on each other in four ways:

- `ww`: from the append of an item to the append of the next item;
- `wr`: from an append to a transaction that saw the item;
- `rw`: from a transaction to the first append that it did not see;
- `rt`: from a transaction to another one that began after it had ended.

A history is strictly serializable if and only if the dependencies have no cycle. Cycles have names (Adya, 1999):

- G0: only `ww`. G1c: `ww` and `wr`. G-single: exactly one `rw`. G2: several `rw`.
- with `-realtime`: the cycle needs `rt`, so that the history is serializable, but not strictly.

Some anomalies need no cycle, and are reported first:

- an item that nobody appended, or that an aborted transaction appended (G1a);
- the state in the middle of a transaction (G1b);
- an item that is twice in a list;
- two answers of which neither is a prefix of the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import NamedTuple

Items = tuple[bytes, ...]


class Cycle(AssertionError):
    """The history is not strictly serializable. The message names the anomaly and its transactions."""


class Edge(StrEnum):
    """The kinds of dependencies."""

    WW = "ww"
    WR = "wr"
    RW = "rw"
    RT = "rt"


class Step(NamedTuple):
    """One operation within a transaction: an append of `item`, or a read that found `items`."""

    key: bytes
    item: bytes | None = None
    items: Items | None = None

    def __str__(self) -> str:
        return f"append {self.key!r} {self.item!r}" if self.item is not None else f"read {self.key!r} {self.items}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """One transaction of a history."""

    name: str
    steps: Sequence[Step]
    """In the order of execution. A step whose answer is unknown has neither item nor items, or its item only."""
    began: float
    ended: float = inf
    """`inf` if the outcome is unknown."""
    is_aborted: bool = False
    """True if the transaction has certainly done nothing."""

    def __str__(self) -> str:
        return f"{self.name} in {self.began:.6f}..{self.ended:.6f}: {'; '.join(map(str, self.steps))}"


class Graph:
    """Transactions and their dependencies, by number."""

    def __init__(self) -> None:
        self.edges: defaultdict[int, dict[int, set[Edge]]] = defaultdict(dict)

    def add(self, source: int, target: int, kind: Edge) -> None:
        if source != target:
            self.edges[source].setdefault(target, set()).add(kind)

    # A moment in which a transaction ends is its own node, so that real time takes a linear number of edges.
    def add_times(self, times: Iterable[tuple[float, float, int]]) -> None:
        """Add real time. `times` has the beginning, the end and the number of each transaction. Numbers below 0 are
        moments."""
        times = list(times)
        ends = sorted((ended, number) for _, ended, number in times if ended < inf)
        begins = deque(sorted((began, number) for began, _, number in times))
        moment = 0
        for ended, number in ends:
            while begins and begins[0][0] <= ended:
                _, begun = begins.popleft()
                if moment:
                    self.add(moment, begun, Edge.RT)
            if moment:
                self.add(moment, moment - 1, Edge.RT)
            moment -= 1
            self.add(number, moment, Edge.RT)
        for _, begun in begins:
            if moment:
                self.add(moment, begun, Edge.RT)

    def anomaly(self) -> tuple[str, list[tuple[int, Edge, int]]] | None:
        """Return the name of the plainest anomaly and its cycle, or None."""
        for suffix, more in (("", set[Edge]()), ("-realtime", {Edge.RT})):
            for name, kinds in (("G0", {Edge.WW}), ("G1c", {Edge.WW, Edge.WR})):
                if cycle := self._cycle(kinds | more):
                    return name + suffix, cycle
            if cycle := self._single(more):
                return "G-single" + suffix, cycle
            if cycle := self._cycle({Edge.WW, Edge.WR, Edge.RW} | more):
                return "G2" + suffix, cycle
        return None

    def _cycle(self, kinds: set[Edge]) -> list[tuple[int, Edge, int]] | None:
        for part in self._components(kinds):
            start = min(part, key=abs)
            for following in self._next(start, kinds):
                if following in part and (way := self._way(following, start, kinds, part)) is not None:
                    return self._named([start, *way], kinds)
        return None

    def _single(self, more: set[Edge]) -> list[tuple[int, Edge, int]] | None:
        """Return a cycle with exactly one `rw`."""
        kinds = {Edge.WW, Edge.WR} | more
        for part in self._components(kinds | {Edge.RW}):
            for reader in sorted(part):
                for writer, found in self.edges[reader].items():
                    if Edge.RW not in found or writer not in part:
                        continue
                    if (way := self._way(writer, reader, kinds, part)) is not None:
                        return [(reader, Edge.RW, writer), *self._named(way, kinds)]
        return None

    def _next(self, node: int, kinds: set[Edge]) -> Iterator[int]:
        return (target for target, found in self.edges.get(node, {}).items() if not kinds.isdisjoint(found))

    def _named(self, way: list[int], kinds: set[Edge]) -> list[tuple[int, Edge, int]]:
        return [(a, min(self.edges[a][b] & kinds, key=list(Edge).index), b) for a, b in pairwise(way)]

    def _way(self, start: int, end: int, kinds: set[Edge], within: set[int]) -> list[int] | None:
        """Return the shortest way from `start` to `end`, both included."""
        before: dict[int, int] = {start: start}
        waiting = deque([start])
        while waiting:
            node = waiting.popleft()
            if node == end:
                way = [end]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            for target in self._next(node, kinds):
                if target in within and target not in before:
                    before[target] = node
                    waiting.append(target)
        return None

    def _components(self, kinds: set[Edge]) -> Iterator[set[int]]:
        """Yield the strongly connected components of more than one node (Tarjan, 1972, without recursion)."""
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        stacked: set[int] = set()
        for root in list(self.edges):
            if root in index:
                continue
            work = [(root, self._next(root, kinds))]
            index[root] = low[root] = len(index)
            stack.append(root)
            stacked.add(root)
            while work:
                node, targets = work[-1]
                target = next(targets, None)
                if target is None:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[node])
                    if low[node] == index[node]:
                        part = {stack.pop()}
                        while node not in part:
                            part.add(stack.pop())
                        stacked -= part
                        if len(part) > 1:
                            yield part
                elif target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    stacked.add(target)
                    work.append((target, self._next(target, kinds)))
                elif target in stacked:
                    low[node] = min(low[node], index[target])


def check_cycles(history: Sequence[Transaction]) -> None:
    """Raise Cycle unless the history is strictly serializable. Numbers of transactions in the graph count from 1."""
    lists = _Lists(history)
    graph = Graph()
    for key, order in lists.longest.items():
        writers = [lists.appended[key, item] for item in order]
        for earlier, later in pairwise(writers):
            graph.add(earlier, later, Edge.WW)
    for number, key, items in lists.reads:
        order = lists.longest[key]
        if items:
            graph.add(lists.appended[key, items[-1]], number, Edge.WR)
        if len(items) < len(order):
            graph.add(number, lists.appended[key, order[len(items)]], Edge.RW)
        else:
            for writer in lists.unseen[key]:
                graph.add(number, writer, Edge.RW)
    graph.add_times((each.began, each.ended, n) for n, each in enumerate(history, 1) if n in lists.committed)
    if (found := graph.anomaly()) is not None:
        raise Cycle(described(*found, lambda number: str(history[number - 1])))


def described(name: str, cycle: Sequence[tuple[int, Edge, int]], text_of: Callable[[int], str]) -> str:
    """Return a description of an anomaly: its transactions, each with its dependency on the next one."""
    lines = [f"  {text_of(a)}\n    {kind} →" for a, kind, _ in cycle if a > 0]
    return f"{name}\n" + "\n".join(lines)


class _Lists:
    """The lists of a history."""

    def __init__(self, history: Sequence[Transaction]) -> None:
        """Raises Cycle for an anomaly that needs no cycle."""
        self.appended: dict[tuple[bytes, bytes], int] = {}
        """The transaction that appended an item to a key."""
        self.reads: list[tuple[int, bytes, Items]] = []
        """Answers, without what the transaction itself had appended."""
        self.longest: dict[bytes, Items] = defaultdict(tuple)
        self.unseen: dict[bytes, list[int]] = defaultdict(list)
        """By key: committed transactions of whose appends no answer shows one."""
        self._history = history
        for number, each in enumerate(history, 1):
            for step in each.steps:
                if step.item is not None and self.appended.setdefault((step.key, step.item), number) != number:
                    raise ValueError(f"{step} is not unique: {each} and {history[self.appended[step[:2]] - 1]}")
        for number, each in enumerate(history, 1):
            if not each.is_aborted:
                self._read(number, each)
        seen = {(key, item) for key, order in self.longest.items() for item in order}
        self.committed = {n for n, each in enumerate(history, 1) if not each.is_aborted and each.ended < inf}
        self.committed |= {self.appended[each] for each in seen}
        for place, number in self.appended.items():
            if place not in seen and number in self.committed:
                self.unseen[place[0]].append(number)

    def _read(self, number: int, transaction: Transaction) -> None:
        own: dict[bytes, Items] = defaultdict(tuple)
        for step in transaction.steps:
            if step.item is not None:
                own[step.key] += (step.item,)
            if step.items is None:
                continue
            mine = own[step.key]
            if step.items[len(step.items) - len(mine) :] != mine:
                raise Cycle(f"internal: {step} does not end with its own {mine}: {transaction}")
            items = step.items[: len(step.items) - len(mine)]
            self._check(number, step.key, items)
            self.reads.append((number, step.key, items))

    def _check(self, reader: int, key: bytes, items: Items) -> None:
        by = self._history[reader - 1]
        if len(set(items)) < len(items):
            raise Cycle(f"an item is twice in {key!r}: {items}: {by}")
        for item in items:
            writer = self.appended.get((key, item))
            if writer is None:
                raise Cycle(f"nobody appended {item!r} to {key!r}: {by}")
            if self._history[writer - 1].is_aborted:
                raise Cycle(f"G1a: {item!r} in {key!r} is from {self._history[writer - 1]}, which was aborted: {by}")
        if items and (writer := self.appended[key, items[-1]]) != reader:
            its = [step.item for step in self._history[writer - 1].steps if step.key == key and step.item is not None]
            if its[-1] != items[-1]:
                raise Cycle(f"G1b: {items[-1]!r} in {key!r} is not the last append of its transaction: {by}")
        longest = self.longest[key]
        short, long = sorted((items, longest), key=len)
        if long[: len(short)] != short:
            raise Cycle(f"lists of {key!r} contradict each other: {items} and {longest}: {by}")
        self.longest[key] = long
