"""Files for running nodes: they use existing commands and valid settings, and their ports and paths fit each
other."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore import config as toml
from kvstore.__main__ import plain_node_run
from kvstore.cli.node.advice import advice
from kvstore.cli.snapshot_nightly import OUTCOMES
from kvstore.env.tls import Tls
from kvstore.server.config import NodeConfig
from kvstore.server.http import listener
from kvstore.server.node import FILES_MIN, STOP_TIMEOUT_S
from kvstore.server.processes import clashes
from tests.beside import served
from tests.certificates import Files
from tests.cli.test_main_help import TREE
from tests.source import ROOT
from tests.waiting import wait_until_blocking

PACKAGING = ROOT / "packaging"
USER = 10001
PORTS = {"bookie": 3181, "resp": 6401, "grpc": 7401, "http": 8401}
DOCKERFILE = (PACKAGING / "container" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((PACKAGING / "compose" / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((PACKAGING / "kubernetes" / "kvstore.yaml").read_text()))
UNIT = (PACKAGING / "systemd" / "kvstore-node.service").read_text()
GUIDES = ROOT / "docs" / "how-to"
SYSTEMD = (GUIDES / "install-with-systemd.md").read_text()
HEALTH = "/opt/kvstore/share/health.py"
NODES = {name: each for name, each in COMPOSE["services"].items() if re.fullmatch(r"n\d", name)}


def kind(name: str, of: str = "kvstore") -> dict[str, Any]:
    (found,) = [each for each in KUBERNETES if each["kind"] == name and each["metadata"]["name"] == of]
    return found


POD = kind("StatefulSet")["spec"]["template"]["spec"]
NODE = POD["containers"][0]
JOB = kind("Job", "kvstore-init")["spec"]["template"]["spec"]


def directives(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def instruction(name: str) -> list[Any]:
    """Return the words of an instruction of the image's last stage that is written as a list."""
    found = re.findall(rf"^(?:.* )?{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return list(json.loads(found[-1]))


def config_of(words: Sequence[str], file: str) -> NodeConfig:
    """Return the configuration with which a command starts a node. Fails if it is no such command."""
    found = plain_node_run(words)
    assert found is not None, words
    path, settings = found
    assert path == Path("/etc/kvstore/node.toml")
    config, faults = toml.build_or_faults(toml.with_settings(tomllib.loads(file), settings), NodeConfig)
    assert faults == []
    assert config is not None
    assert clashes([config]) == []
    assert {name: int(each.rpartition(":")[2]) for name, each in config.listeners().items()} == PORTS
    assert config.data_dir == Path("/var/lib/kvstore")
    return config


def known(words: Sequence[str]) -> None:
    """Parse a command line. Fails for commands and options that do not exist."""
    path = tuple(words[: next((at for at, word in enumerate(words) if word.startswith("-")), len(words))])
    assert path in TREE
    options = {option for each in TREE[path].params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_image_runs_a_node_as_an_unprivileged_user() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert f"USER {USER}:{USER}\n" in last
    assert last.index("useradd") < last.index("USER ")
    assert sorted(map(int, re.findall(r"^EXPOSE (.*)$", last, re.MULTILINE)[0].split())) == sorted(PORTS.values())
    assert instruction("ENTRYPOINT") == ["kvstore"]
    assert plain_node_run(instruction("ENTRYPOINT")[1:] + json.loads(re.findall(r"^CMD (.*)$", last, re.MULTILINE)[0]))
    assert "STOPSIGNAL SIGTERM" in last
    assert f"COPY packaging/container/health.py {HEALTH}\n" in last
    assert f'CMD ["python", "{HEALTH}", "/healthz"]' in last


def test_files_copied_into_the_image_exist_and_are_not_ignored() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert {word for word in copied if not (ROOT / word).exists()} == set()
    assert set(copied) == let_in


def test_compose_nodes_have_distinct_names_volumes_and_ports() -> None:
    file = (PACKAGING / "compose" / "node.toml").read_text()
    ports = [port for each in NODES.values() for port in each["ports"]]
    assert len(NODES) == 3
    assert len(set(ports)) == len(ports) == 6
    for name, service in NODES.items():
        config = config_of(service["command"], file)
        assert (config.id, config.advertise) == (name, name)
        assert [each.name for each in advice(config) if each.name != "zookeeper"] == ["insecure"], "a toy's"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "which only this machine reaches"
        mounts = dict(each.split(":")[:2] for each in service["volumes"])
        assert mounts[name] == str(config.data_dir)
        assert str(config.secret_file).startswith(mounts["secret"] + "/")
        assert float(service["stop_grace_period"].rstrip("s")) > STOP_TIMEOUT_S
        assert service["ulimits"]["nofile"] > FILES_MIN
        assert service["healthcheck"]["test"] == ["CMD", "python", HEALTH, "/readyz"]
    assert {each.split(":")[0] for each in NODES["n1"]["volumes"]} - {"./node.toml"} <= COMPOSE["volumes"].keys()


def test_compose_founds_the_cluster_that_its_nodes_expect() -> None:
    words = COMPOSE["services"]["found"]["command"]
    known(words)
    options = list(pairwise(words))
    table = tomllib.loads((PACKAGING / "compose" / "node.toml").read_text())
    assert [value for name, value in options if name == "--node"] == list(NODES)
    assert dict(options)["--zookeeper"] == table["zookeeper"]
    assert dict(options)["--secret-file"] == table["secret_file"]


def test_pod_runs_a_node_that_is_found_by_its_name() -> None:
    names = {"POD_NAME": "kvstore-2", "POD_NAMESPACE": "store"}
    assert {each["name"] for each in NODE["env"]} == set(names)
    words = [re.sub(r"\$\((\w+)\)", lambda found: names[found[1]], word) for word in NODE["args"]]
    config = config_of(words, kind("ConfigMap")["data"]["node.toml"])
    service = kind("StatefulSet")["spec"]["serviceName"]
    assert kind("Service", service)["spec"]["clusterIP"] == "None"
    assert config.id == "kvstore-2"
    assert config.advertise == f"kvstore-2.{service}.store.svc.cluster.local"
    assert advice(config) == []
    assert not config.insecure
    assert {each["name"]: each["containerPort"] for each in NODE["ports"]} == PORTS
    mounts = {each["mountPath"] for each in NODE["volumeMounts"]}
    assert config.tls.ca is not None
    assert {str(config.data_dir), str(config.secret_file.parent), str(config.tls.ca.parent), "/etc/kvstore"} == mounts
    assert not any(one != other and one.startswith(f"{other}/") for one in mounts for other in mounts), (
        "none in another"
    )
    volumes = {each["name"] for each in POD["volumes"]}
    volumes |= {each["metadata"]["name"] for each in kind("StatefulSet")["spec"]["volumeClaimTemplates"]}
    containers = [*POD["initContainers"], NODE]
    assert {each["name"] for one in containers for each in one["volumeMounts"]} == volumes
    assert POD["terminationGracePeriodSeconds"] > STOP_TIMEOUT_S


def test_pod_probes_name_existing_pages() -> None:
    probes = {name: NODE[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {each["scheme"] for each in probes.values()} == {"HTTPS"}
    assert {name: each["path"] for name, each in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    source = Path(listener.__file__).read_text()
    assert all(f'"{each["path"]}"' in source for each in probes.values())


def test_containers_have_minimal_privileges() -> None:
    for pod in (POD, JOB):
        assert pod["automountServiceAccountToken"] is False
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, USER, USER)
        for each in [*pod["initContainers"], *pod["containers"]]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_finished_job_is_removed_so_that_the_file_can_be_applied_again() -> None:
    assert kind("Job", "kvstore-init")["spec"]["ttlSecondsAfterFinished"] > 0


def test_image_supports_tracing() -> None:
    """An endpoint alone enables traces. Without their packages the node would not start."""
    pinned = (ROOT / "requirements-node.lock").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["optional-dependencies"]["tracing"]:
        assert re.search(rf"^{re.split('[>=<]', line)[0]}==", pinned, re.MULTILINE), line
    assert "-r requirements-node.lock" in DOCKERFILE


def test_systemd_unit_lets_the_node_write_its_logs() -> None:
    """The system is read-only to it, but for what the unit names."""
    text = (GUIDES / "configure-a-node.md").read_text()
    (shown,) = set(re.findall(r'^log_dir = "(.*?)"', text, re.MULTILINE))
    assert directives("ProtectSystem") == ["strict"]
    assert [f"/var/log/{name}" for name in directives("LogsDirectory")] == [shown]
    assert [f"/var/lib/{name}" for name in directives("StateDirectory")] == re.findall(
        r'^data_dir = "(.*?)"', text, re.MULTILINE
    )[:1]


def test_selectors_match_the_nodes_but_not_the_job() -> None:
    labels: Mapping[str, str] = kind("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    others = kind("Job", "kvstore-init")["spec"]["template"]["metadata"]["labels"]
    selectors = [kind("Service")["spec"]["selector"], kind("Service", "kvstore-nodes")["spec"]["selector"]]
    selectors += [kind(name)["spec"]["selector"]["matchLabels"] for name in ("StatefulSet", "PodDisruptionBudget")]
    selectors.append(kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"])
    for each in selectors:
        assert each.items() <= labels.items()
        assert not each.items() <= others.items()
    assert kind("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_job_founds_the_cluster_of_the_pods() -> None:
    words = JOB["containers"][0]["args"]
    known(words)
    options = list(pairwise(words))
    table = tomllib.loads(kind("ConfigMap")["data"]["node.toml"])
    assert [value for name, value in options if name == "--node"] == [
        f"kvstore-{number}" for number in range(kind("StatefulSet")["spec"]["replicas"])
    ]
    assert dict(options)["--zookeeper"] == table["zookeeper"]
    assert dict(options)["--secret-file"] == table["secret_file"]
    for pod in (POD, JOB):
        assert pod["initContainers"][0]["command"][-1] == table["secret_file"]


def test_systemd_unit_waits_without_a_limit_for_the_start() -> None:
    check, run = (directives(name)[0].split()[1:] for name in ("ExecStartPre", "ExecStart"))
    known(check)
    assert plain_node_run(run) is not None
    assert check[-1] == run[-1]
    assert (directives("Type"), directives("TimeoutStartSec")) == (["notify"], ["infinity"])
    assert float(directives("TimeoutStopSec")[0]) > STOP_TIMEOUT_S
    assert int(directives("LimitNOFILE")[0]) > FILES_MIN
    assert directives("User") == ["kvstore"]
    assert re.findall(r"^u (\w+) ", (PACKAGING / "systemd" / "kvstore.sysusers.conf").read_text(), re.M) == ["kvstore"]


def test_boot_does_not_wait_for_a_node() -> None:
    """Boot may wait only for units that start after it. Other default dependencies of systemd are stated explicitly."""
    assert directives("DefaultDependencies") == ["no"]
    assert directives("Requires") == ["sysinit.target"]
    assert "sysinit.target basic.target" in directives("After")
    assert (directives("Conflicts"), directives("Before")) == (["shutdown.target"], ["shutdown.target"])
    block = SYSTEMD.partition("cp packaging/systemd/kvstore-node.service")[2].partition("```")[0]
    assert "systemctl start --no-block kvstore-node" in block


def test_unit_starts_when_a_directory_is_missing() -> None:
    """Mounting a disk hides the content of its mount point, and systemd rejects units that name it without a hyphen."""
    named = [word for text in (UNIT, SYSTEMD) for word in re.findall(r"ReadWritePaths=(\S*)/disk2", text)]
    assert named == ["-", "-"]


def test_image_has_compiler_when_a_package_has_no_wheel() -> None:
    """hdrhistogram, which requirements-node.lock pins, has no wheel for aarch64."""
    assert re.search(r"^hdrhistogram==", (ROOT / "requirements-node.lock").read_text(), re.MULTILINE)
    first = DOCKERFILE.partition("AS build")[2].rpartition("\nFROM ")[0]
    assert '[ "$(uname -m)" = x86_64 ]' in first
    assert first.index("install -y --no-install-recommends gcc libc6-dev") < first.index("-r requirements-node.lock")


@pytest.mark.parametrize("step", ["prefer", "require"])
def test_documented_tls_files_are_accepted_by_a_node(step: str) -> None:
    """Of a node that other machines reach: those of the first step, and of the last."""
    page = (GUIDES / "switch-on-tls.md").read_text()
    way = page.partition("## Switch it on while the cluster runs")[2].partition("\n## ")[0]
    first = re.search(r"^1\. (.*)$", way, re.MULTILINE)
    last = re.search(r"kvstore node check (.*)$", way, re.MULTILINE)
    assert first is not None
    assert last is not None
    tls: dict[str, Any] = {"cert": "/c", "key": "/k", "mode": "prefer"}
    if "`verify_clients` and `ca`" in first[1]:
        tls |= {"verify_clients": True, "ca": "/ca"}
    table: dict[str, Any] = {"id": "n1", "zookeeper": "zk:2181", "data_dir": "/d", "secret_file": "/s", "tls": tls}
    table |= {name: f"0.0.0.0:{port}" for name, port in PORTS.items()} | {"advertise": "n1", "insecure": True}
    words = re.findall(r"--set ([a-z.]+=\w+)", last[1]) if step == "require" else []
    assert words == ([] if step == "prefer" else ["insecure=false", "tls.mode=require"])
    config, faults = toml.build_or_faults(toml.with_settings(table, [toml.setting(word) for word in words]), NodeConfig)
    assert (faults, config is not None) == ([], True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here to verify it")
def test_systemd_knows_every_option_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "kvstore-node.service"
    unit.write_text(UNIT.replace("/opt/kvstore/bin/kvstore", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "kvstore-node" in line] == []


@contextmanager
def answering(tls: Tls | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve as a server that is healthy and not ready, and yield its port."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Write no log lines."""

    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), Pages)
    if tls is not None:
        context = tls.server_context()
        assert context is not None
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        yield server.server_port


@pytest.mark.parametrize(("host", "words"), [("::1", ()), ("127.0.0.2", ("127.0.0.2",))])
def test_health_check_asks_the_listening_address(host: str, words: tuple[str, ...]) -> None:
    """It asks the IPv6 loopback address, the only one if the server listens on the IPv6 wildcard, or its argument."""
    command = [sys.executable, "-I", str(PACKAGING / "container" / "health.py"), "/healthz"]

    def code(port: int) -> int:
        return subprocess.run([*command, str(port), *words], capture_output=True, check=False).returncode

    with answering(host=host) as port:  # in a process that may pause for the two seconds that it is given
        wait_until_blocking(lambda: code(port) == 0, what="the answer of who listens there")


@pytest.mark.parametrize("has_tls", [False, True])
def test_health_check_follows_the_response(tmp_path: Path, has_tls: bool) -> None:
    script = str(PACKAGING / "container" / "health.py")

    def code(*words: str) -> int:
        return subprocess.run([sys.executable, "-I", script, *words], capture_output=True, check=False).returncode

    with answering(Files.issue(tmp_path).bookie if has_tls else None) as port:
        wait_until_blocking(lambda: code("/healthz", str(port)) == 0, what="the answer that it is healthy")
        assert code("/readyz", str(port)) == 1
    assert code("/healthz", str(port)) == 1, "nobody there"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units_of_the_nightly_snapshot(tmp_path: Path) -> None:
    for name in ("kvstore-snapshot.service", "kvstore-snapshot.timer"):
        text = (PACKAGING / "systemd" / name).read_text().replace("/opt/kvstore/bin/kvstore", "/bin/true")
        (tmp_path / name).write_text(text)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "kvstore-snapshot" in line]
    assert (done.returncode, ours) == (0, [])


def test_snapshot_unit_runs_again_only_if_that_can_help() -> None:
    text = (PACKAGING / "systemd" / "kvstore-snapshot.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    known(command.split()[1:])
    (final,) = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    may_pass = {OUTCOMES["unavailable"], OUTCOMES["interrupted"]}
    assert {int(code) for code in final.split()} == {2, *OUTCOMES.values()} - may_pass - {OUTCOMES["done"]}
    guide = (GUIDES / "take-nightly-snapshots.md").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", command)) <= set(re.findall(r"^ +([A-Z_]+)=", guide, re.MULTILINE))
