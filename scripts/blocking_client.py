"""Writes the blocking client from the asyncio client: one client is written, and the other is the same without `await`.

    python scripts/blocking_client.py

The modules of SOURCES call nothing of asyncio themselves: they await their engine, their stream or their runner, which
is written twice, by hand, with the same names on both sides. So WORDS turns one module into the other. The sentences
that are true on one side only are beside the source in SOURCES. A word or a sentence that is not found is an error,
and so is a word of asyncio in the result. The linter then removes unused imports, sorts the rest, and writes
`yield from` for a loop that only yields.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENT = "kvstore/client"
TYPE = r"((?:[^\[\]]|\[[^\[\]]*\])+)"
"""A type, perhaps with types in brackets."""

WORDS = {
    r"\ban (?=`?Async[A-Z])": "a ",
    r"\bAsyncEngine\b": "BlockingEngine",
    r"\bStopAsyncIteration\b": "StopIteration",
    r"\bAsync(?=[A-Z])": "",
    r"\basync (?=def|for|with)": "",
    r"\bawait ": "",
    r"\banext\b": "next",
    r"\b__a(?=(?:enter|exit|iter|next)__)": "__",
    rf"\bCoroutine\[Any, Any, {TYPE}\]": r"\1",
    rf"\bAwaitable\[{TYPE}\]": r"\1",
    r"\bclient\.aio\b": "client.blocking",
    r"\bcoordination\.tasks\b": "coordination.threads",
}
FOREIGN = re.compile(r"[Aa]sync|\b(?:await|aio|[Cc]oroutines?|Awaitable|tasks?|event loops?)\b")
"""Words that no blocking module contains."""

SOURCES: dict[str, dict[str, str]] = {
    "aio/closing.py": {},
    "aio/client.py": {
        "The client for asyncio: `async with AsyncClient(": "The client for threads, scripts and gevent: `with Client(",
        """The store's operations as coroutines, for one event loop.

    The client puts concurrent calls into one message by itself: `await client.put(key, value)` in many tasks costs as
    much as one batch.""": """The store's operations as blocking calls, for any number of threads.

    The client batches calls of several threads to one server. A single thread that wants the cost of a batch uses the
    calls for many keys.""",
        "Create the client after a fork, and use one client per event loop.": (
            "Create the client after a fork, and after gevent's patches."
        ),
        "import asyncio\n": "from contextlib import nullcontext\n",
        "asyncio.Lock()": "nullcontext()",
        "Lets tasks that open the client at the same time read the topology once.": (
            "Locks nothing: a lock could stay locked after an exception in a signal handler, or in a forked child."
        ),
    },
    "aio/transaction.py": {
        "A transaction on asyncio: `async with": "A blocking transaction: `with",
    },
    "aio/typed.py": {},
    "aio/watch.py": {
        "A watch on asyncio: `async for": "A blocking watch, which works under gevent too: `for",
        "If its caller was cancelled while it waited for a change, the watch continues over another connection.": (
            "A watch is for one thread. Another thread may `close` it, which ends the iteration. gRPC's keepalive\n"
            "    notices within 15 s that a server hangs. A server that answers pings but sends nothing is left after\n"
            "    60 heartbeats."
        ),
    },
    "coordination/aio.py": {
        """Coordination on asyncio: sessions, and on them locks, elections, groups, barriers, rendezvous and queues.
""": """Coordination for threads, scripts and gevent: sessions, each with one thread of its own, and on them locks,
elections, groups, barriers, rendezvous and queues.
""",
    },
}
"""The modules, and the sentences that are others on the blocking side."""


def target_of(source: str) -> str:
    """The module that is written from `source`."""
    return source.replace("aio", "blocking")


def blocking(source: str) -> str:
    """The blocking form of a module of SOURCES. Raises ValueError for what cannot be translated."""
    text = (ROOT / CLIENT / source).read_text(encoding="utf-8")
    for sentence, other in SOURCES[source].items():
        if text.count(sentence) != 1:
            raise ValueError(f"expected once in {source}, found {text.count(sentence)} times: {sentence!r}")
        text = text.replace(sentence, other)
    for word, other in WORDS.items():
        text = re.sub(word, other, text)
    name = f"{CLIENT}/{target_of(source)}"
    text = _ruff("check", "--fix-only", "--unsafe-fixes", "--select", "F401,I,UP028", text=text, name=name)
    if found := FOREIGN.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"expected no {found.group()!r} in {name}, line {line}: change {source} or SOURCES")
    text = f"# Written by `make generate` from {CLIENT}/{source}. Edit that file.\n{text}"
    return _ruff("format", text=text, name=name)


def _ruff(*arguments: str, text: str, name: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "--stdin-filename", name, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> None:
    """Write the blocking modules."""
    for source in SOURCES:
        (ROOT / CLIENT / target_of(source)).write_text(blocking(source), encoding="utf-8")


if __name__ == "__main__":
    main()
