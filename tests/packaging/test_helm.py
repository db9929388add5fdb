"""The Helm chart: static checks in Python, and checks of the rendered manifests where helm is installed.

Its pods must meet the same requirements as those of packaging/kubernetes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.cli.node.advice import advice
from tests.packaging.test_packaging import (
    KUBERNETES,
    PORTS,
    USER,
    config_of,
    known,
)
from tests.source import ROOT

CHART = ROOT / "packaging" / "helm" / "kvstore"
META = yaml.safe_load((CHART / "Chart.yaml").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
FREE = {"resources", "podAnnotations", "podLabels", "nodeSelector", "service.annotations", "tolerations", "settings"}
"""Values that are passed through unchanged."""
HELM = shutil.which("helm")
ZOOKEEPER = "zk-0.zk:2181,zk-1.zk:2181,zk-2.zk:2181/kvstore"
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm here to render the chart")


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the dotted names of all values."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path not in FREE:
            yield from leaves(value, f"{path}.")
        else:
            yield path


def schema_leaves(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, each in schema["properties"].items():
        path = f"{prefix}{name}"
        if "properties" in each:
            assert each["additionalProperties"] is False, f"{path}: a slip in a name would be taken"
            yield from schema_leaves(each, f"{path}.")
        elif path != "global":
            yield path


def test_chart_has_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (META["version"], META["appVersion"], META["apiVersion"]) == (version, version, "v2")


def test_chart_values_match_the_schema_and_the_templates() -> None:
    names = set(leaves(VALUES))
    assert set(schema_leaves(SCHEMA)) == names
    text = "\n".join(TEMPLATES.values())
    used = {name.rstrip(".") for name in re.findall(r"\.Values\.([A-Za-z.]+)", text)}
    assert used == names


def test_every_value_is_described() -> None:
    """Values are documented in a comment directly above them."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    path: list[str] = []
    silent = set()
    for above, line in pairwise(["", *lines]):
        named = re.match(r"( *)([a-zA-Z]+):", line)
        if named:
            path = [*path[: len(named[1]) // 2], named[2]]
            silent |= set() if above.lstrip().startswith("#") else {".".join(path)}
    assert silent & set(leaves(VALUES)) == set()


def test_chart_is_secure_by_default() -> None:
    assert VALUES["tls"]["enabled"] is VALUES["networkPolicy"]["enabled"] is VALUES["podDisruptionBudget"]["enabled"]
    assert VALUES["tls"]["enabled"] is True
    assert (VALUES["podDisruptionBudget"]["maxUnavailable"], VALUES["antiAffinity"], VALUES["nodes"]) == (
        1,
        "required",
        3,
    )
    assert (VALUES["image"]["repository"], VALUES["metadata"]) == ("", ""), "nobody's by accident"
    assert SCHEMA["properties"]["nodes"]["minimum"] == 3
    for name, text in TEMPLATES.items():
        assert text.count("containers:") <= 2 * text.count('securityContext: {{ include "kvstore.confined" . }}'), name
    assert "kind: Secret" not in "".join(TEMPLATES.values()), "a secret would stand in the release's values"
    assert 'fail (printf "want a release name without dots' in TEMPLATES["_helpers.tpl"]


def rendered(folder: Path, *words: str) -> tuple[int, str]:
    assert HELM is not None
    given = ["--kube-version", "1.30.0", "--set", "image.repository=registry.example/kvstore"]
    given += ["--set-string", f"metadata={ZOOKEEPER.replace(',', chr(92) + ',')}", *words]
    command = [HELM, "template", "store", str(CHART), "--namespace", "prod", *given]
    env = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def documents(folder: Path, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    code, text = rendered(folder, *words)
    assert code == 0, text
    found = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def node_of(found: Mapping[tuple[str, str], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod of a node, and its container."""
    pod = found["StatefulSet", "store"]["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def config_in(found: Mapping[tuple[str, str], Any]) -> Any:
    names = {"POD_NAME": "store-2", "POD_NAMESPACE": "prod"}
    _, node = node_of(found)
    words = [re.sub(r"\$\((\w+)\)", lambda match_: names[match_[1]], word) for word in node["args"]]
    return config_of(words, found["ConfigMap", "store"]["data"]["node.toml"])


@needs_helm
def test_helm_lint_finds_no_fault(tmp_path: Path) -> None:
    assert HELM is not None
    words = ["--strict", "--set", "image.repository=r", "--set-string", "metadata=zk:2181"]
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([HELM, "lint", str(CHART), *words], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
def test_chart_makes_the_same_node_as_the_plain_file(tmp_path: Path) -> None:
    found = documents(tmp_path)
    assert sorted({kind for kind, _ in found}) == sorted({each["kind"] for each in KUBERNETES})
    config = config_in(found)
    assert (config.id, config.advertise) == ("store-2", "store-2.store-nodes.prod.svc.cluster.local")
    assert (advice(config), config.insecure, config.zookeeper) == ([], False, ZOOKEEPER)
    assert config.tls.verify_clients
    (plain,) = [each for each in KUBERNETES if each["kind"] == "StatefulSet"]
    pod, node = node_of(found)
    other = plain["spec"]["template"]["spec"]
    for name in ("livenessProbe", "readinessProbe", "startupProbe", "ports", "securityContext", "volumeMounts", "env"):
        ours, theirs = node[name], other["containers"][0][name]
        if name == "volumeMounts":  # their order has no meaning
            ours, theirs = ({each["name"]: each for each in mounts} for mounts in (ours, theirs))
        assert ours == theirs, name
    for name in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert pod[name] == other[name], name
    assert {each["name"]: each["containerPort"] for each in node["ports"]} == PORTS


@needs_helm
def test_chart_job_founds_the_cluster_and_is_renamed_by_each_revision(tmp_path: Path) -> None:
    found = documents(tmp_path, "--set", "nodes=5", "--set", "init.partitions=12")
    job = found["Job", "store-init-1"]["spec"]
    words = job["template"]["spec"]["containers"][0]["args"]
    known(words)
    options = list(pairwise(words))
    assert [value for name, value in options if name == "--node"] == [f"store-{number}" for number in range(5)]
    assert dict(options)["--zookeeper"] == ZOOKEEPER
    assert (dict(options)["--partitions"], job["ttlSecondsAfterFinished"]) == ("12", 3600)
    assert found["StatefulSet", "store"]["spec"]["replicas"] == 5
    for pod in (job["template"]["spec"], node_of(found)[0]):
        assert pod["securityContext"]["runAsUser"] == USER
        for each in [*pod["initContainers"], *pod["containers"]]:
            assert each["image"] == f"registry.example/kvstore:{META['appVersion']}"
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
    labels = found["StatefulSet", "store"]["spec"]["template"]["metadata"]["labels"]
    jobs = job["template"]["metadata"]["labels"]
    for kind, name in (("Service", "store"), ("Service", "store-nodes")):
        selector = found[kind, name]["spec"]["selector"]
        assert selector.items() <= labels.items()
        assert not selector.items() <= jobs.items()


@needs_helm
def test_values_reach_the_node(tmp_path: Path) -> None:
    words = ("--set", "settings={repair_after_s=1200,partition.memory_bytes=536870912}", "--set", "tls.enabled=false")
    config = config_in(found := documents(tmp_path, *words, "--set", "antiAffinity=none"))
    assert (config.repair_after_s, config.partition.memory_bytes, config.insecure) == (1200, 536870912, True)
    pod, node = node_of(found)
    assert node["livenessProbe"]["httpGet"]["scheme"] == "HTTP"
    assert "affinity" not in pod
    etcd = documents(tmp_path, "--set-string", "metadata=etcd://etcd:2379/kvstore")
    assert config_in(etcd).metadata.uri == "etcd://etcd:2379/kvstore"


@needs_helm
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--set", "nodes=2"), "nodes"),
        (("--set", "node=3"), "node"),
        (("--set", "tls.enable=false"), "enable"),
        (("--set", "image.repository="), "repository"),
        (("--set", "terminationGracePeriodSeconds=5"), "terminationGracePeriodSeconds"),
        (("--set", "settings={repair_after_s}"), "settings"),
    ],
)
def test_chart_refuses_invalid_values_by_name(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    code, said = rendered(tmp_path, *words)
    assert code != 0
    assert told in said


@needs_helm
@pytest.mark.skipif(shutil.which("kubeconform") is None, reason="no kubeconform here")
def test_kubernetes_knows_every_field(tmp_path: Path) -> None:
    code, text = rendered(tmp_path)
    assert code == 0
    done = subprocess.run(
        ["kubeconform", "-strict", "-summary"], input=text, capture_output=True, text=True, check=False
    )
    if "failed downloading schema" in done.stdout:
        pytest.skip("the schemas cannot be fetched from here")
    assert done.returncode == 0, done.stdout
