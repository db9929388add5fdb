"""Public names are as promised: `__all__` of a package lists what it offers, and every module can be imported alone."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.source import LOCUST

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for top in ("kvstore", "pyspark_kvstore")
    for file in (ROOT / top).rglob("*.py")
    if "_pb2" not in file.name and file.name != "__main__.py"
)
MODULES = [
    name for name in MODULES if name not in LOCUST
]  # tests/packaging/test_light.py imports those in a separate process
PACKAGES = [name for name in MODULES if (ROOT / name.replace(".", "/") / "__init__.py").exists()]
PROMISED = {"kvstore.client": {"AsyncClient", "Client"}}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", PACKAGES)
def test_package_exports_exactly_what_it_re_exports(name: str) -> None:
    package = importlib.import_module(name)
    tree = ast.parse((ROOT / name.replace(".", "/") / "__init__.py").read_text())
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    ]
    offered = list(getattr(package, "__all__", []))
    assert offered == sorted(set(offered), key=offered.index), "a name stands twice in __all__"
    assert set(offered) == set(imported)
    assert [each for each in offered if not hasattr(package, each)] == []


@pytest.mark.parametrize("name", PROMISED)
def test_public_imports_exist(name: str) -> None:
    offered = set(getattr(importlib.import_module(name), "__all__", ()))
    assert PROMISED[name] <= offered
