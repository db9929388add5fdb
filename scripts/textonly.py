"""Compare Python files without their text: `python -m scripts.textonly REVISION [REVISION]`.

Use it after rewriting docstrings, comments, messages or test names, to check that no code has changed with them. It
compares the syntax trees of the files that differ between a revision and the working tree, or between two revisions,
without docstrings, comments, strings and the names of test functions. Prints the files whose code differs, and those
that were added or deleted, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEST_NAME = re.compile(r"test_\w+")


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class _Textless(ast.NodeTransformer):
    """Empties strings, removes docstrings and gives all test functions one name."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        """Keep only the values of an f-string, sorted, because another sentence may name them in another order."""
        self.generic_visit(node)
        return ast.JoinedStr(sorted((each for each in node.values if _is_value(each)), key=ast.dump))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("test", node.ctx) if TEST_NAME.fullmatch(node.id) else node

    def visit_alias(self, node: ast.alias) -> ast.alias:
        return ast.alias("test", node.asname) if TEST_NAME.fullmatch(node.name) else node

    def _visit_body(self, node: Documented) -> Documented:
        self.generic_visit(node)
        node.body = [each for each in node.body if not _is_string(each)] or [ast.Pass()]
        if not isinstance(node, ast.Module) and TEST_NAME.fullmatch(node.name):
            node.name = "test"
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit_body


def _is_value(node: ast.expr) -> bool:
    return isinstance(node, ast.FormattedValue)


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value == ""


def textless(source: str) -> str:
    """Return the syntax tree of `source` without its text. It is equal for sources that differ only in text."""
    return ast.dump(_Textless().visit(ast.parse(source)))


def differing(before: str, after: str | None, root: Path = ROOT) -> list[str]:
    """Return the Python files whose code differs between revision `before` and `after`, or the working tree if `after`
    is None. An added or deleted file differs."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout

    def text(path: str) -> str:
        return (root / path).read_text() if after is None else git("show", f"{after}:{path}")

    revisions = [before] if after is None else [before, after]
    found = []
    for line in git("diff", "--no-renames", "--name-status", *revisions, "--", "*.py").splitlines():
        kind, path = line.split("\t")
        if kind != "M" or textless(git("show", f"{before}:{path}")) != textless(text(path)):
            found.append(path)
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("before", help="a revision of Git")
    parser.add_argument("after", nargs="?", help="another revision; the working tree if absent")
    given = parser.parse_args(words)
    found = differing(given.before, given.after)
    for path in found:
        print(f"code differs: {path}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
