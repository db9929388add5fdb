"""The Python in README.md, the tutorials, the how-to guides and the clients' docstrings runs against real servers."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.client.aio import client as aio_client
from kvstore.client.aio import typed as aio_typed
from kvstore.client.blocking import client as blocking_client
from kvstore.client.blocking import typed as blocking_typed
from kvstore.client.coordination import aio as aio_coordination
from kvstore.client.coordination import blocking as blocking_coordination
from kvstore.client.core import batch
from tests.client.model import ModelCluster, ModelPartition
from tests.client.serving import serving, serving_in_a_thread
from tests.pages import all_blocks

BLOCKS = [
    (each.name, each.code) for each in all_blocks() if each.language == "python" and not each.mark and not each.title
]
"""Those with a title are files: tests/cluster/pages runs them with real nodes."""
PRINTED = {
    *("b'hello'\n", "b'new'\n", "home\n", "home 1 False\n"),
    *("b'17'\n", """b'{"name": "Ann", "email": "ann@example.com"}'\n""", "[b'inbox/']\n"),
}
"""The output of the examples that print something."""
HOSTS = re.compile(r"kv://[\w.:,]+")


def run(name: str, code: str, url: str) -> dict[str, Any]:
    """Run the code, which may have `await` at its top level, and return its names."""
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
def test_example_runs(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread(ModelCluster()) as servers:
        run(name, code.replace("range(100_000)", "range(1_000)"), servers.patient_url.partition("?")[0])
        with Client(servers.patient_url) as client:
            assert client.count() > 0, "it wrote something"
    if "print(" in code and "except" not in code:
        assert capsys.readouterr().out in PRINTED


def test_example_of_a_restore_copies_a_prefix_with_its_expiries() -> None:
    page = "docs/how-to/restore-a-snapshot.md"
    (block,) = [each for each in all_blocks() if each.page == page and each.language == "python"]
    with serving_in_a_thread(ModelCluster()) as servers, Client(servers.patient_url) as client:
        client.put(b"shop/1", b"pear", ttl_s=3_600)
        client.put(b"shop/2", b"plum")
        client.put(b"blog/1", b"other")
        before = dict(client.scan())
        code = block.code.replace("time.time()", f"{ModelPartition.now_ms} / 1000")  # the model's clock
        run(block.name, code, servers.patient_url.partition("?")[0])
        after = dict(client.scan())
        assert {key: item.value for key, item in after.items()} == {key: item.value for key, item in before.items()}
        assert [key for key in after if after[key].version > before[key].version] == [b"shop/1", b"shop/2"]
        assert [after[key].expires_ms for key in after] == [before[key].expires_ms for key in after]


def docstrings(module: types.ModuleType) -> Iterator[doctest.DocTest]:
    """Yield the docstrings of a module that have examples to run."""
    for each in doctest.DocTestFinder().find(module):
        each.examples = [example for example in each.examples if doctest.SKIP not in example.options]
        if each.examples:
            yield each


def forget_all(cluster: ModelCluster) -> None:
    """Let each docstring begin with an empty store."""
    for partition in cluster.partitions.values():
        partition.data.clear()


@pytest.mark.parametrize(
    ("module", "count"), [(blocking_client, 20), (blocking_typed, 2), (blocking_coordination, 5), (batch, 1)]
)
def test_docstring_example_runs(module: types.ModuleType, count: int) -> None:
    cluster, ran = ModelCluster(), 0
    with serving_in_a_thread(ModelCluster()) as servers, Client(servers.patient_url) as client:
        for each in docstrings(module):
            forget_all(cluster)
            each.globs["client"] = client
            assert doctest.DocTestRunner().run(each).failed == 0, each.name
            ran += 1
    assert ran == count


@pytest.mark.parametrize(("module", "count"), [(aio_client, 20), (aio_typed, 2), (aio_coordination, 5)])
async def test_docstring_example_runs_on_asyncio(module: types.ModuleType, count: int) -> None:
    cluster, ran = ModelCluster(), 0
    async with serving(cluster) as servers, AsyncClient(servers.patient_url) as client:
        for each in docstrings(module):
            forget_all(cluster)
            each.globs["client"] = client
            for example in each.examples:
                shown = await shown_by(example.source, each)
                assert doctest.OutputChecker().check_output(example.want, shown, 0), (each.name, example.source, shown)
            ran += 1
    assert ran == count


async def shown_by(source: str, docstring: doctest.DocTest) -> str:
    """Run one example, in which `await` may occur, and return what the interpreter would print."""
    code = compile(source, docstring.name, "single", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        if code.co_flags & inspect.CO_COROUTINE:
            await types.FunctionType(code, docstring.globs)()
        else:
            exec(code, docstring.globs)
    return shown.getvalue()
