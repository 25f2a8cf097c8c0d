"""Every path leads to its handler, in every dialect."""

from __future__ import annotations

import pytest

from tinkex.errors import InvalidInput
from tinkex.testing.dialects import DIALECTS, check_endpoint, find_dialect
from tinkex.testing.routing import HANDLERS, NOWHERE, Router
from tinkex.wire.endpoints import ENDPOINTS


def test_every_endpoint_of_the_table_is_served() -> None:
    assert set(HANDLERS) == set(ENDPOINTS)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_endpoint_is_found_by_its_path(name: str) -> None:
    ids = {
        "session_id": "s-1",
        "sampler_id": "s-1:sample:0",
        "training_run_id": "s-1:train:0",
        "checkpoint_id": "weights/00 1",
    }
    endpoint = ENDPOINTS[name]
    used = {key: value for key, value in ids.items() if "{" + key + "}" in endpoint.path}
    route, found = Router(DIALECTS["current"]).find(endpoint.method, endpoint.url_path(**used))
    assert (route.endpoint, found) == (name, used)


def test_other_paths_lead_nowhere() -> None:
    router = Router(DIALECTS["current"])
    assert router.find("GET", "/api/v1/asample") == (NOWHERE, {})
    assert router.find("GET", "/") == (NOWHERE, {})
    assert router.find("GET", "/files/x/y")[0].endpoint == "download"


def test_dialects_lack_what_their_servers_lack() -> None:
    for dialect in DIALECTS.values():
        assert dialect.lacks <= set(ENDPOINTS)
    assert DIALECTS["tuft"].lacks < DIALECTS["skyrl"].lacks
    with pytest.raises(InvalidInput, match="dialect is 'elvish'; expected one of current"):
        find_dialect("elvish")
    with pytest.raises(InvalidInput, match="'sample' is not an endpoint"):
        check_endpoint("sample")
