import pytest

from kvstore.errors import Corrupted
from kvstore.meta.service_info import check_bookie_id, decode_service_info, decode_zone, encode_service_info
from kvstore.proto.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from kvstore.types import BookieId

B1 = BookieId("b1-3f2a9c")
GOLDEN = bytes.fromhex("3222 0a06626f6f6b6965 10ed18 1a093132372e302e302e31 220a626f6f6b69652d727063")


def test_registration_bytes_are_apaches() -> None:
    assert encode_service_info("127.0.0.1:3181") == GOLDEN
    assert decode_service_info(B1, GOLDEN) == "127.0.0.1:3181"


def test_ipv6_address_keeps_its_brackets() -> None:
    assert decode_service_info(B1, encode_service_info("[::1]:3181")) == "[::1]:3181"


def test_empty_registration_means_that_the_id_is_the_address() -> None:
    assert decode_service_info(BookieId("10.0.0.1:3181"), b"") == "10.0.0.1:3181"
    assert decode_service_info(B1, b"") is None


def test_only_the_bookies_own_protocol_counts() -> None:
    info = BookieServiceInfoFormat()
    info.endpoints.add(id="httpserver", port=8080, host="h", protocol="http")
    assert decode_service_info(B1, info.SerializeToString()) is None
    info.endpoints.add(id="bookie", port=3181, host="h", protocol="bookie-rpc")
    assert decode_service_info(B1, info.SerializeToString()) == "h:3181"


@pytest.mark.parametrize(("host", "port"), [("", 3181), ("h", 0), ("h", -1), ("h", 1 << 16)])
def test_impossible_port_is_no_address(host: str, port: int) -> None:
    info = BookieServiceInfoFormat()
    info.endpoints.add(id="bookie", port=port, host=host, protocol="bookie-rpc")
    assert decode_service_info(B1, info.SerializeToString()) is None
    assert decode_service_info(BookieId(f"{host}:{port}"), b"") is None


def test_malformed_registration_is_reported_with_the_bookie() -> None:
    with pytest.raises(Corrupted, match="b1-3f2a9c"):
        decode_service_info(B1, b"\xff\xff")


@pytest.mark.parametrize("bookie", ["b1-3f2a9c", "[::1]:3181", "a.b_c"])
def test_bookie_id_that_apaches_clients_accept_is_valid(bookie: str) -> None:
    check_bookie_id(BookieId(bookie))


@pytest.mark.parametrize("bookie", ["", "a/b", "a,b", "a b", "readonly", "ReadOnly", "a\n"])
def test_bookie_id_that_apaches_clients_refuse_is_invalid(bookie: str) -> None:
    with pytest.raises(ValueError, match="bookie id"):
        check_bookie_id(BookieId(bookie))


def test_zone_is_a_property_that_apaches_clients_ignore() -> None:
    data = encode_service_info("127.0.0.1:3181", "rack-1")
    assert data == GOLDEN + bytes.fromhex("3a0e0a047a6f6e6512067261636b2d31")
    assert (decode_zone(B1, data), decode_service_info(B1, data)) == ("rack-1", "127.0.0.1:3181")
    assert decode_zone(B1, GOLDEN) == decode_zone(B1, b"") == ""
