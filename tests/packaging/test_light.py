"""The clients alone need only the project's own dependencies, without the extra for nodes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread
from tests.source import ROOT, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
HEAVY = {
    "crc32c", "httptools", "kazoo", "prometheus_client", "psutil", "rich", "rocksdict", "structlog", "typer", "uvloop",
}  # fmt: skip

ALONE = """
import importlib.metadata, sys

class Only:
    '''Hides what is installed and not allowed.'''
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in HIDDEN and path is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)

owners = importlib.metadata.packages_distributions()
allowed = set(sys.argv[1].split(","))
normal = lambda name: name.lower().replace("_", "-").replace(".", "-")
HIDDEN = {top for top, dists in owners.items() if not {normal(dist) for dist in dists} & allowed}
sys.meta_path.insert(0, Only())
"""
USE = """
import asyncio
import kvstore.client, kvstore.client.bulk, kvstore.client.pinned.read, kvstore.client.pinned.pins
from kvstore.client import AsyncClient, AsyncTypedClient, Client, TypedClient, json_codec
url = sys.argv[2]
with Client(url) as client:
    client.put(b"k", b"v")
    assert client.get(b"k").value == b"v"
    TypedClient(client, json_codec()).put(b"j", [1])
async def main():
    async with AsyncClient(url) as client:
        assert (await AsyncTypedClient(client, json_codec()).get(b"j")).value == [1]
asyncio.run(main())
print("done", *sorted(HEAVY & {name.partition(".")[0] for name in sys.modules}))
"""


def with_theirs(wanted: list[Requirement]) -> set[str]:
    """Return the distributions that an installation of these requirements contains."""
    found: set[str] = set()
    rest = [canonicalize_name(each.name) for each in wanted]
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            theirs = [Requirement(line) for line in requires(name) or ()]
            plain = [each for each in theirs if each.marker is None or each.marker.evaluate({"extra": ""})]
            rest += [canonicalize_name(each.name) for each in plain]
    return found


def alone(code: str, *words: str, extras: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment that contains only the clients' dependencies and those of some extras."""
    theirs = [Requirement(line) for each in extras for line in PROJECT["optional-dependencies"][each]]
    allowed = ",".join(sorted({*with_theirs(BASE + theirs), "kvstore-log"}))
    command = [sys.executable, "-c", f"HEAVY = {HEAVY}\n{ALONE}\n{code}", allowed, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_clients_work_without_optional_packages() -> None:
    with serving_in_a_thread(ModelCluster()) as servers:
        done = alone(USE, servers.patient_url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


LOADS = """
import importlib, pkgutil
import locust
import kvstore.loadtest
for each in pkgutil.walk_packages(kvstore.loadtest.__path__, "kvstore.loadtest."):
    importlib.import_module(each.name)
print("done", *sorted({"tests", "loadtest", "rocksdict", "kazoo"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_load_tests_need_only_their_extra() -> None:
    done = alone(LOADS, extras=("loadtest",))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


SPARK = """
import importlib
for name in sys.argv[2:]:
    importlib.import_module(name)
from kvstore.errors import ConfigError
from kvstore.spark.cluster import find
try:
    find({"zookeeper": "127.0.0.1:2181"})
except ConfigError as error:
    print(error)
"""


def test_spark_needs_only_its_extra_and_zookeeper_that_of_nodes() -> None:
    """Return our modules that its files import, also inside functions, without the drivers of metadata stores."""
    theirs = {each.module for file in sources("kvstore/spark") for each in file.imports if each.top == "kvstore"}
    wanted = sorted(each for each in theirs if not each.startswith("kvstore.meta."))
    assert {"kvstore.env.real", "kvstore.client.bulk"} <= set(wanted)
    done = alone(SPARK, "kvstore.spark.session", *wanted, extras=("spark",))
    said = r"zookeeper: no module \w+; on the driver run `.*`.*, or set the option servers\n"
    assert re.fullmatch(said, done.stdout), done.stderr[-2000:]


def test_wheel_imports_only_what_it_contains() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    left_out = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} - set(wheel["packages"])
    assert {"tests", "loadtest"} <= left_out
    found = [
        f"{file.path}:{each.line}"
        for file in sources(*wheel["packages"])
        for each in file.imports
        if each.top in left_out
    ]
    assert found == []
    script = PROJECT["scripts"]["kvstore-loadtest"]
    module, _, name = script.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_hidden_packages_cannot_be_imported() -> None:
    for name in sorted(HEAVY):
        assert f"no module named '{name}'" in alone(f"import {name}").stderr


def test_command_names_the_missing_extra() -> None:
    done = alone("sys.argv = ['kvstore', 'status']\nimport kvstore.__main__ as program\nprogram.main()")
    assert (done.returncode, done.stdout) == (1, "")
    said = r"kvstore: no module \w+: run `.*`.*\n"
    assert re.fullmatch(said, done.stderr)


def test_clients_have_no_heavy_dependency() -> None:
    names = {canonicalize_name(each.name) for each in BASE}
    assert len(names) == 7
    assert {canonicalize_name(name) for name in HEAVY} & with_theirs(BASE) == set()
    node = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["node"]}
    assert {canonicalize_name(name) for name in HEAVY} <= node
    assert PROJECT["optional-dependencies"]["client"] == []
