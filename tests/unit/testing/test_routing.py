"""Endpoints are found by their paths; dialects lack some of them."""

from __future__ import annotations

import pytest

from tinkex.errors import InvalidInput
from tinkex.testing.calls import EndpointMatcher, check_endpoint
from tinkex.testing.dialects import DIALECTS, find_dialect
from tinkex.wire.endpoints import ENDPOINTS


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_endpoint_is_found_by_its_path(name: str) -> None:
    ids = {
        "session_id": "s-1",
        "sampler_id": "s-1:sample:0",
        "training_run_id": "s-1:train:0",
        "checkpoint_id": "weights/00 1",
        "alias": "pirate",
    }
    endpoint = ENDPOINTS[name]
    used = {key: value for key, value in ids.items() if "{" + key + "}" in endpoint.path}
    found = EndpointMatcher().match(endpoint.method, endpoint.url_path(**used))
    assert found == (name, used)


def test_other_paths_match_no_endpoint() -> None:
    matcher = EndpointMatcher()
    assert matcher.match("GET", "/api/v1/asample") == ("", {})
    assert matcher.match("GET", "/") == ("", {})
    assert matcher.match("GET", "/api/v1/files/x/y") == ("download", {})


def test_dialects_lack_known_endpoints_and_unknown_names_are_rejected() -> None:
    for dialect in DIALECTS.values():
        assert dialect.lacks <= set(ENDPOINTS)
    assert DIALECTS["tuft"].lacks < DIALECTS["skyrl"].lacks
    with pytest.raises(InvalidInput, match="dialect is 'elvish'; expected one of current"):
        find_dialect("elvish")
    with pytest.raises(InvalidInput, match="'sample' is not an endpoint"):
        check_endpoint("sample")
