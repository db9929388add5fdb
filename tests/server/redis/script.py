"""Scripts of Redis commands and what a redis-server answered to them, as text that is easy to read and extend.

    = title           a new connection, and no keys
    > SET a "b c"     a command, quoted as for redis-cli
    >? INFO           the same; only the kind of the reply counts, and the first word of an error
    >> *1\\r\\n$4\\r\\n  bytes as they are: partial frames, inline commands, malformed commands
    < +OK\\r\\n         the bytes of a reply; after `>>` one line per reply, `< end` where the connection ends
    ! -ERR no\\r\\n     our reply, different on purpose, for the reason in the comment above
    # a comment

The replies are written by `python -m tests.server.redis.record`, which needs a redis-server. Reading them needs none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.server.redis.parser import Parser

GOLDEN = Path(__file__).parent / "golden"
END = b"end"
"""Stands for the end of the connection among replies."""


@dataclass
class Step:
    """One request and its replies."""

    request: str
    """The line of the script, including its mark."""
    theirs: list[bytes] = field(default_factory=list)
    ours: list[bytes] = field(default_factory=list)
    """Our replies, if they differ on purpose."""
    notes: list[str] = field(default_factory=list)
    """Comments and blank lines before the step."""

    @property
    def words(self) -> list[bytes]:
        """The words of the command; empty if the request is raw bytes."""
        mark, _, line = self.request.partition(" ")
        if mark == ">>":
            return []
        (words,) = Parser().parse(line.encode() + b"\n")
        return words

    @property
    def data(self) -> bytes:
        words = self.words
        if not words:
            return unescaped(self.request.partition(" ")[2])
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)

    @property
    def is_loose(self) -> bool:
        return self.request.startswith(">? ")


@dataclass
class Script:
    """The steps of one connection."""

    title: str
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def escaped(data: bytes) -> str:
    return data.decode("latin1").encode("unicode_escape").decode()


def unescaped(text: str) -> bytes:
    """Return the bytes that `escaped` writes as `text`. Raises AssertionError for an unknown escape, because a
    reader would take it for literal bytes."""
    data = text.encode().decode("unicode_escape").encode("latin1")
    assert escaped(data) == text, f"expected {escaped(data)}, got {text}"
    return data


def read(path: Path) -> list[Script]:
    scripts: list[Script] = []
    notes: list[str] = []
    for line in path.read_text().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "=":
            scripts.append(Script(rest, notes=notes))
            notes = []
        elif mark in (">", ">?", ">>"):
            steps = scripts[-1].steps
            assert not (steps and END in steps[-1].theirs), f"{path.name}: nobody answers {line}: the connection ended"
            scripts[-1].steps.append(Step(line, notes=notes))
            notes = []
        elif mark == "<":
            scripts[-1].steps[-1].theirs.append(unescaped(rest))
        elif mark == "!":
            step = scripts[-1].steps[-1]
            step.ours.append(unescaped(rest))
        else:
            assert not line or mark == "#", f"{path.name}: {line}"
            notes.append(line)
    return scripts


def written(scripts: list[Script]) -> str:
    lines: list[str] = []
    for script in scripts:
        lines += [*script.notes, f"= {script.title}"]
        for step in script.steps:
            lines += [*step.notes, step.request]
            lines += [f"< {escaped(each)}" for each in step.theirs]
            lines += [f"! {escaped(each)}" for each in step.ours]
    return "\n".join(lines) + "\n"


def gist(data: bytes) -> bytes:
    """Return the part of a reply to `>?` that is compared: its kind, and the first word of an error."""
    return data.split()[0] if data[:1] == b"-" else data if data == END else data[:1]


async def reply(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of one reply; END if the connection ends instead."""
    try:
        line = await reader.readuntil(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return END
    kind, rest = line[:1], line[1:-2]
    if kind in b"+-:_,#(" or rest == b"-1":
        return line
    if kind in b"$=":
        return line + await reader.readexactly(int(rest) + 2)
    count = int(rest) * (2 if kind == b"%" else 1)
    return line + b"".join([await reply(reader) for _ in range(count)])
