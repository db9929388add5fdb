"""The TLS settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvstore import config as toml
from kvstore.client.core.config import parse_url
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig
from tests.waiting import PATIENCE_S

CERT, KEY, CA = Path("cert.pem"), Path("key.pem"), Path("ca.pem")


def node(**table: object) -> NodeConfig:
    return toml.from_table(
        {"id": "n1", "zookeeper": "zk:2181", "data_dir": "data", "secret_file": "s", **table}, NodeConfig
    )


def test_certificate_needs_its_key_and_verified_clients_need_a_ca() -> None:
    for wrong in ({"cert": CERT}, {"key": KEY}):
        with pytest.raises(ValueError, match="both or neither"):
            Tls(**wrong)
    with pytest.raises(ValueError, match="verify_clients"):
        Tls(cert=CERT, key=KEY, verify_clients=True)


def test_listeners_beyond_loopback_need_tls_or_a_permission() -> None:
    with pytest.raises(ConfigError, match="without TLS"):
        node(resp="10.0.0.1:6401")
    files = {"cert": str(CERT), "key": str(KEY)}
    assert node(resp="10.0.0.1:6401", tls=files).tls == Tls(cert=CERT, key=KEY)
    assert not node(resp="10.0.0.1:6401", insecure=True).tls.serves


def test_listeners_offer_only_authenticated_encryption(tmp_path: Path) -> None:
    """CBC suites of TLS 1.2 were offered at the endpoints whose TLS is Python's. gRPC offers none by default."""
    cert = tmp_path / "cert.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(cert))
    context = Tls(cert=cert, key=cert).server_context()
    assert context is not None
    suites = context.get_ciphers()
    assert {each["protocol"] for each in suites} == {"TLSv1.2", "TLSv1.3"}
    assert [each["name"] for each in suites if not each["aead"]] == []


def test_ca_alone_does_not_secure_a_node() -> None:
    with pytest.raises(ConfigError, match="cert and key beside ca"):
        node(tls={"ca": str(CA)})


def test_node_file_keeps_its_tls_table() -> None:
    config = node(tls={"cert": str(CERT), "key": str(KEY), "ca": str(CA), "verify_clients": True})
    assert toml.from_table(_table(toml.to_toml(config)), NodeConfig) == config


def _table(text: str) -> dict[str, object]:
    import tomllib

    return tomllib.loads(text)


def test_unusable_files_raise_an_os_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file.*cert\.pem and key\.pem"):
        Tls(cert=CERT, key=KEY).server_context()
    assert Tls(ca=CA).server_context() is None
    with pytest.raises(OSError, match=r"No such file.*ca\.pem"):
        Tls(ca=CA).client_context()
    other = tmp_path / "letter.txt"
    other.write_text("Dear Sir")
    with pytest.raises(OSError, match=r"not a certificate or key in PEM form.*letter\.txt"):
        Tls(ca=other).client_context()


ASKS = """
import os, sys
from pathlib import Path
from kvstore.env.tls import Tls
os.open(sys.argv[1], os.O_RDWR)  # the terminal of this session from here on
here = Path(sys.argv[2])
tls = Tls(cert=here / "cert.pem", key=here / "key.pem")
for context in (tls.server_context, tls.client_context):
    try:
        context()
    except OSError as error:
        print(error)
"""


def test_encrypted_key_does_not_prompt_at_the_terminal(tmp_path: Path) -> None:
    """A node on a terminal would wait until someone types the password."""
    made = trustme.CA().issue_cert("localhost")
    key = load_pem_private_key(made.private_key_pem.bytes(), None)
    secret = BestAvailableEncryption(b"secret")
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, secret))
    (tmp_path / "cert.pem").write_bytes(made.cert_chain_pems[0].bytes())
    own, terminal = os.openpty()
    words = [sys.executable, "-c", ASKS, os.ttyname(terminal), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True, timeout=PATIENCE_S)
    os.close(own)
    os.close(terminal)
    assert done.stdout.count("not a certificate or key in PEM form") == 2


def test_zookeeper_is_reached_with_a_ca_and_an_optional_certificate() -> None:
    assert node().zookeeper_tls is None
    config = node(zookeeper_tls={"ca": str(CA), "cert": str(CERT), "key": str(KEY)})
    assert config.zookeeper_tls == Tls(ca=CA, cert=CERT, key=KEY)
    assert toml.from_table(_table(toml.to_toml(config)), NodeConfig) == config
    with pytest.raises(ConfigError, match="zookeeper_tls: expected ca"):
        node(zookeeper_tls={})


def test_client_names_its_files_in_its_url() -> None:
    found = parse_url("kvs://a:1,b:2?ca=/etc/ca.pem&timeout=2s")
    assert found.tls == Tls(ca=Path("/etc/ca.pem"))
    assert (found.endpoints, found.timeout_s) == (("a:1", "b:2"), 2.0)
    assert parse_url("kvs://a:1").tls == Tls()
    assert parse_url("kv://a:1").tls is None
    with pytest.raises(ValueError, match="unknown options"):
        parse_url("kv://a:1?ca=/etc/ca.pem")
