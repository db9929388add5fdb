"""The options of a load test: arguments that are added to Locust's, and the value that they become."""

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
"""Maximum number of users of a run. Each is a greenlet with its own stack."""
KEYS_MAX = 100_000_000
"""Maximum number of keys. A chooser's table has 8 bytes for each key in each process."""
ON_PAGES = ("workload", "shape", "rate", "seconds", "warmup", "p99_ms")
"""Options that Locust's pages show as fields of a new run."""
LEVELS = tuple(level.name.lower() for level in Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run. Rates are for the whole run, over all workers. Times are in seconds."""

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
            f"--{name.replace('_', '-')}: expected a number above 0 and below infinity, got {value}"
            for name, value in asdict(self).items()
            if name in ("rate", "rate_per_user", "seconds", "keys") and not 0 < value < inf
        ]
        if not wrong and self.rate > USERS_MAX * self.rate_per_user:
            want = f"expected at most {USERS_MAX:,} users of --rate-per-user {self.rate_per_user:g}"
            wrong.append(f"--rate: {want}, got {self.rate:g}/s")
        if self.keys > KEYS_MAX:
            wrong.append(f"--keys: expected at most {KEYS_MAX:,}, got {self.keys:,}")
        wrong += [
            f"--{name.replace('_', '-')}: expected 0 to 1, got {value:g}; 0.05 is 5 %"
            for name, value in asdict(self).items()
            if name in ("errors_max", "achieved_min") and not 0 <= value <= 1
        ]
        if not 0 <= self.warmup < self.seconds:
            wrong.append(f"--warmup: expected 0 up to but not including --seconds, got {self.warmup:g}")
        if self.shape not in shapes.NAMES:
            wrong.append(f"--shape: expected one of {', '.join(shapes.NAMES)}, got {self.shape!r}")
        if self.level not in LEVELS:
            wrong.append(f"--level: expected one of {', '.join(LEVELS)}, got {self.level!r}")
        paths = {"data-dir": self.data_dir, "report": self.report, "baseline": self.baseline or ""}
        wrong += [f"--{name}: {fault}" for name, place in paths.items() if (fault := fault_of(place))]
        wrong += [
            f"--{name}: expected no user or password here, because process lists and the report show them; "
            "set KVSTORE_USER and KVSTORE_PASSWORD_FILE, or KVSTORE_TOKEN_FILE, in the environment"
            for name, text in (("store", self.store), ("resp", self.resp))
            if "@" in text
        ]
        if wrong:
            raise ValueError("; ".join(wrong))  # before a message repeats a password
        for name, check, text in (("p99-ms", p99_goals, self.p99_ms), ("resp", _addresses, self.resp)):
            try:
                check(text)
            except ValueError as error:
                wrong.append(f"--{name}: {error}")
        if not self.report.name or self.report.suffix == ".json":
            wrong.append(
                f"--report: expected an HTML file, got {self.report}; the figures are written beside it as .json"
            )
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def figures(self) -> Path:
        """The file of the report's figures."""
        return self.report.with_suffix(".json")

    @property
    def workloads(self) -> list[Workload]:
        """The workloads. A knee uses even arrivals, so that chance does not look like a missed rate. Raises
        ValueError."""
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
        """True if only Redis endpoints are named: those of any cluster, or of Redis itself."""
        return bool(self.resp) and not self.store

    @property
    def cluster(self) -> str:
        """The cluster as one string, for another process."""
        return json.dumps({"store": self.store, "data_dir": str(self.data_dir)})

    @staticmethod
    def of_cluster(word: str) -> Options:
        found = json.loads(word)
        return Options(store=found["store"], data_dir=Path(found["data_dir"]))

    def client_config(self) -> ClientConfig:
        """Return the client's configuration. Raises ValueError, OSError."""
        if self.store:
            return parse_url(self.store)
        record = self._record()
        endpoints = tuple(node["grpc"] for node in record["nodes"])
        return ClientConfig(endpoints=endpoints, cluster=record.get("instance", ""))

    def resp_nodes(self) -> list[str]:
        """Return the Redis endpoints. Raises ValueError, OSError."""
        if self.resp:
            return _addresses(self.resp)
        return [] if self.store else [node["resp"] for node in self._nodes()]

    def node_ids(self) -> list[str]:
        return [node["id"] for node in self._nodes()]

    def check_paths(self) -> None:
        """Raise ValueError if the report cannot be written or the baseline cannot be read. Not needed in a worker."""
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
                raise ValueError(f"--baseline: {error}; pass --baseline '' to compare with none") from None

    @property
    def pulse_folder(self) -> Path:
        """A folder on the store's disk if the store is local, otherwise the report's folder."""
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
            raise ValueError(f"no cluster at {path}; start one with `kvstore up`, or name one with --store") from None
        if document.get("secure"):
            raise ValueError(
                f"the cluster in {self.data_dir} is secure; run `. client.env`, name GrpcUser, and pass --store "
                "'kvs://HOST:PORT,…?ca=…&cert=…&key=…', the URL that `kvstore up` prints for Python"
            )
        return document


def _addresses(text: str) -> list[str]:
    """Parse `host:port,host:port`; empty for an empty text. Raises ValueError."""
    found = text.split(",") if text else []
    for each in found:
        split_address(each)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises OSError, and ValueError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in {path}, got {type(found).__name__}")
    return found


def path_word(word: str) -> Path:
    """Parse a path on a command line, for argparse. Raises ArgumentTypeError."""
    if fault := fault_of(word):
        raise ArgumentTypeError(fault)
    return Path(word)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of kvstore to Locust's. Defaults are those of Options."""
    default = Options()
    group = parser.add_argument_group("kvstore options")

    def option(name: str, help_text: str, **more: Any) -> None:
        value = getattr(default, name)
        value = str(value) if isinstance(value, Path) else value  # workers receive options as text and numbers
        if "action" not in more:  # takes no type; Python 3.14 refuses one
            more.setdefault("type", type(value))
        help_line = f"{help_text} Default: {'none' if value == '' else value}"
        action = group.add_argument(f"--{name.replace('_', '-')}", default=value, help=help_line, **more)
        if name in ON_PAGES:  # as LocustArgumentParser.add_argument marks options, which a group does not
            action.include_in_web_ui = True  # type: ignore[attr-defined]

    option(
        "workload",
        f"What users do: one of {', '.join(WORKLOADS)}, or several, comma-separated, assigned to users in turn.",
    )
    option("shape", f"How the rate changes during the run: {', '.join(shapes.NAMES)}.")
    option("rate", "Operations per second of all users together, rounded up to whole users; a knee starts here.")
    option("rate_per_user", "Operations per second of one user; a lower number makes more users for the same rate.")
    option("seconds", "Length of the run in seconds, including the warm-up.")
    option("warmup", "Length of the warm-up in seconds: it is in the timeline, but in no table.")
    option("keys", "Number of records that are written before the run for the users to work on.")
    option(
        "keys_by",
        "How keys are chosen, instead of the workload's setting: uniform, zipfian[:constant], latest[:constant], "
        "hotset[:hot:wanted].",
    )
    option(
        "value_size",
        "Sizes of values in bytes, instead of the workload's setting: 100, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, "
        "mix:100=90,10000=10.",
    )
    option("level", f"Consistency level of reads through gRPC: {', '.join(LEVELS)}.")
    option("seed", "Seed for operations, keys and sizes; the same seed repeats them.")
    option("prefix", "Prefix of all keys.")
    option(
        "preload",
        "Write the records before the run; --no-preload uses the records of an earlier run.",
        action=BooleanOptionalAction,
    )
    option("store", "Cluster to load, instead of --data-dir: kv://host:port,host:port.")
    option("resp", "The cluster's Redis endpoints: host:port,host:port. Without --store, only these are used.")
    option("data_dir", "Directory of a local cluster, made by `kvstore up`; chaos needs one.")
    option("errors_max", "Maximum share of failed operations, 0 to 1 (0.05 is 5 %%). Above it, the run fails.")
    option("achieved_min", "Minimum share of due operations that are done, 0 to 1. Below it, the run fails.")
    option(
        "p99_ms",
        "Maximum 99th percentile in milliseconds: 50, or per operation, including those of custom users: "
        "read=20,update=50; or both: read=20,50. Above it, the run fails.",
    )
    option("report", "HTML file of the report; the figures are written beside it as JSON.")
    group.add_argument(
        "--baseline", default="", help="Baseline file to compare with; a figure that got worse fails the run."
    )


def options_of(parsed: Namespace) -> Options:
    """Return the options of a parsed command line. Raises ValueError."""
    values = {field.name: getattr(parsed, field.name) for field in fields(Options)}
    for name in ("data_dir", "report"):
        values[name] = Path(values[name])
    values["baseline"] = Path(values["baseline"]) if values["baseline"] else None
    return Options(**values)
