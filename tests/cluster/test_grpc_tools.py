"""Tools that do not know our protocol, like grpcurl and load balancers, use reflection, health checks, and requests
built from fetched descriptors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.cluster.harness import Cluster, running_cluster
from tests.source import ROOT
from tests.waiting import PATIENCE_S, wait_until_blocking

pytestmark = [pytest.mark.cluster]


class Tool:
    """Calls methods by name with JSON, using only what reflection provides."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.database)

    def call(self, service: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
        found = self.pool.FindServiceByName(service).methods_by_name[method]
        wanted, answered = GetMessageClass(found.input_type), GetMessageClass(found.output_type)
        stub = self.channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=wanted.SerializeToString,
            response_deserializer=answered.FromString,
        )
        document: dict[str, Any] = MessageToDict(stub(ParseDict(request, wanted()), timeout=PATIENCE_S))
        return document


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("tools")) as started:
        yield started


@pytest.fixture(scope="module")
def tool(cluster: Cluster) -> Iterator[Tool]:
    found = Tool(address_of(cluster, "n1"))
    yield found
    found.channel.close()


def address_of(cluster: Cluster, node: str) -> str:
    host, port = cluster.address(node, "grpc")
    return f"{host}:{port}"


def test_reflection_lists_the_services(tool: Tool) -> None:
    assert {"kvstore.v1.KV", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= set(tool.database.get_services())


def test_every_method_of_every_service_is_described_with_its_messages(tool: Tool) -> None:
    for service in ("kvstore.v1.KV", "kvstore.v1.Admin"):
        methods = tool.pool.FindServiceByName(service).methods
        assert methods
        for method in methods:
            assert GetMessageClass(method.input_type)().ByteSize() == 0
            assert GetMessageClass(method.output_type)().ByteSize() == 0


def test_put_and_get_work_through_reflection(tool: Tool) -> None:
    key, value = "aGVsbG8=", "d29ybGQ="  # bytes are base64 in JSON
    tool.call("kvstore.v1.KV", "Put", {"key": key, "value": value})
    answer = tool.call("kvstore.v1.KV", "Get", {"key": key})
    assert value in str(answer), answer


def test_admin_calls_work_through_reflection(tool: Tool) -> None:
    assert tool.call("kvstore.v1.Admin", "Status", {})["server"] == "n1"


@pytest.mark.parametrize("service", ["", "kvstore.v1.KV", "kvstore.v1.Admin"])
def test_health_answers_load_balancers(tool: Tool, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(tool.channel)
    asked = health_pb2.HealthCheckRequest(service=service)
    wait_until_blocking(
        lambda: stub.Check(asked, timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.SERVING, what="health"
    )
    with pytest.raises(grpc.RpcError) as refused:
        stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def quickstart(name: str, root: Path) -> Path:
    """Return a copy of an example beside the .proto files, for a build."""
    shutil.copytree(ROOT / "examples" / name, root / "examples" / name, ignore=shutil.ignore_patterns("target"))
    (root / "kvstore" / "proto").mkdir(parents=True)
    shutil.copy(ROOT / "kvstore" / "proto" / "kv.proto", root / "kvstore" / "proto")
    return root / "examples" / name


def build(*words: str, cwd: Path, lacks: str, **environ: str) -> str:
    """Return the output of a step of a build. Skips the test if a dependency cannot be downloaded."""
    there = {
        name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"
    }  # what it fetches is the web's
    done = subprocess.run(
        words, cwd=cwd, env={**there, **environ}, capture_output=True, text=True, timeout=500, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode and re.search(lacks, said):
        pytest.skip(f"{words[0]} cannot fetch what the example needs")
    assert done.returncode == 0, said
    return done.stdout


SHOWN = re.compile(
    r'got "hello", version (\d+)\n'
    r"refused: CONDITION_FAILED, the version is (\d+)\n"
    r'changed to "hello", version (\d+)\nchanged to "world", version (\d+)\n'
)


def check_shown(said: str) -> None:
    shown = SHOWN.search(said)
    assert shown is not None, said
    assert (shown[1], shown[2]) == (shown[3], shown[4])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="no Go here")
def test_go_quickstart_builds_and_runs(cluster: Cluster, tmp_path: Path) -> None:
    folder = quickstart("go", tmp_path)
    no_modules = r"dial tcp|no such host|i/o timeout|connection refused|requires go >= |toolchain not available"
    build("go", "mod", "download", cwd=folder, lacks=r".", GOFLAGS="-mod=readonly")
    build("./generate.sh", cwd=folder, lacks=no_modules, PROTOC=f"{sys.executable} -m grpc_tools.protoc")
    assert build("gofmt", "-l", "main.go", "session.go", cwd=folder, lacks="$^") == ""
    build("go", "vet", ".", cwd=folder, lacks=no_modules)
    said = build("go", "run", ".", address_of(cluster, "n2"), cwd=folder, lacks="$^")
    check_shown(said)
    assert re.search(r"^5000 puts took \S+ in calls; with as many gets, \S+ over one session$", said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mvn") is None or shutil.which("javac") is None, reason="no Maven here")
def test_java_quickstart_builds_and_runs(cluster: Cluster, tmp_path: Path) -> None:
    folder = quickstart("java", tmp_path)
    address = f"-Dexec.args={address_of(cluster, 'n3')}"
    words = ("mvn", "-q", "-B", "-Dstyle.color=never", "compile", "exec:java", address)
    lacks = r"Could not (resolve|transfer)|was not found in"
    said = build(*words, cwd=folder, lacks=lacks, MAVEN_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    check_shown(said)
    compared = r"^5000 puts took \d+ ms in calls; with as many gets, \d+ ms over one session$"
    assert re.search(compared, said, re.MULTILINE), said
