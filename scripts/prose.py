"""Check the project's prose for what a machine can see: `python -m scripts.prose [PATHS]`, part of `make static`.

Checks docstrings, comments, messages of errors and log lines, test names and Markdown pages against the rules of
CONTRIBUTING.md ("How we write"). Prints one line per finding and exits with 1 if there is one. With `--commit FILE` it
checks a commit message instead; the pre-commit configuration calls it so.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WORDS_MAX = 35
"""Maximum number of words in a sentence."""
NAME_MAX = 70
"""Maximum number of characters in the name of a test."""
PAGE_MAX = 1500
"""Maximum number of words on a page that is not reference, and about one release in the changelog."""
SUBJECT_MAX = 72
"""Maximum number of characters in the subject of a commit."""
UNBOUNDED = ("docs/reference/", "docs/design/figures/", "CONTRIBUTING.md", "loadtest/README.md")
OPENING = re.compile(r"(Who|Whoever|What|Whatever|Whose|Whether|That which)\b(?!-)")
BANNED = {
    r"anew|once more|over again": "again",
    r"for ever": "forever",
    r"turn(s|ed|ing)? away|sen(d|ds|t) away": "refuse, reject, disconnect",
    r"bears? (it |this |that )?out|borne out": "confirm",
    r"go(es)? by|went by|going by|gone by": "use, follow",
    r"go(es)? on|went on|going on|gone on": "continue",
    r"(short|long) ways?": "fast path, slow path",
    r"crowds?": "many clients",
    r"strangers?": "unauthenticated peer",
    r"custody": "ownership",
    r"what may be done": "permissions",
    r"doors?": "endpoint, listener",
    r"mend(s|ed|er|ing)?": "repair",
    r"is (not )?well|(not|un)sound": "healthy, inconsistent",
    r"stands? again|stood again": "run for election",
    r"stands? still|stood still": "pause, hang, stop",
    r"(?<!no )(a|an) \w+ of (its|their) own(?=[.,;:)]|$)": "its own X, a separate X",
    r"(may|must|might|can) stand(?! (for|in for|out|by))": "be",
    r"told|hear|hears|heard": "notify, receive, report",
    r"raises nothing": "nothing: delete the sentence",
    r"of which there (is|are)": "a plain count",
    r"as soon as as|as many as are": "a plain sentence",
    r"as [\w ]{3,20} last saw( it)?|as fast as (it|they) (is|are)( made| written)?(?=[.,;]|$)": "when X last checked",
    r"(took|taken|takes) [\w ]{0,20}for dead": "considered dead",
    r"wants? (a|an|the|one|some|at) [^.]*, got": "expected X, got Y",
}
_BANNED = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): word for pattern, word in BANNED.items()}
_ERRORS = re.compile(r"(?:Error|Exception|Unavailable|Overloaded|Unknown|Request|Refused|Failed|Exit|Invalid\w*)$")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_TEST = re.compile(r"\s*(?:async )?def (test_\w+)")
_ARTICLE = re.compile(r"test_(a|an|the)_")
_LOGS = {"debug", "info", "warning", "error", "critical", "exception"}


class Text(NamedTuple):
    """A piece of prose and where it begins."""

    file: Path
    line: int
    text: str


class Finding(NamedTuple):
    """A place where the prose breaks a rule."""

    file: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def findings(file: Path) -> Iterator[Finding]:
    """Yield what is wrong with the prose of one Python or Markdown file."""
    source = file.read_text()
    if file.suffix == ".md":
        yield from _page(file, source)
        texts = markdown(file, source)
    else:
        yield from _test_names(file, source)
        texts = python(file, source)
    for text in texts:
        yield from judge(text)


def judge(text: Text) -> Iterator[Finding]:
    """Yield the rules that the sentences of a text break."""
    for sentence in sentences(text.text):
        words = sentence.split()
        if len(words) > WORDS_MAX:
            yield Finding(text.file, text.line, f"{len(words)} words in a sentence", sentence)
        if OPENING.match(sentence) and not sentence.endswith("?"):
            yield Finding(text.file, text.line, f"begins with {words[0]}", sentence)
        for pattern, better in _BANNED.items():
            if found := pattern.search(sentence):
                yield Finding(text.file, text.line, f"{found.group()!r} (write: {better})", sentence)


def sentences(text: str) -> list[str]:
    """Split a text at full stops. Text in backticks, in quotation marks or in the address of a link counts as one
    word."""
    text = re.sub(r"``?[^`]+``?", "`code`", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>]*>", " ", text)
    text = re.sub(r"[\"“][^\"”]*[\"”]", "`quotation`", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs)\.", r"\1", text)
    parts = (part.strip(" *_>#-|") for part in re.split(r"(?<=[.!?:;])[)\"*_]*\s+|\n\s*\n", text))
    return [part for part in parts if part]


def python(file: Path, source: str) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of a module."""
    for node in ast.walk(ast.parse(source)):
        for statement in node.body if isinstance(node, _WITH_DOCSTRING) else ():
            if isinstance(statement, ast.Expr) and (docstring := _literal(statement.value)):
                yield Text(file, statement.lineno, _without_examples(docstring))
        if isinstance(node, ast.Call) and _is_message(node):
            for argument in node.args:
                if words := _literal(argument):
                    yield Text(file, node.lineno, words)
    block: list[str] = []
    began = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# type:", "# noqa", "# pragma", "# ──")):
            continue
        if token.start[0] != last + 1 and block:
            yield Text(file, began, " ".join(block))
            block = []
        if not block:
            began = token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# ").split("# noqa")[0])
    if block:
        yield Text(file, began, " ".join(block))


def markdown(file: Path, source: str) -> Iterator[Text]:
    """Yield the paragraphs, list items and table cells of a page, without its code and headings."""
    paragraph: list[str] = []
    began, in_code = 0, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
            line = ""
        if in_code:
            continue
        is_cell, is_item = line.lstrip().startswith("|"), bool(re.match(r"\s*([-*+]|\d+\.)\s", line))
        if paragraph and (not line.strip() or is_cell or is_item or line.startswith("#")):
            yield Text(file, began, " ".join(paragraph))
            paragraph = []
        if is_cell:
            for cell in line.strip().strip("|").split("|"):
                yield Text(file, number, cell.strip())
        elif line.strip() and not line.startswith(("#", "    ", "---", "<!--", "!!!", "???", "===")):
            if not paragraph:
                began = number
            paragraph.append(re.sub(r"^\s*([-*+]|\d+\.)\s+", "", line).strip())


def _page(file: Path, source: str) -> Iterator[Finding]:
    if file.name == "CHANGELOG.md":
        for release in source.split("\n## ")[1:]:
            if (words := len(release.split())) > PAGE_MAX:
                named, line = release.split("\n", 1)[0], source[: source.index(release)].count("\n") + 1
                yield Finding(file, line, f"{words} words about {named}", f"at most {PAGE_MAX}; shorten it")
        return
    words = len(re.sub(r"```.*?```", "", source, flags=re.DOTALL).split())
    if words > PAGE_MAX and not str(file).startswith(UNBOUNDED):
        yield Finding(file, 1, f"{words} words on a page", f"at most {PAGE_MAX} outside the reference; split it")


def _test_names(file: Path, source: str) -> Iterator[Finding]:
    for number, line in enumerate(source.splitlines(), 1):
        found = _TEST.match(line)
        if found and len(found.group(1)) > NAME_MAX:
            yield Finding(file, number, f"{len(found.group(1))} characters in a test's name", found.group(1))
        if found and _ARTICLE.match(found.group(1)):
            yield Finding(file, number, "an article at the beginning of a test's name", found.group(1))


def _is_message(call: ast.Call) -> bool:
    called = call.func
    if isinstance(called, ast.Attribute):
        return called.attr in _LOGS or bool(_ERRORS.search(called.attr))
    return isinstance(called, ast.Name) and bool(_ERRORS.search(called.id))


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    return ""


def _without_examples(text: str) -> str:
    """Drop lines that are indented or begin with `>>>`: examples, tables and drawings."""
    lines = text.splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    return "\n".join(
        line.strip()
        for index, line in enumerate(lines)
        if not index or not (line.lstrip().startswith((">>>", "...", "|")) or line[margin:].startswith("    "))
    )


def commit(file: Path) -> Iterator[Finding]:
    """Yield what is wrong with a commit message."""
    subject, _, rest = file.read_text().partition("\n")
    verb = subject.split(" ")[0]
    if len(subject) > SUBJECT_MAX:
        yield Finding(file, 1, f"{len(subject)} characters in the subject, at most {SUBJECT_MAX}", subject)
    if subject.endswith(".") or not verb[:1].isupper() or verb.endswith(("ed", "ing")):
        yield Finding(file, 1, "expected an imperative sentence without a full stop", subject)
    if rest and not rest.startswith("\n"):
        yield Finding(file, 2, "expected a blank line", rest.partition("\n")[0])


def tracked(paths: list[str]) -> list[Path]:
    """Return the files under the paths whose prose people read. Generated code is not among them."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], check=True, capture_output=True, text=True)
    files = (Path(line) for line in listed.stdout.splitlines())
    return [file for file in files if file.suffix in {".py", ".md"} and "_pb2" not in file.name and file.exists()]


def main() -> int:
    """Print what is wrong with the prose of the files under the paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["."], help="files and folders (default: all that Git tracks)")
    parser.add_argument("--count", action="store_true", help="print only the number of findings by rule")
    parser.add_argument("--commit", type=Path, metavar="FILE", help="check the commit message in this file")
    options = parser.parse_args()
    if options.commit:
        found = list(commit(options.commit))
    else:
        found = [each for file in tracked(options.paths) for each in findings(file)]
    if options.count:
        rules = Counter(re.sub(r"^\d+ ", "", each.rule) for each in found)
        for rule, count in rules.most_common():
            print(f"{count:6} {rule}")
    else:
        for each in found:
            print(each)
    print(f"{len(found)} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
