from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.dashboard.login import safe_target
from tinkex.server.http.request_origin import (
    RequestOrigin,
    is_from_this_machine,
    is_https,
    is_local,
    is_same_origin,
)


def arrival(
    *headers: tuple[str, str], peer: str = "127.0.0.1", version: str = "1.1", scheme: str = "http"
) -> RequestOrigin:
    return RequestOrigin(peer=peer, http_version=version, headers=headers, scheme=scheme)


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"]
)
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "127.1.2.3"])
def test_loopback_visitor_is_local(host: str, peer: str) -> None:
    assert is_local("127.0.0.1", arrival(("host", host), peer=peer))
    assert is_local("localhost", arrival(("host", host), peer=peer))


@pytest.mark.parametrize("listens_on", ["0.0.0.0", "::", "192.168.0.7", "example.com"])
def test_public_server_has_no_local_visitors(listens_on: str) -> None:
    assert not is_local(listens_on, arrival(("host", "localhost")))


@pytest.mark.parametrize("peer", ["192.168.0.7", "2001:db8::1", "", "localhost.evil", "testclient"])
def test_remote_visitor_is_not_local(peer: str) -> None:
    assert not is_local("127.0.0.1", arrival(("host", "localhost"), peer=peer))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.localhost",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "localhost:8000:1",
        "localhost:",
        "127.0.0.2",
        "::1",
        "[::1].evil",
        "localhost\n",
        "",
    ],
)
def test_unknown_host_header_is_not_local(host: str) -> None:
    assert not is_local("127.0.0.1", arrival(("host", host)))


@pytest.mark.parametrize(
    ("address", "host", "is_here"),
    [
        ("192.0.2.7", "192.0.2.7:8000", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("2001:db8::7", "[2001:db8::7]:8000", True),
        ("127.0.0.2", "127.0.0.2:8000", True),
        ("192.0.2.7", "evil.example:8000", False),
        ("192.0.2.7", "192.0.2.7.evil.example", False),
        ("192.0.2.7", "192.0.2.8", False),
    ],
)
def test_own_address_is_local(address: str, host: str, is_here: bool) -> None:
    come = RequestOrigin(
        peer=address, http_version="1.1", headers=(("host", host),), address=address
    )
    assert is_from_this_machine(come) is is_here


def test_single_host_header_is_required() -> None:
    assert not is_local("127.0.0.1", arrival())
    assert not is_local("127.0.0.1", arrival(("host", "localhost"), ("host", "localhost")))


@pytest.mark.parametrize(
    "name",
    ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "forwarded", "via", "x-real-ip"],
)
def test_proxied_request_is_not_local(name: str) -> None:
    assert not is_local("127.0.0.1", arrival(("host", "localhost"), (name, "127.0.0.1")))


def test_http_1_0_request_is_not_local() -> None:
    assert not is_local("127.0.0.1", arrival(("host", "localhost"), version="1.0"))


@pytest.mark.parametrize(
    ("headers", "is_ours"),
    [
        ((), True),
        ((("sec-fetch-site", "same-origin"),), True),
        ((("sec-fetch-site", "none"),), True),
        ((("sec-fetch-site", "cross-site"),), False),
        ((("sec-fetch-site", "same-site"),), False),
        ((("origin", "http://here:8000"),), True),
        ((("origin", "https://here:8000"),), True),
        ((("origin", "http://evil.example"),), False),
        ((("origin", "null"),), False),
        ((("origin", "https://outside.example"), ("x-forwarded-host", "outside.example")), True),
    ],
)
def test_cross_site_form_is_detected_by_headers(
    headers: tuple[tuple[str, str], ...], is_ours: bool
) -> None:
    assert is_same_origin(arrival(("host", "here:8000"), *headers)) is is_ours


def test_https_is_detected_directly_and_behind_proxy() -> None:
    assert is_https(arrival(scheme="https"))
    assert is_https(arrival(("x-forwarded-proto", "https")))
    assert not is_https(arrival())


@given(st.text() | st.text().map(lambda text: "/runs/" + text))
def test_login_redirect_is_same_origin(given_target: str) -> None:
    target = safe_target(given_target)

    assert target == "/" or target.startswith("/runs/")
    assert "//" not in target
    assert "\\" not in target
    assert target.isascii()


def test_login_target_may_be_a_run() -> None:
    assert safe_target("/runs/s:train:0") == "/runs/s:train:0"
    assert safe_target("//evil.example") == "/"
    assert safe_target("/runs/../login") == "/"
    assert safe_target("https://evil.example/runs/x") == "/"
