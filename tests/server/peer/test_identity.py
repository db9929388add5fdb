"""Which certificates identify a server."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.server.peer.identity import certificate_fault, host_of


def named(*names: tuple[str, str], common: str = "") -> dict[str, Any]:
    subject = {"subject": ((("organizationName", "us"),), (("commonName", common),))} if common else {}
    return {**subject, "subjectAltName": names} if names else subject


@pytest.mark.parametrize(
    "certificate",
    [
        named(("DNS", "n1")),
        named(("DNS", "db1.example")),
        named(("DNS", "other"), ("DNS", "*.Example")),
        named(("IP Address", "10.0.0.1")),
        named(common="n1"),
    ],
)
def test_certificate_of_server_or_host_is_accepted(certificate: dict[str, Any]) -> None:
    assert certificate_fault(certificate, "n1", "10.0.0.1" if "10.0.0.1" in str(certificate) else "db1.example") == ""


@pytest.mark.parametrize(
    "certificate",
    [
        named(("DNS", "application")),
        named(("DNS", "n2")),
        named(("email", "n1")),
        named(("DNS", "application"), common="n1"),
        named(("DNS", "*.db1.example"), ("DNS", "*.com")),
        named(("DNS", "*")),
        {"serialNumber": "1"},
    ],
)
def test_certificate_of_another_name_is_refused(certificate: dict[str, Any]) -> None:
    assert "expected a certificate of n1 or db1.example" in certificate_fault(certificate, "n1", "db1.example")


# docs/protocol.md H15
def test_certificate_of_the_machine_is_accepted_for_its_processes() -> None:
    assert certificate_fault(named(("DNS", "n1")), "n1.2", "10.0.0.1") == ""
    assert "expected a certificate of n1.2 or n1, got one of n2" in certificate_fault(
        named(("DNS", "n2")), "n1.2", None
    )


def test_secret_alone_counts_without_certificates() -> None:
    assert certificate_fault(None, "n1", None) == certificate_fault({}, "n1", None) == ""
    assert certificate_fault(named(("DNS", "n1")), "n1", None) == ""
    assert (
        certificate_fault(named(("DNS", "db1.example")), "n1", None)
        == "expected a certificate of n1, got one of db1.example"
    )


def test_host_of_address_is_returned() -> None:
    assert (host_of("db1.example:6401"), host_of("[::1]:6401")) == ("db1.example", "::1")
