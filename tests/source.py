"""The project's source as syntax trees, on which test_tidy.py checks the house rules."""

import ast
import gc
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCUST = {
    "kvstore.loadtest.locustfile",
    *(f"kvstore.loadtest.generator.{name}" for name in ("grpc_user", "own_user", "resp_user", "users")),
}
"""The modules of kvstore that import Locust. Importing Locust patches the standard library of the process."""


@dataclass(frozen=True)
class Import:
    module: str
    """`kvstore.wal` in `from kvstore.wal import writer`."""
    name: str
    """`writer`; empty for a plain `import`."""
    line: int
    at_run_time: bool
    """False under `if TYPE_CHECKING:`."""

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


@dataclass(frozen=True)
class Source:
    path: str
    """Relative to the project's root."""
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, at_run_time=True))

    def uses(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield every dotted name that is looked up, in full: after `from asyncio import wait`, `wait` is
        `asyncio.wait`."""
        spelled = _spellings(self.nodes)
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and (dotted := _dotted(node)):
                head, _, tail = dotted.partition(".")
                yield ".".join(filter(None, (spelled.get(head, head), tail))), node

    @cached_property
    def functions(self) -> list[tuple[str, int]]:
        """Each function's name, qualified by the enclosing classes and functions, and its length in lines."""
        return list(_functions(self.tree, prefix=""))


def sources(*tops: str) -> list[Source]:
    """Return our Python files under `tops`, except generated ones."""
    return list(_sources(tops))


@cache
def _sources(tops: tuple[str, ...]) -> tuple[Source, ...]:
    """Parse the files. The trees are three million objects that stay. Without a freeze, repeated visits by the garbage
    collector took four fifths of the time, and a second at every later full collection."""
    files = sorted(file for top in tops for file in (ROOT / top).rglob("*.py"))
    gc.collect()
    gc.disable()
    try:
        found = tuple(_source(file) for file in files if "_pb2" not in file.name)
        for each in found:
            assert each.nodes
        gc.freeze()
    finally:
        gc.enable()
    return found


@cache
def _source(file: Path) -> Source:
    """Return the file's tree. Each file is parsed once for all rules."""
    return Source(str(file.relative_to(ROOT)), file.read_text())


@cache
def tracked_texts() -> dict[str, str]:
    """Return every text file that Git tracks, except generated ones and copies of others' files."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    texts = {}
    for path in filter(None, listing.split("\0")):
        try:
            texts[path] = (ROOT / path).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # binary, or deleted and not yet committed
    return {
        path: text for path, text in texts.items() if "_pb2" not in path and not path.endswith((".lock", ".tiny.js"))
    }


def each_of(files: Callable[[], Iterable[Source]]) -> Callable[[Callable[[Source], None]], Callable[[], None]]:
    """Turn the check of one file into a test of all files that shows every failing file. Thousands of tests would cost
    more than their checks. `files` is called when the test runs, because every worker collects all tests."""

    def test_of(check: Callable[[Source], None]) -> Callable[[], None]:
        def test() -> None:
            faults, found = [], list(files())
            assert found, "nothing to check"
            for file in found:
                try:
                    check(file)
                except AssertionError as error:
                    faults.append(f"{file.path}: {error}")
            assert not faults, "\n".join(faults)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return test_of


def import_cycle_or_none(graph: dict[str, set[str]]) -> list[str] | None:
    """Return one import cycle, or None."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str] | None:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return None
        done.add(module)
        rounds = (visit(target, [*trail, module]) for target in sorted(graph.get(module, ())))
        return next(filter(None, rounds), None)

    return next(filter(None, (visit(module, []) for module in sorted(graph))), None)


def import_graph(files: list[Source], *, also_for_types: bool = False) -> dict[str, set[str]]:
    """Return, by module, our modules that it imports at run time, also inside functions; with `also_for_types`,
    type-only imports too."""
    modules = {file.module for file in files}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for file in files:
        for each in file.imports:
            target = f"{each.module}.{each.name}"
            target = target if target in modules else each.module
            if (each.at_run_time or also_for_types) and target in modules:
                graph[file.module].add(target)
    return graph


def _imports(node: ast.AST, *, at_run_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, "", child.lineno, at_run_time) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(child.module or "", alias.name, child.lineno, at_run_time) for alias in child.names)
        elif isinstance(child, ast.If) and (_dotted(child.test) or "").endswith("TYPE_CHECKING"):
            for branch in child.body:
                yield from _imports(ast.Module([branch], []), at_run_time=False)
            for branch in child.orelse:
                yield from _imports(ast.Module([branch], []), at_run_time=at_run_time)
        else:
            yield from _imports(child, at_run_time=at_run_time)


def _spellings(nodes: list[ast.AST]) -> dict[str, str]:
    spelled: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            spelled |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            spelled |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return spelled


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return f"{head}.{node.attr}"
    return None


def _functions(node: ast.AST, *, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, (child.end_lineno or child.lineno) - child.lineno + 1
            yield from _functions(child, prefix=f"{name}.")
        else:
            yield from _functions(child, prefix=prefix)
