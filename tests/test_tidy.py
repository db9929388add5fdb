"""The house rules a machine can check. A new rule comes with its check; a limit on old code enters as a ratchet."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests.source import LOCUST, ROOT, Source, each_of, import_cycle_or_none, import_graph, sources, tracked_texts

# Each line imports only lines below it. Packages of one line never import each other, except in the last.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("spark",),
    ("loadtest",),  # except for the users and the Locust file, nothing here needs Locust
    ("devcluster",),  # needed by `up`, not by a node
    ("server",),
    ("client", "partition", "autorecovery"),
    ("wal", "bookie"),
    ("meta", "ring"),
    ("rpc",),
    ("access", "namespaces", "proto", "env", "config", "backoff"),
    (
        *("types", "errors", "extras", "limits", "coordination_keys", "os_errors", "places", "ranges"),
        *("standard_streams", "tables", "versions"),
    ),
)
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
FORBIDDEN = {("client", "meta")}  # applications install the client without ZooKeeper's

# Files that only decide: values in, values out. Most say so in their docstring; these are too plain to say it.
DECIDING = {
    "kvstore/types.py",
    "kvstore/errors.py",
    "kvstore/limits.py",
    "kvstore/backoff.py",
    *(f"kvstore/{package}/config.py" for package in ("bookie", "partition")),
    *(f"kvstore/meta/{name}.py" for name in ("codec", "paths")),
    "kvstore/partition/state/commands.py",
}
DECIDES = re.compile(r"\bDecides\s+only\b|\bPure\b(?! (except|except) )")
DOING = {
    *("asyncio", "grpc", "kazoo", "os", "random", "rocksdict", "secrets", "selectors", "socket", "subprocess"),
    *("threading", "time", "uuid", "uvloop"),
}

# Calls that make two runs of one seed differ. The env ports offer each of them in a form the simulation can repeat.
NONDETERMINISTIC = re.compile(
    r"asyncio\.(TaskGroup|wait|as_completed|create_task|ensure_future|gather)"
    r"|.*loop\.create_task"
    r"|time\..+|random\.(?!Random$).+|secrets\..+|uuid\.uuid[14]|os\.(urandom|getrandom)"
    r"|datetime\.(datetime\.|date\.)?(now|utcnow|today)"
)
# The adapters that touch the real world: ports, real processes, foreign threads.
ADAPTERS = (
    "kvstore/__main__.py",
    "kvstore/cli/",
    "kvstore/devcluster/",
    "kvstore/env/",
    "kvstore/loadtest/",
    "kvstore/meta/etcd/",
    "kvstore/meta/zookeeper/acls.py",
    "kvstore/meta/zookeeper/session.py",
    "kvstore/meta/zookeeper/store.py",
    "kvstore/server/host.py",
    "kvstore/spark/",
)
# Simulations sleep in virtual time; tests of real processes wait with waiting.py; the last measures pauses.
SLEEPERS = ("tests/sim/", "tests/waiting.py", "tests/loadtest/generator/stalled_users.py")

# Names are looked up in one place, with a time limit. These files get addresses.
LOOKUPS = re.compile(r"(.+\.)?(getaddrinfo|gethostby\w+|create_connection|open_connection|(in)?secure_channel)")
GIVEN_ADDRESSES = (
    "kvstore/cli/cluster.py",
    "kvstore/devcluster/",  # on loopback
    "kvstore/env/accepting.py",
    "kvstore/env/death/watcher.py",  # in threads of a process that is about to end
    "kvstore/env/dns/names.py",
    "kvstore/env/preludes.py",
    "kvstore/env/transport.py",
    "kvstore/loadtest/generator/sidecar.py",  # a socket that it receives
    "kvstore/loadtest/generator/resp_wire.py",
    "kvstore/loadtest/resp.py",
    "kvstore/meta/zookeeper/session.py",
    "kvstore/rpc/channels.py",
    "kvstore/rpc/front.py",  # loopback
)

# These may not depend on one machine's wall clock, except for the clock judge and for times shown to people.
GO_BY_DATES = ("kvstore/partition/", "kvstore/server/", "kvstore/wal/")
READ_WALL_CLOCKS = {
    *(
        f"kvstore/server/{name}.py"
        for name in ("clock/clock_judge", "clock/clock_sync", "fsck/check", "http/last_snapshot")
    ),
    "kvstore/partition/leading/record_time.py",
}


def kvstore() -> list[Source]:
    return sources("kvstore")


def package_faces() -> list[Source]:
    return [file for file in kvstore() if file.path.endswith("/__init__.py")]


@each_of(lambda: [file for file in kvstore() if file.module != "kvstore"])
def test_imports_point_down_the_layers(file: Source) -> None:
    part = file.module.split(".")[1]
    assert part in DEPTH, f"say in LAYERS where kvstore.{part} stands"
    for each in file.imports:
        names = [*each.module.split("."), each.name]
        target = names[1] if each.top == "kvstore" else part
        if target == part:
            continue
        where = f"{file.path}:{each.line} imports kvstore.{target}"
        assert target in DEPTH, where
        assert DEPTH[target] > DEPTH[part] or DEPTH[part] == len(LAYERS) - 1, f"{where}, which is not below"
        assert (part, target) not in FORBIDDEN, where


def test_modules_have_no_import_cycle() -> None:
    assert import_cycle_or_none(import_graph(kvstore(), also_for_types=True)) is None


def test_packages_have_no_import_cycle() -> None:
    """Modules beside packages of their package (app, config and others of the server) each count as one."""
    faces = package_faces()
    files = [file for file in kvstore() if file not in faces]
    packages = {face.module for face in faces}
    split = {name.rpartition(".")[0] for name in packages}

    def package_of(module: str) -> str:
        package = module.rpartition(".")[0]
        return module if package in split else package

    graph: dict[str, set[str]] = {}
    for module, targets in import_graph(files, also_for_types=True).items():
        inside = graph.setdefault(package_of(module), set())
        inside |= {package_of(target) for target in targets} - {package_of(module)}
    assert import_cycle_or_none(graph) is None


@each_of(package_faces)
def test_package_init_only_re_exports(file: Source) -> None:
    for node in file.tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert is_docstring or is_all or isinstance(node, ast.ImportFrom), f"{file.path}:{node.lineno}"


def is_deciding(file: Source) -> bool:
    return file.path in DECIDING or DECIDES.search(file.docstring) is not None


def test_list_of_deciding_modules_is_complete_and_not_redundant() -> None:
    silent = {file.path for file in kvstore() if DECIDES.search(file.docstring) is None}
    assert sorted(DECIDING - silent) == []


@each_of(lambda: [file for file in kvstore() if is_deciding(file)])
def test_deciding_modules_do_no_io(file: Source) -> None:
    assert [f"{each.module}, line {each.line}" for each in file.imports if each.at_run_time and each.top in DOING] == []


def unrepeatable(file: Source) -> Iterator[str]:
    for name, node in file.uses():
        if NONDETERMINISTIC.fullmatch(name):
            yield f"{file.path}:{node.lineno} {name}"
    for node in file.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in {"Random", "random.Random"} and not node.args:
            yield f"{file.path}:{node.lineno} a Random without a seed"
        if called == "asyncio.Queue" and not (node.args or node.keywords):
            yield f"{file.path}:{node.lineno} a queue without a bound"
        if called == "hash":
            yield f"{file.path}:{node.lineno} hash() differs from process to process"
        if called.endswith("loop().create_task"):
            yield f"{file.path}:{node.lineno} {called}"


@each_of(lambda: [file for file in kvstore() if not file.path.startswith(ADAPTERS)])
def test_only_adapters_use_nondeterminism(file: Source) -> None:
    assert list(unrepeatable(file)) == []


@each_of(lambda: [file for file in kvstore() if not file.path.startswith(GIVEN_ADDRESSES)])
def test_host_names_are_resolved_in_one_place(file: Source) -> None:
    calls = [node for node in file.nodes if isinstance(node, ast.Call)]
    found = [call.lineno for call in calls if LOOKUPS.fullmatch(ast.unparse(call.func))]
    assert found == [], "see kvstore/env/dns/names.py"


def reads_of_wall_clocks(file: Source) -> Iterator[int]:
    yield from (node.lineno for node in file.nodes if isinstance(node, ast.Attribute) and node.attr == "wall_ms")


@each_of(lambda: [file for file in kvstore() if file.path.startswith(GO_BY_DATES)])
def test_code_that_decides_by_a_date_uses_the_judged_one(file: Source) -> None:
    """docs/protocol.md, P28."""
    if file.path not in READ_WALL_CLOCKS:
        assert list(reads_of_wall_clocks(file)) == [], "ask the clock for date_ms, or to remove something for passed_ms"


@each_of(lambda: [file for file in sources("tests") if not file.path.startswith(SLEEPERS)])
def test_tests_do_not_sleep(file: Source) -> None:
    """asyncio.sleep(0) lets others run and is no sleep."""
    calls = (node for node in file.nodes if isinstance(node, ast.Call))
    spelled = {node: name for name, node in file.uses()}
    slept = [c for c in calls if spelled.get(c.func) in {"time.sleep", "asyncio.sleep", "gevent.sleep"}]
    assert [call.lineno for call in slept if ast.unparse(call.args[0]) != "0"] == [], "see tests/waiting.py"


@each_of(lambda: [file for file in sources("tests") if file.path != "tests/beside.py"])
def test_threads_of_tests_end_with_a_block(file: Source) -> None:
    """A thread that outlived a failed test would disturb later tests."""
    spelled = {node: name for name, node in file.uses()}
    blocks = (node.items for node in file.nodes if isinstance(node, ast.With | ast.AsyncWith))
    ending = {item.context_expr for items in blocks for item in items}
    calls = [node for node in file.nodes if isinstance(node, ast.Call) and node not in ending]
    bases = [base for node in file.nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    threads = {"threading.Thread", "threading.Timer", "concurrent.futures.ThreadPoolExecutor"}
    used = [each for each in (*(call.func for call in calls), *bases) if spelled.get(each) in threads]
    assert [each.lineno for each in used] == [], "see tests/beside.py"


@each_of(lambda: sources("kvstore", "tests", "loadtest"))
def test_processes_are_prepared_by_a_shell(file: Source) -> None:
    """Between fork and exec of `preexec_fn`, gRPC's fork handlers run, and abort now and then."""
    keywords = (node for node in file.nodes if isinstance(node, ast.keyword))
    assert [each.lineno for each in keywords if each.arg == "preexec_fn"] == [], "see tests/shell.py"


@each_of(kvstore)
def test_started_pythons_do_not_import_from_the_current_directory(file: Source) -> None:
    """`-m` alone puts it first in the path: a user's `http.py` replaced the library's module in each node."""
    lists = (node.elts for node in file.nodes if isinstance(node, ast.List))
    calls = (node.args for node in file.nodes if isinstance(node, ast.Call))
    words = ([ast.unparse(each) for each in some] for some in (*lists, *calls))
    started = (some for some in words if "sys.executable" in some)
    assert [some for some in started if "'-m'" in some] == [], "-Pm"


PATCHED = {f"tests.loadtest.generator.{name}_users" for name in ("stalled", "broken", "own", "patient")}
"""These files run as separate processes."""


def test_no_test_imports_locust() -> None:
    """Locust patches the standard library of its process, in which all later tests would run."""
    files = sources("kvstore", "loadtest", "tests")
    graph = import_graph(files)
    patching = {file.module for file in files for each in file.imports if each.at_run_time and each.top == "locust"}
    while importers := {module for module, imported in graph.items() if imported & patching} - patching:
        patching |= importers
    assert {module for module in patching if module.startswith("tests.")} == PATCHED
    assert {module for module in patching if module.startswith("kvstore.")} == LOCUST


@each_of(lambda: sources("tests"))
def test_every_definition_in_tests_is_used(file: Source) -> None:
    """A scene that no test plays passes whatever the code does."""
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            unused = [each.name for each in inner if each.name not in used and not each.decorator_list]
            assert unused == [], f"{file.path}: {node.name} defines what it never uses"


CLIPPED = re.compile(r"(Who|Whoever|Whose|What|Which)\b")
NO_NOUN = re.compile(r"(Of|Those|That of|All of|To be)\b|(One|Each) \w+'s[.,;]")
"""Starts of class docstrings that state the owner instead of what the class is."""


@each_of(kvstore)
def test_docstring_begins_with_verb_or_noun(file: Source) -> None:
    """The docstring of a module, class or function states what it does, or names what it is."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in file.nodes if isinstance(node, documented)]
    clipped = [node for node in nodes if CLIPPED.match(ast.get_docstring(node) or "")]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    clipped += [node for node in classes if NO_NOUN.match(ast.get_docstring(node) or "")]
    assert [f"{file.path}:{getattr(node, 'lineno', 1)}" for node in clipped] == []


NOT_NOUNS = re.compile(r"\w*(Manager|Helper|Utils?|Info)")


@each_of(kvstore)
def test_class_names_say_what_the_class_is(file: Source) -> None:
    classes = (node for node in file.nodes if isinstance(node, ast.ClassDef))
    assert [f"{file.path}:{each.lineno} {each.name}" for each in classes if NOT_NOUNS.fullmatch(each.name)] == []


ACROSS = (
    *("tests/bookie/disks/", "tests/bookie/peers/", "tests/client/behaviour/", "tests/server/redis/behaviour/"),
    "tests/spark/end_to_end/",
    *("tests/cluster/", "tests/interop/", "tests/models/", "tests/monitoring/", "tests/packaging/"),
    *("tests/sim/", "tests/upgrade/"),
    *(f"tests/loadtest/generator/test_{name}.py" for name in ("forks", "locust", "small_redis")),
)
"""Folders and files of tests that have several modules as their subject."""
OF_A_PACKAGE = re.compile(r"conformance(_\w+)?|(\w+_)?mutants")
"""Names of tests of all drivers of a package, and of the mutants that a package's tests have to catch."""


def subjects(path: str) -> Iterator[str]:
    """Yield the modules and packages that a test file may be named after: for tests/wal/test_writer_properties.py
    kvstore/wal/writer_properties and kvstore/wal/writer."""
    _, *folders, name = path.split("/")
    words = name.removeprefix("test_").removesuffix(".py").split("_")
    for count in range(len(words), 0, -1):
        subject = "/".join([*folders, "_".join(words[:count])])
        yield f"kvstore/{subject}"
        yield subject  # of examples/, loadtest/ and scripts/


def test_test_files_are_named_after_what_they_test() -> None:
    """tests/<package>/test_<module>[_<aspect>].py tests a module or package of kvstore/<package>. Tests with several
    subjects have their own folders. Files at the top of tests/ test the repository."""
    code = {path.partition(".")[0] for path in tracked_texts()}
    code |= {str(PurePosixPath(path).parent) for path in code}
    files = [file.path for file in sources("tests") if PurePosixPath(file.path).name.startswith("test_")]
    misplaced = [
        path
        for path in files
        if path.count("/") > 1
        and not path.startswith(ACROSS)
        and not OF_A_PACKAGE.fullmatch(PurePosixPath(path).stem.removeprefix("test_"))
        and code.isdisjoint(subjects(path))
    ]
    assert misplaced == [], "name each after its module, or move it to a folder of ACROSS"
    assert [each for each in ACROSS if not any(path.startswith(each) for path in files)] == []


def test_every_test_folder_is_a_package() -> None:
    """Otherwise two test files of one name collide, and warnings raised in them are no errors."""
    folders = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []

    # Split, so that this file does not find itself.


UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
ABSOLUTE = re.compile(
    r"(?<![\w.~}>)/-])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers")) + r")/?\b"
)


@pytest.mark.parametrize(("what", "banned"), [("unfinished business", UNFINISHED), ("a path of one machine", ABSOLUTE)])
def test_tracked_files_contain_no_forbidden_words(what: str, banned: re.Pattern[str]) -> None:
    found = [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for path, text in tracked_texts().items()
        for match in banned.finditer(text)
    ]
    assert found == [], what
