"""The names of files, as processes see them and as they survive a power cut.

A change of names is durable once its directory has been synced. At a power cut each directory keeps a prefix of its
unsynced changes, because a journal may have progressed that far on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.sim.world.inode import Inode


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def _above(path: str) -> list[str]:
    """Return the directories that lead to `path`."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts))]


class Tree:
    """Directories and files at one moment."""

    def __init__(self) -> None:
        self.files: dict[str, Inode] = {}
        self.dirs: dict[str, None] = {"": None}

    def copy(self, inodes: dict[int, Inode] | None = None) -> Tree:
        """Return a copy of the tree, with other inodes if they are given by number."""
        tree = Tree()
        tree.files = {path: inodes[inode.number] if inodes else inode for path, inode in self.files.items()}
        tree.dirs = dict(self.dirs)
        return tree

    def prune(self) -> None:
        """Drop entries in directories that do not exist: the names of the directories were never durable."""
        self.dirs = {path: None for path in sorted(self.dirs) if all(each in self.dirs for each in _above(path))}
        self.files = {path: inode for path, inode in self.files.items() if parent(path) in self.dirs}

    def below(self, path: str) -> list[str]:
        """Return the names directly in the directory `path`, sorted."""
        prefix = path + "/" if path else ""
        paths = (each for each in (*self.files, *self.dirs) if each and each.startswith(prefix))
        return sorted({each.removeprefix(prefix).partition("/")[0] for each in paths if each != path})


@dataclass(frozen=True, slots=True)
class Mkdir:
    path: str

    @property
    def dirs(self) -> set[str]:
        return {parent(self.path)}

    def apply(self, tree: Tree) -> None:
        tree.dirs[self.path] = None


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    inode: Inode

    @property
    def dirs(self) -> set[str]:
        return {parent(self.path)}

    def apply(self, tree: Tree) -> None:
        tree.files[self.path] = self.inode


@dataclass(frozen=True, slots=True)
class Remove:
    path: str

    @property
    def dirs(self) -> set[str]:
        return {parent(self.path)}

    def apply(self, tree: Tree) -> None:
        tree.files.pop(self.path, None)
        tree.dirs.pop(self.path, None)


@dataclass(frozen=True, slots=True)
class Rename:
    old: str
    new: str

    @property
    def dirs(self) -> set[str]:
        return {parent(self.old), parent(self.new)}

    def apply(self, tree: Tree) -> None:
        if self.old in tree.files:
            tree.files[self.new] = tree.files.pop(self.old)
        elif self.old in tree.dirs:
            tree.files = {self._moved(path): inode for path, inode in tree.files.items()}
            tree.dirs = {self._moved(path): None for path in tree.dirs}

    def _moved(self, path: str) -> str:
        return self.new + path[len(self.old) :] if path == self.old or path.startswith(self.old + "/") else path


NameChange = Mkdir | Create | Remove | Rename


class Names:
    """Two versions of the tree, with the changes in between."""

    def __init__(self) -> None:
        self.now = Tree()
        self.durable = Tree()
        self.pending: list[NameChange] = []

    def change(self, change: NameChange) -> None:
        change.apply(self.now)
        self.pending.append(change)

    def inodes(self) -> dict[int, Inode]:
        """Return all files that have a name now, or had one that a power cut may bring back, by number."""
        named = [inode for tree in (self.now, self.durable) for inode in tree.files.values()]
        return {inode.number: inode for inode in (*named, *(c.inode for c in self.pending if isinstance(c, Create)))}

    def copy(self, inodes: dict[int, Inode]) -> Names:
        """Return a copy of the names, with other inodes given by number."""
        names = Names()
        names.now, names.durable = self.now.copy(inodes), self.durable.copy(inodes)
        names.pending = [Create(c.path, inodes[c.inode.number]) if isinstance(c, Create) else c for c in self.pending]
        return names

    def sync_dir(self, path: str) -> None:
        """Make the changes in the directory `path` durable, with the changes in other directories that they depend
        on."""
        dirs = {path}
        chosen: set[int] = set()
        for index in reversed(range(len(self.pending))):
            if not dirs.isdisjoint(self.pending[index].dirs):
                chosen.add(index)
                dirs |= self.pending[index].dirs
        for index in sorted(chosen):
            self.pending[index].apply(self.durable)
        self.pending = [change for index, change in enumerate(self.pending) if index not in chosen]

    def power_cut(self, keep: float, random: Random) -> int:
        """Keep each change with probability `keep` unless an earlier change of its directory is lost. Returns the
        number of lost changes."""
        stopped: set[str] = set()
        lost = 0
        for change in self.pending:
            if stopped.isdisjoint(change.dirs) and random.random() < keep:
                change.apply(self.durable)
            else:
                stopped |= change.dirs
                lost += 1
        self.pending.clear()
        self.durable.prune()
        self.now = self.durable.copy()
        return lost
