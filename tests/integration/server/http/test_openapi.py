"""Responses match the OpenAPI document, for requests generated from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.live_server import serve_on_socket
from tests.support.resources import TenantResources, create_model, create_resources
from tests.support.server_harness import BASE_MODEL, KEY, ServerHarness, open_harness
from tinkex.server.app import ROUTES
from tinkex.server.http.openapi import build_document, document_path
from tinkex.wire.endpoints import ENDPOINTS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
DESCRIPTION = schemathesis.openapi.from_dict(json.loads(build_document(ROUTES, "0")))
MODEST = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
#: Revoking the only key would break the other requests; it is tested separately.
NAMES = sorted(set(ENDPOINTS) - {"delete_api_key"})


class Place(NamedTuple):
    """A server and its URL."""

    harness: ServerHarness
    url: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        open_harness(tmp_path_factory.mktemp("described")) as harness,
        serve_on_socket(harness) as url,
    ):
        yield Place(harness, url)


def cases(name: str) -> st.SearchStrategy[Any]:
    row = ENDPOINTS[name]
    strategy: st.SearchStrategy[Any] = DESCRIPTION[document_path(row.path)][
        row.method
    ].as_strategy()
    return strategy


@pytest.mark.parametrize("name", NAMES)
def test_responses_match_schema_with_key(place: Place, name: str) -> None:
    @MODEST
    @given(cases(name))
    def check(case: Any) -> None:
        answer = case.call(base_url=place.url, headers={"X-API-Key": KEY})
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code != 401

    check()


@pytest.mark.parametrize("name", NAMES)
def test_responses_match_schema_for_existing_resources(place: Place, name: str) -> None:
    things = create_resources(place.harness)
    place.harness.finish(
        place.harness.services.queue.find(place.harness.tenant_id, things.request_id)
    )

    @MODEST
    @given(cases(name))
    def check(case: Any) -> None:
        point_at(case, things)
        answer = case.call(base_url=place.url, headers={"X-API-Key": KEY})
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code != 401

    check()


def point_at(case: Any, things: TenantResources) -> None:
    """Make a request name existing resources of its tenant."""
    path = things.checkpoint.path
    ids = {
        "session_id": things.session_id,
        "model_id": things.run_id,
        "training_run_id": things.run_id,
        "sampler_id": things.sampler_id,
        "sampling_session_id": things.sampler_id,
        "request_id": things.request_id,
        "base_model": BASE_MODEL,
        "tinker_path": str(path),
        "source_path": str(path),
        "segment": path.segment,
    }
    if case.operation.definition.raw["operationId"] == "load_weights":
        ids["path"] = str(path)
    for values in (case.path_parameters, case.body):
        if isinstance(values, dict):
            values.update({name: ids[name] for name in values.keys() & ids.keys()})
    if "name" in case.path_parameters:
        case.path_parameters["name"] = path.name


@pytest.mark.parametrize("name", sorted(set(ENDPOINTS) - {"health"}))
def test_schema_requests_without_key_return_401(place: Place, name: str) -> None:
    @settings(MODEST, max_examples=1)
    @given(cases(name))
    def check(case: Any) -> None:
        answer = case.call(base_url=place.url, headers={"X-API-Key": "tml-nobody"})
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code == 401

    check()


def test_missing_optimizer_uses_default(place: Place) -> None:
    """The schema allows null, which longer runs of the tests above generate."""
    session_id = place.harness.session()
    answer = create_model(place.harness, session_id, optimizer_config=None)

    assert answer.status_code == 200, answer.text
