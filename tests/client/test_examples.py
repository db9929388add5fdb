"""The Python in docs/clients.md and README.md does what it says, against real doors."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from typing import Any

import pytest

from kvstore.client import Client
from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread
from tests.source import ROOT

BLOCKS = [
    (f"{path}:{text[: found.start()].count(chr(10)) + 1}", found[1])
    for path in ("README.md", "docs/clients.md")
    for text in [(ROOT / path).read_text()]
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]
ELSEWHERE = ("pin_store", "client.watch", "coordination")
"""What the model has not: pins, the change feed, and waiting for it, which tests/cluster shows with real nodes."""
HOSTS = re.compile(r"kv://[\w.:,]+")


def run(name: str, code: str, url: str) -> dict[str, Any]:
    """Run it, with `await` at its top where it stands there; returns its names."""
    compiled = compile(HOSTS.sub(url, code), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "example"}
    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(types.FunctionType(compiled, names)())
    else:
        exec(compiled, names)
    return names


def test_the_examples_are_found() -> None:
    names = [name.partition(":")[0] for name, _ in BLOCKS]
    assert (names.count("README.md"), names.count("docs/clients.md")) == (1, 9)
    assert sum(any(word in code for word in ELSEWHERE) for _, code in BLOCKS) == 3


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_an_example_runs(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if any(word in code for word in ELSEWHERE):
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    with serving_in_a_thread(ModelCluster()) as servers:
        run(name, code.replace("range(100_000)", "range(1_000)"), servers.patient_url.partition("?")[0])
        with Client(servers.patient_url) as client:
            assert client.count() > 0, "it wrote something"
    if "print(" in code and "except" not in code:
        assert capsys.readouterr().out in ("b'hello'\n", "home\n", "home 1 False\n")
