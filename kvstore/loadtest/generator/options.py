"""The options of a load test: arguments added to Locust's, and the value that they become."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from kvstore.client import ClientConfig, Level
from kvstore.client.core.config import parse_url
from kvstore.env.files.write_trial import write_fault
from kvstore.env.transport import split_address
from kvstore.loadtest.generator import shapes
from kvstore.loadtest.generator.pacing import EVEN, POISSON
from kvstore.loadtest.generator.workloads import WORKLOADS, Workload, workloads_of
from kvstore.loadtest.report.goals import Goals, p99_goals
from kvstore.places import fault_of

USERS_MAX = 100_000
"""Of a run: each is a greenlet with a stack of its own."""
KEYS_MAX = 100_000_000
"""A chooser's table has 8 bytes for each, in each process."""
LEVELS = tuple(level.name.lower() for level in Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Rates are of the whole run, over all workers. Times are in seconds."""

    workload: str = "ycsb-a"
    shape: str = "steady"
    rate: float = 500.0
    rate_per_user: float = 5.0
    seconds: float = 60.0
    warmup: float = 3.0
    keys: int = 10_000
    keys_by: str = ""
    value_size: str = ""
    level: str = "linearizable"
    seed: int = 1
    prefix: str = "load/"
    preload: bool = True
    store: str = ""
    resp: str = ""
    data_dir: Path = Path("data")
    errors_max: float = 0.01
    achieved_min: float = 0.0
    p99_ms: str = ""
    report: Path = Path("reports/loadtest.html")
    baseline: Path | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"--{name.replace('_', '-')}: want more than 0 and less than infinity, got {value}"
            for name, value in asdict(self).items()
            if name in ("rate", "rate_per_user", "seconds", "keys") and not 0 < value < inf
        ]
        if not wrong and self.rate > USERS_MAX * self.rate_per_user:
            want = f"want at most {USERS_MAX:,} users of --rate-per-user {self.rate_per_user:g}"
            wrong.append(f"--rate: {want}, got {self.rate:g}/s")
        if self.keys > KEYS_MAX:
            wrong.append(f"--keys: want at most {KEYS_MAX:,}, got {self.keys:,}")
        wrong += [
            f"--{name.replace('_', '-')}: want 0 to 1, got {value:g}; 0.05 is 5 %"
            for name, value in asdict(self).items()
            if name in ("errors_max", "achieved_min") and not 0 <= value <= 1
        ]
        if not 0 <= self.warmup < self.seconds:
            wrong.append(f"--warmup: want 0 to less than --seconds, got {self.warmup:g}")
        if self.shape not in shapes.NAMES:
            wrong.append(f"--shape: want one of {', '.join(shapes.NAMES)}, got {self.shape!r}")
        if self.level not in LEVELS:
            wrong.append(f"--level: want one of {', '.join(LEVELS)}, got {self.level!r}")
        paths = {"data-dir": self.data_dir, "report": self.report, "baseline": self.baseline or ""}
        wrong += [f"--{name}: {fault}" for name, place in paths.items() if (fault := fault_of(place))]
        wrong += [
            f"--{name}: want no user or password here, where whoever lists processes or reads the report reads it: "
            "name them by KVSTORE_USER and KVSTORE_PASSWORD_FILE, or KVSTORE_TOKEN_FILE, in the environment"
            for name, text in (("store", self.store), ("resp", self.resp))
            if "@" in text
        ]
        if wrong:
            raise ValueError("; ".join(wrong))  # before anything shows what it was given
        for name, check, text in (("p99-ms", p99_goals, self.p99_ms), ("resp", _addresses, self.resp)):
            try:
                check(text)
            except ValueError as error:
                wrong.append(f"--{name}: {error}")
        if not self.report.name or self.report.suffix == ".json":
            wrong.append(f"--report: want a file for the HTML; the figures go beside it as .json, got {self.report}")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def figures(self) -> Path:
        """Where the report's figures go."""
        return self.report.with_suffix(".json")

    @property
    def workloads(self) -> list[Workload]:
        """Raises ValueError. The knee is looked for with even begins: luck must not look like a rate that is missed."""
        found = workloads_of(self.workload, keys=self.keys_by, sizes=self.value_size)
        if self.shape != "knee":
            return found
        return [replace(each, arrivals=EVEN) if each.arrivals == POISSON else each for each in found]

    @property
    def goals(self) -> Goals:
        return Goals(achieved_min=self.achieved_min, errors_max=self.errors_max, p99_ms=p99_goals(self.p99_ms))

    @property
    def read_level(self) -> Level:
        return Level[self.level.upper()]

    @property
    def is_redis_only(self) -> bool:
        """Only Redis doors are named: of any cluster, or of Redis itself."""
        return bool(self.resp) and not self.store

    @property
    def cluster(self) -> str:
        """The cluster in a word, for another process."""
        return json.dumps({"store": self.store, "data_dir": str(self.data_dir)})

    @staticmethod
    def of_cluster(word: str) -> Options:
        found = json.loads(word)
        return Options(store=found["store"], data_dir=Path(found["data_dir"]))

    def client_config(self) -> ClientConfig:
        """Raises ValueError, OSError."""
        if self.store:
            return parse_url(self.store)
        record = self._record()
        endpoints = tuple(node["grpc"] for node in record["nodes"])
        return ClientConfig(endpoints=endpoints, cluster=record.get("instance", ""))

    def resp_nodes(self) -> list[str]:
        """Raises ValueError, OSError."""
        if self.resp:
            return _addresses(self.resp)
        return [] if self.store else [node["resp"] for node in self._nodes()]

    def node_ids(self) -> list[str]:
        return [node["id"] for node in self._nodes()]

    def check_paths(self) -> None:
        """Raises ValueError if the report cannot be written or the baseline not be read. A worker needs neither."""
        for path in (self.report, self.figures):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                is_new = not path.exists()
                path.open("ab").close()
                if is_new:
                    path.unlink()
            except OSError as error:
                raise ValueError(f"--report: cannot write {path}: {error.strerror}") from None
        if self.baseline is not None:
            try:
                read_json(self.baseline)
            except (OSError, ValueError) as error:
                raise ValueError(f"--baseline: {error}; --baseline '' compares with none") from None

    @property
    def pulse_folder(self) -> Path:
        """On the store's disk if that is here, else on the report's."""
        is_local = not self.store and not self.resp and self.data_dir.is_dir() and write_fault(self.data_dir) is None
        return self.data_dir if is_local else self.report.parent

    def document(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def _nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._record()["nodes"]
        return found

    def _record(self) -> dict[str, Any]:
        path = self.data_dir / "cluster.json"
        try:
            document: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ValueError(f"no cluster at {path}: start one with `kvstore up`, or name one with --store") from None
        if document.get("secure"):
            raise ValueError(
                f"the cluster in {self.data_dir} is secure: name GrpcUser, and its doors by --store "
                "'kvs://HOST:PORT,…?ca=…&cert=…&key=…', as `kvstore up` prints it for Python, after `. client.env`"
            )
        return document


def _addresses(text: str) -> list[str]:
    """`host:port,host:port`; none of an empty text. Raises ValueError."""
    found = text.split(",") if text else []
    for each in found:
        split_address(each)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError, and ValueError for what is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"want an object in {path}, got {type(found).__name__}")
    return found


def path_word(word: str) -> Path:
    """A path on a command line, for argparse. Raises ArgumentTypeError."""
    if fault := fault_of(word):
        raise ArgumentTypeError(fault)
    return Path(word)


def add_options(parser: ArgumentParser) -> None:
    """Add ours to Locust's. Defaults are those of Options."""
    default = Options()
    group = parser.add_argument_group("kvstore options")

    def option(name: str, help_text: str, **more: Any) -> None:
        value = getattr(default, name)
        value = str(value) if isinstance(value, Path) else value  # these travel to workers as text and numbers
        if "action" not in more:  # which takes no type, and from Python 3.14 on refuses one
            more.setdefault("type", type(value))
        told = f"{help_text} Default: {'none' if value == '' else value}"
        group.add_argument(f"--{name.replace('_', '-')}", default=value, help=told, **more)

    option(
        "workload",
        f"What users do: one of {', '.join(WORKLOADS)}, or several, comma-separated, which they take in turn.",
    )
    option("shape", f"How the rate moves during the run: {', '.join(shapes.NAMES)}.")
    option(
        "rate", "Operations per second of all users together, rounded up to whole users; knee begins its search here."
    )
    option("rate_per_user", "Operations per second of one user: a lower number makes more users of the same rate.")
    option("seconds", "How long the run takes, its warm-up included.")
    option("warmup", "So many of the first seconds are in the timeline and in no table.")
    option("keys", "How many records are written before the run, for the users to work on.")
    option(
        "keys_by",
        "How keys are chosen, instead of the workload's way: uniform, zipfian[:constant], latest[:constant], "
        "hotset[:hot:wanted].",
    )
    option(
        "value_size",
        "Sizes of values in bytes, instead of the workload's: 100, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, "
        "mix:100=90,10000=10.",
    )
    option("level", f"How fresh reads through gRPC must be: {', '.join(LEVELS)}.")
    option("seed", "Draws operations, keys and sizes: the same seed draws the same ones again.")
    option("prefix", "What all keys begin with.")
    option(
        "preload",
        "Write the records before the run; --no-preload works on those of an earlier run.",
        action=BooleanOptionalAction,
    )
    option("store", "The cluster, instead of --data-dir: kv://host:port,host:port.")
    option("resp", "The cluster's Redis doors: host:port,host:port. Without --store only these are used.")
    option("data_dir", "The directory of a local cluster, as `kvstore up` makes it; chaos needs one.")
    option("errors_max", "The share of operations that may fail, 0 to 1: 0.05 is 5 %%. Beyond it the run fails.")
    option("achieved_min", "The share of due operations that must be done, 0 to 1. Below it the run fails.")
    option(
        "p99_ms",
        "Milliseconds that the 99th percentile may be: 50, or by operation, those of users of one's own too: "
        "read=20,update=50; or both: read=20,50. Beyond it the run fails.",
    )
    option("report", "Where the HTML goes; the figures go beside it as JSON.")
    group.add_argument("--baseline", default="", help="Compare with this file; a figure that has fallen fails the run.")


def options_of(parsed: Namespace) -> Options:
    """Raises ValueError."""
    values = {field.name: getattr(parsed, field.name) for field in fields(Options)}
    for name in ("data_dir", "report"):
        values[name] = Path(values[name])
    values["baseline"] = Path(values["baseline"]) if values["baseline"] else None
    return Options(**values)
