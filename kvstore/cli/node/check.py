"""`kvstore node check`: checks a node's file, and the files that it names on this machine, before the node is
started."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from kvstore import config as toml
from kvstore.cli.cluster import Json, checked_path
from kvstore.cli.node.advice import advice
from kvstore.cli.node.toml_lines import line_of, lines_of
from kvstore.cli.output import as_json
from kvstore.config import Fault, Setting
from kvstore.env.certificates import WARN_S, Certificates
from kvstore.env.files.write_trial import WriteFault, nearest, write_fault
from kvstore.env.secret import read_secret
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError, StoreError
from kvstore.server.config import STATES, NodeConfig, Role
from kvstore.server.processes import split

FILE_BYTES_MAX = 1 << 20
MEMORY_SHARE_MAX = 0.5
"""Maximum share of the machine's memory for engines. The file cache and the rest of the process need the other half."""


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Override a setting of the file; may be repeated"),
]


class ConfigFinding(NamedTuple):
    """One finding of the check."""

    line: int | None
    """Line number from 1; None if no line fits, as for a missing setting."""
    weight: Literal["fault", "warning"]
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """The result of checking a file."""

    config: NodeConfig | None
    """None if the file has faults of form; then nothing else was checked."""
    findings: list[ConfigFinding]

    def count(self, weight: str) -> int:
        return sum(each.weight == weight for each in self.findings)


def check(
    config: Annotated[Path, typer.Option(callback=checked_path, help="The node's TOML file")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Check for a node that is started with --insecure")
    ] = False,
    settings: Settings = None,
    only_file: Annotated[
        bool, typer.Option("--only-file", help="Do not check what the file names: secrets, certificates, directories")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too")] = False,
    json: Json = False,
) -> None:
    """Check a node's file: report all faults by line, and warn of unsafe or odd settings. Starts nothing."""
    checked = checked_file(config, settings_of(settings, insecure=insecure), only_file=only_file)
    found = checked.findings
    if json:
        print(as_json({"file": str(config), "findings": [each._asdict() for each in found]}))
    else:
        for each in found:
            place = f"{config}:{each.line}" if each.line else str(config)
            print(": ".join(part for part in (place, each.weight, each.name, each.text) if part))
        node = checked.config
        who = "" if node is None else f" node {node.id}, {' and '.join(node.plays)}:"
        faults, warnings = checked.count("fault"), checked.count("warning")
        print(f"{config}:{who} {_counted(faults, 'fault')}, {_counted(warnings, 'warning')}")
    if checked.count("fault") or (strict and found):
        raise typer.Exit(1)


def settings_of(texts: Sequence[str] | None, *, insecure: bool) -> list[Setting]:
    """Return the settings of a command line. Raises ConfigError."""
    return [*map(toml.setting, texts or ()), *([Setting("insecure", True)] if insecure else [])]


def checked_file(path: Path, settings: Sequence[Setting], *, only_file: bool) -> CheckedConfig:
    """Check a file, and unless `only_file` also what it names. Raises ConfigError for a file that cannot be read or is
    not TOML; then the error names the line."""
    if path.exists() and path.stat().st_size > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: expected at most {FILE_BYTES_MAX} bytes, got {path.stat().st_size}")
    text = toml.text_of(path)
    table = toml.with_settings(toml.parse(text, path), settings)
    lines = lines_of(text)
    config, faults = toml.build_or_faults(table, NodeConfig)
    warnings: list[Fault] = []
    if config is not None:
        retired = [Fault(name, text) for name, text in NodeConfig.RETIRED.items() if name in table]
        processes, faults = split(config)
        warnings = [*retired, *advice(config)]
        if not only_file:
            faults += faults_around(config, processes)
            warnings += warnings_around(config, processes)
    findings = [ConfigFinding(line_of(each.name, lines), "fault", *each) for each in faults]
    findings += [ConfigFinding(line_of(each.name, lines), "warning", *each) for each in warnings]
    return CheckedConfig(config, sorted(findings, key=lambda each: (each.line or 0, each.weight)))


def faults_around(config: NodeConfig, processes: Sequence[NodeConfig]) -> list[Fault]:
    """Return what prevents the processes of this file from starting on this machine as this user."""
    found = [
        *_tried("secret_file", lambda: read_secret(config.secret_file)),
        *_tried("metadata.password_file", config.metadata_login),
        *_tried("metadata", lambda: config.metadata_tls and config.metadata_tls.client_context()),
    ]
    found += _traces_faults(config)
    if config.tls.serves:
        found += _tried("tls", lambda: _certificates_fit(config.tls))
    return found + [Fault(name, str(fault)) for name, fault in _write_faults(processes) if not fault.is_full]


def _write_faults(processes: Sequence[NodeConfig]) -> Iterator[tuple[str, WriteFault]]:
    """Yield faults of the directories that the processes write to. Each directory is tried once."""
    tried = set[Path]()
    for name, place in (each for config in processes for each in _places(config)):
        if place.absolute() not in tried:
            tried.add(place.absolute())
            if fault := write_fault(place):
                yield name, fault


def _places(config: NodeConfig) -> Iterator[tuple[str, Path]]:
    """Yield the directories that the node writes to, with the names of their settings."""
    yield "data_dir", config.data_dir
    if config.log_dir is not None:
        yield "log_dir", config.log_dir
    if Role.SERVER in config.plays:
        yield "data_dir", config.data_dir / STATES
    if Role.BOOKIE in config.plays:
        storage = config.storage
        yield "storage.index_dir", config.data_dir / storage.index_dir
        name = "journal_dirs" if storage.journal_dirs else "journal_dir"
        for each in _in_use(storage.directories, config):
            yield f"storage.{name}", config.data_dir / each


def _traces_faults(config: NodeConfig) -> Iterator[Fault]:
    """Yield why the node's traces do not open. The error names the setting."""
    if not config.tracing.endpoint:
        return
    from kvstore.server.tracing.open import check_traces

    try:
        check_traces(config.tracing)
    except ConfigError as error:
        name, _, text = str(error).partition(": ")
        yield Fault(name, text)


def warnings_around(config: NodeConfig, processes: Sequence[NodeConfig]) -> Iterator[Fault]:
    """Yield what will fail or be slow on this machine later. A full disk does not prevent a node from starting."""
    yield from (Fault(name, str(fault)) for name, fault in _write_faults(processes) if fault.is_full)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.partition.memory_bytes > memory * MEMORY_SHARE_MAX:
        yield Fault("partition.memory_bytes", f"more than half of this machine's memory, {memory} bytes")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 2 * config.limits.connections_max:
        limits = config.limits.within(files)
        yield Fault(
            "limits.connections_max",
            f"{files} open files, the limit of this shell, suffice for {limits.connections_max} connections; raise the "
            "limit (`ulimit -n`, LimitNOFILE)",
        )
    if config.tls.serves:
        try:
            left_s = Certificates(config.tls).left_s
        except OSError:
            return  # already reported as a fault
        if 0 < left_s < WARN_S:
            yield Fault("tls.cert", f"expires in {int(left_s // 86_400)} days")
    yield from _shared_disks(config)


def _shared_disks(config: NodeConfig) -> Iterator[Fault]:
    disks: dict[int, str] = {}
    for each in _in_use(config.storage.journal_dirs, config):
        try:
            device = nearest(config.data_dir / each).stat().st_dev
        except OSError:
            continue  # already reported as a fault
        other = disks.setdefault(device, each)
        if other != each:
            yield Fault(
                "storage.journal_dirs", f"{each} is on the same file system as {other}, so both are lost together"
            )


def _certificates_fit(tls: Tls) -> None:
    """Check the certificates. Raises OSError, ConfigError."""
    if fault := Certificates(tls).fault():
        raise ConfigError(fault)


def _in_use(directories: Sequence[str], config: NodeConfig) -> list[str]:
    """Return the directories that are not listed as lost. The node ignores lost ones, and may start without them."""
    return [each for each in directories if each not in config.storage.lost_dirs]


def _tried(name: str, use: Callable[[], object]) -> Iterator[Fault]:
    try:
        use()
    except (StoreError, OSError) as error:
        yield Fault(name, str(error))


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"
