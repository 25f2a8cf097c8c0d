"""Dead, hung or faulty servers: typed errors, bounded retries."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import BASE_MODEL, KEY, TIMEOUT_SECONDS, Connect, Serve, datum
from tinkex import (
    AdamParams,
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    ServiceClient,
    TinkexError,
    UnprocessableEntityError,
)
from tinkex.testing import Fault, StubServer

ADAM = AdamParams(learning_rate=0.1)


@pytest.fixture
def dead_url() -> Iterator[str]:
    """Return a URL without a server; the port is bound so that no other server gets it."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{deaf.getsockname()[1]}"


def check_message(error: BaseException | None) -> None:
    """Assert that an error has a one-line message and a hint."""
    assert isinstance(error, TinkexError)
    assert error.message
    assert "\n" not in str(error)
    assert error.hint


# --- first contact ----------------------------------------------------------------------------


def test_dead_server_is_reported_within_seconds(dead_url: str, connect: Connect) -> None:
    service = connect(dead_url)
    capabilities = service.rest_client().list_sessions()
    with pytest.raises(APIConnectionError, match=r"cannot reach 127\.0\.0\.1") as caught:
        capabilities.result(TIMEOUT_SECONDS)
    check_message(caught.value)
    assert "base_url" in (caught.value.hint or "")


def test_dead_server_fails_every_client(dead_url: str, connect: Connect) -> None:
    service = connect(dead_url, first_contact_seconds=0.0)
    for call in (
        service.get_server_capabilities,
        lambda: service.create_lora_training_client(BASE_MODEL),
        lambda: service.create_sampling_client(base_model=BASE_MODEL),
        lambda: service.rest_client().list_training_runs().result(TIMEOUT_SECONDS),
    ):
        with pytest.raises(APIConnectionError, match="refused"):
            call()


@pytest.mark.parametrize("status", [500, 503])
def test_failed_start_is_reported_within_seconds(
    server: StubServer, connect: Connect, status: int
) -> None:
    server.inject("client_config", Fault(status=status, body={"detail": "later"}), times=None)
    service = connect(server, first_contact_seconds=1.0)
    with pytest.raises(InternalServerError, match="later") as caught:
        service.get_server_capabilities()
    check_message(caught.value)
    assert 2 <= len(server.calls("client_config")) <= 5
    # The failure is not cached: when the server recovers, so does the client.
    server.clear_faults()
    assert service.get_server_capabilities().supported_models


def test_server_without_flags_uses_defaults(server: StubServer, connect: Connect) -> None:
    server.inject("client_config", Fault(status=404), times=None)
    assert connect(server).create_lora_training_client(BASE_MODEL).model_id


# --- credentials ------------------------------------------------------------------------------


def refused_key(serve: Serve, connect: Connect, **options: Any) -> AuthenticationError:
    service = connect(serve(api_keys={"tml-right"}), **options)
    with pytest.raises(AuthenticationError) as caught:
        service.create_lora_training_client(BASE_MODEL)
    check_message(caught.value)
    assert caught.value.is_user_error
    return caught.value


def test_401_names_argument_as_key_source(serve: Serve, connect: Connect) -> None:
    error = refused_key(serve, connect, api_key="tml-wrong")
    assert "api_key argument" in (error.hint or "")


def test_401_names_environment_as_key_source(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    error = refused_key(serve, connect, api_key=None)
    assert "TINKER_API_KEY" in (error.hint or "")


def test_401_names_credentials_file_as_key_source(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    stored = {"version": 1, "default": "1", "keys": {"1": {"key": "tml-wrong", "name": "n"}}}
    folder = tmp_path / ".tinker"
    folder.mkdir(mode=0o700)
    (folder / "credentials.json").write_text(json.dumps(stored))
    (folder / "credentials.json").chmod(0o600)
    error = refused_key(serve, connect, api_key=None)
    assert "credentials file" in (error.hint or "")


def test_401_at_token_exchange_names_key_source(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"pjwt_auth_enabled": True})
    server.inject("auth_token", Fault(status=401, body={"detail": "who?"}), times=None)
    with pytest.raises(AuthenticationError, match="who") as caught:
        connect(server).create_lora_training_client(BASE_MODEL)
    assert "api_key argument" in (caught.value.hint or "")
    assert len(server.calls("auth_token")) == 1


def test_failing_exchange_retries_do_not_multiply(serve: Serve, connect: Connect) -> None:
    """Retries of the exchange and of the request that needs it do not multiply."""
    server = serve(client_config={"pjwt_auth_enabled": True})
    server.inject("auth_token", Fault(status=500), times=None)
    with pytest.raises(InternalServerError):
        connect(server, max_retries=1).create_lora_training_client(BASE_MODEL)
    assert len(server.calls("auth_token")) == 2


# --- a hung server ----------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["client_config", "create_session", "create_model"])
def test_hung_server_times_out(server: StubServer, connect: Connect, endpoint: str) -> None:
    server.inject(endpoint, Fault(delay_seconds=60.0), times=None)
    service = connect(server, timeout_seconds=0.2, first_contact_seconds=0.3, outage_seconds=0.3)
    with pytest.raises(APITimeoutError, match=r"0\.2 s") as caught:
        service.create_lora_training_client(BASE_MODEL)
    assert isinstance(caught.value, TimeoutError)
    check_message(caught.value)


# --- invalid responses ------------------------------------------------------------------------

INVALID_BODIES = {
    "html": Fault(status=200, body=b"<html>hi</html>", headers={"content-type": "text/html"}),
    "empty": Fault(status=200, body=b""),
    "null": Fault(status=200, body=b"null"),
    "list": Fault(status=200, body=b"[1, 2]"),
    "wrong json": Fault(status=200, body={"unexpected": True}),
    "no utf-8": Fault(status=200, body=b'{"request_id": "\xff\xfe"}'),
    "number as id": Fault(status=200, body={"request_id": 7}),
    "not protobuf": Fault(
        status=200, body=b"\xff\xff\xff", headers={"content-type": "application/x-protobuf"}
    ),
}


@pytest.mark.parametrize("name", INVALID_BODIES)
@pytest.mark.parametrize("endpoint", ["optim_step", "create_session"])
def test_invalid_response_is_typed_error(
    connect: Connect, serve: Serve, name: str, endpoint: str
) -> None:
    """It is not retried either: the server has processed the request."""
    server = serve()
    service = connect(server)
    server.inject(endpoint, INVALID_BODIES[name], times=None)
    is_page = (name, endpoint) == ("html", "create_session")
    message = "is not a Tinker server" if is_page else endpoint
    with pytest.raises(APIResponseValidationError, match=message) as caught:
        service.create_lora_training_client(BASE_MODEL).optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert "\n" not in str(caught.value)
    assert len(server.calls(endpoint)) == 1


@pytest.mark.parametrize(
    "name", sorted(INVALID_BODIES.keys() - {"wrong json", "number as id", "no utf-8"})
)
def test_invalid_result_is_typed_error(
    server: StubServer, service: ServiceClient, name: str
) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    server.inject("retrieve_future", INVALID_BODIES[name], times=None)
    with pytest.raises(APIResponseValidationError):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    with pytest.raises(APIResponseValidationError):
        client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)


@pytest.mark.parametrize("size", ["many", -5, None, 1.5])
def test_invalid_size_is_typed_error(server: StubServer, service: ServiceClient, size: Any) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    announced = {"status": "complete_metadata", "response_payload_size": size}
    server.inject("retrieve_future", Fault(status=200, body=announced), times=None)
    with pytest.raises(APIResponseValidationError):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)


BROKEN = {
    "cut": Fault(cut_after_bytes=3),
    "dropped": Fault(drop=True),
    "garbage": Fault(garbage=b"\x00\xff nonsense\r\n\r\n"),
}


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [("optim_step", "cut"), ("optim_step", "garbage"), ("retrieve_future", "dropped")],
)
def test_lost_connection_is_retried_then_typed_error(
    serve: Serve, connect: Connect, name: str, endpoint: str
) -> None:
    server = serve()
    client = connect(server, outage_seconds=0.6).create_lora_training_client(BASE_MODEL)
    server.inject(endpoint, BROKEN[name])
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    server.inject(endpoint, BROKEN[name], times=None)
    with pytest.raises(APIConnectionError) as caught:
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    check_message(caught.value)


# --- statuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, BadRequestError),
        (402, BillingError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (409, ConflictError),
        (418, APIStatusError),
        (422, UnprocessableEntityError),
        (429, RateLimitError),
        (500, InternalServerError),
        (599, InternalServerError),
    ],
)
def test_each_status_has_an_error_class(
    server: StubServer,
    connect: Connect,
    status: int,
    expected: type[APIStatusError],
) -> None:
    """Also without a content-length: a 400 is not a lost connection."""
    client = connect(server, max_retries=0, billing_pause_seconds=0.0).create_lora_training_client(
        BASE_MODEL
    )
    refusal = Fault(status=status, body={"detail": f"no {status}"}, chunked=True)
    server.inject("optim_step", refusal, times=None)
    with pytest.raises(expected, match=f"no {status}") as caught:
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert type(caught.value) is expected
    assert caught.value.status_code == status
    assert caught.value.body == {"detail": f"no {status}"}
    assert len(server.calls("optim_step")) == 1


def test_permanent_conflict_is_not_retried(service: ServiceClient) -> None:
    """The official client takes 306 s to report that it is already public."""
    client = service.create_lora_training_client(BASE_MODEL)
    path = client.save_state("a").result(TIMEOUT_SECONDS).path
    rest = service.rest_client()
    rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)
    with pytest.raises(ConflictError, match="public already"):
        rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)


def test_publish_is_sent_once(server: StubServer, service: ServiceClient) -> None:
    path = (
        service.create_lora_training_client(BASE_MODEL).save_state("a").result(TIMEOUT_SECONDS).path
    )
    rest = service.rest_client()
    server.inject("publish_checkpoint", Fault(status=409, body={"detail": "is"}), times=None)
    with pytest.raises(ConflictError):
        rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)
    assert len(server.calls("publish_checkpoint")) == 1


@pytest.mark.parametrize(
    ("headers", "least"),
    [({"retry-after-ms": "600"}, 0.6), ({"retry-after": "0.7"}, 0.7)],
)
def test_retry_after_is_honoured(
    server: StubServer, service: ServiceClient, headers: dict[str, str], least: float
) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    server.inject("optim_step", Fault(status=429, headers=headers))
    client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    first, second = (call.arrived_at for call in server.calls("optim_step"))
    assert second - first >= least


def test_should_retry_header_wins(serve: Serve, connect: Connect) -> None:
    server = serve(gap_seconds=0.05)
    client = connect(server).create_lora_training_client(BASE_MODEL)
    server.inject("optim_step", Fault(status=503, headers={"x-should-retry": "false"}))
    with pytest.raises(InternalServerError):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    server.inject("optim_step", Fault(status=400, headers={"x-should-retry": "true"}))
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics
    assert len(server.calls("optim_step")) == 3


def test_errors_do_not_contain_key(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = connect(server, max_retries=0).create_lora_training_client(BASE_MODEL)
    server.inject("optim_step", Fault(status=500, body={"detail": "no"}))
    error = client.optim_step(ADAM).exception(TIMEOUT_SECONDS)
    assert error is not None
    seen = f"{error!r} {error} {error.__dict__}"
    assert KEY not in seen
