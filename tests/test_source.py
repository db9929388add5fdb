"""The helpers of the house rules find what they should."""

from tests.source import Source, import_cycle_or_none, import_graph
from tests.test_tidy import unrepeatable


def module(text: str, path: str = "kvstore/wal/sample.py") -> Source:
    return Source(path, text)


def test_imported_names_are_resolved_in_full() -> None:
    sample = module("import asyncio as a\nfrom asyncio import gather as g\na.wait([])\ng()\nself.loop.create_task(x)\n")
    assert {"asyncio.wait", "asyncio.gather", "self.loop.create_task"} <= {name for name, _ in sample.uses()}


def test_nondeterminism_is_found() -> None:
    lines = [
        *("asyncio.create_task(x)", "time.time()", "random.random()", "uuid.uuid4()", "os.urandom(8)"),
        *("asyncio.Queue()", "Random()", "hash(key)", "asyncio.get_running_loop().create_task(x)", "datetime.now()"),
    ]
    sample = module("import asyncio, os, random, time, uuid\nfrom datetime import datetime\n" + "\n".join(lines))
    found = {each.split(":")[1].split()[0] for each in unrepeatable(sample)}
    assert found == {str(3 + i) for i in range(len(lines))}


def test_names_of_ports_are_allowed() -> None:
    sample = module(
        "import asyncio, random\nasync def f(r: random.Random): await asyncio.sleep(r.random())\nRandom(7)\n"
    )
    assert list(unrepeatable(sample)) == []


def test_cycle_is_found_except_for_types() -> None:
    below = module("from kvstore.wal import top\n", "kvstore/wal/below.py")
    top = module("def f():\n    import kvstore.wal.below\n", "kvstore/wal/top.py")
    assert import_cycle_or_none(import_graph([below, top])) == [
        "kvstore.wal.below",
        "kvstore.wal.top",
        "kvstore.wal.below",
    ]
    typed = module("if TYPE_CHECKING:\n    import kvstore.wal.below\n", "kvstore/wal/top.py")
    assert import_cycle_or_none(import_graph([below, typed])) is None


def test_functions_are_measured_with_their_scope() -> None:
    assert list(module("class A:\n    def f(self):\n        def g():\n            pass\n").functions) == [
        ("A.f", 3),
        ("A.f.g", 2),
    ]
