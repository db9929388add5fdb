"""The helpers of the house rules find what they should."""

from tests.source import Source, import_cycle_or_none, import_graph
from tests.test_tidy import unrepeatable


def module(text: str, path: str = "kvstore/wal/sample.py") -> Source:
    return Source(path, text)


def test_source_resolves_import_aliases_to_full_names() -> None:
    sample = module("import asyncio as a\nfrom asyncio import gather as g\na.wait([])\ng()\nself.loop.create_task(x)\n")
    assert {"asyncio.wait", "asyncio.gather", "self.loop.create_task"} <= {name for name, _ in sample.uses()}


def test_source_finds_calls_that_a_seed_cannot_repeat() -> None:
    lines = [
        *("asyncio.create_task(x)", "time.time()", "random.random()", "uuid.uuid4()", "os.urandom(8)"),
        *("asyncio.Queue()", "Random()", "hash(key)", "asyncio.get_running_loop().create_task(x)", "datetime.now()"),
    ]
    sample = module("import asyncio, os, random, time, uuid\nfrom datetime import datetime\n" + "\n".join(lines))
    found = {each.split(":")[1].split()[0] for each in unrepeatable(sample)}
    assert found == {str(3 + i) for i in range(len(lines))}


def test_source_allows_what_the_ports_offer() -> None:
    sample = module(
        "import asyncio, random\nasync def f(r: random.Random): await asyncio.sleep(r.random())\nRandom(7)\n"
    )
    assert list(unrepeatable(sample)) == []


def test_source_finds_import_cycles_except_type_only_ones() -> None:
    below = module("from kvstore.wal import top\n", "kvstore/wal/below.py")
    top = module("def f():\n    import kvstore.wal.below\n", "kvstore/wal/top.py")
    assert import_cycle_or_none(import_graph([below, top])) == [
        "kvstore.wal.below",
        "kvstore.wal.top",
        "kvstore.wal.below",
    ]
    typed = module("if TYPE_CHECKING:\n    import kvstore.wal.below\n", "kvstore/wal/top.py")
    assert import_cycle_or_none(import_graph([below, typed])) is None


def test_source_names_functions_with_their_scope() -> None:
    assert list(module("class A:\n    def f(self):\n        def g():\n            pass\n").functions) == [
        ("A.f", 3),
        ("A.f.g", 2),
    ]
