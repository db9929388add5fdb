"""The Python in README.md, the tutorials and the how-to guides does what it says, against real endpoints."""

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
from tests.pages import all_blocks

BLOCKS = [
    (each.name, each.code) for each in all_blocks() if each.language == "python" and not each.mark and not each.title
]
"""Those with a title are files: tests/cluster/pages runs them with real nodes."""
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


def test_examples_are_found() -> None:
    names = [name.partition(":")[0] for name, _ in BLOCKS]
    assert names.count("README.md") == 1
    assert len(names) >= 9


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_an_example_runs(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(ModelCluster()) as servers:
        run(name, code.replace("range(100_000)", "range(1_000)"), servers.patient_url.partition("?")[0])
        with Client(servers.patient_url) as client:
            assert client.count() > 0, "it wrote something"
    if "print(" in code and "except" not in code:
        assert capsys.readouterr().out in ("b'hello'\n", "b'new'\n", "home\n", "home 1 False\n")
