from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from litestar.exceptions import NotFoundException

from tinkex.server.app import EXTRA_HANDLERS, ROUTES
from tinkex.server.config import ServerConfig
from tinkex.server.http.openapi import build_document, document_path
from tinkex.server.http.request_body import BodyMemoryBudget
from tinkex.server.http.router import (
    PUBLIC_ENDPOINTS,
    EndpointHandler,
    EndpointTable,
    route_path,
)
from tinkex.wire.endpoints import ENDPOINTS, PREFIX

#: Paths of signed URLs, which need no key.
DOWNLOADS = f"{PREFIX}/files"


def test_routes_match_endpoint_table() -> None:
    assert set(ROUTES) == set(ENDPOINTS)


def test_every_endpoint_is_found_by_path_and_method() -> None:
    table = EndpointTable(
        EndpointHandler(_services(), BodyMemoryBudget(_services().config), ENDPOINTS[name], handler)
        for name, handler in ROUTES.items()
    )
    for name, row in ENDPOINTS.items():
        methods, path_params = table.find(route_path(row.path))
        assert methods[row.method].endpoint.name == name
        assert ("HEAD" in methods) == ("GET" in methods)
        assert all(value == f"{{{key}}}" for key, value in path_params.items())
        assert "checkpoint_id" not in path_params
    for path in (PREFIX, f"{PREFIX}/", f"{PREFIX}/nope", f"{PREFIX}/training_runs/a/b/c/d/e"):
        with pytest.raises(NotFoundException):
            table.find(path)


def test_only_downloads_are_outside_the_table() -> None:
    paths: set[str] = set()
    for handler in EXTRA_HANDLERS:
        route: Any = handler
        paths |= set(getattr(route, "paths", None) or {route.path})

    assert {path for path in paths if path.startswith(PREFIX)} == {
        path for path in paths if path.startswith(DOWNLOADS)
    }


def test_large_bodies_only_for_tensors_and_prompts() -> None:
    large = {name for name, row in ENDPOINTS.items() if row.max_body_bytes is None}

    assert large == {"forward_backward", "forward", "asample", "create_custom_loss"}
    assert all((row.max_body_bytes or 0) <= 1024 * 1024 for row in ENDPOINTS.values())


def test_only_health_is_public() -> None:
    assert {"health"} == PUBLIC_ENDPOINTS


def _services() -> Any:
    """Building routes only needs the settings."""
    return SimpleNamespace(config=ServerConfig(home=Path("home")))


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(build_document(ROUTES, "1.2.3"))


def test_openapi_references_resolve(document: Any) -> None:
    for pointer in _pointers(document):
        place = document
        for part in pointer.removeprefix("#/").split("/"):
            assert part in place, pointer
            place = place[part]


def _pointers(value: Any) -> list[str]:
    if isinstance(value, list):
        return [pointer for item in value for pointer in _pointers(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [pointer for item in value.values() for pointer in _pointers(item)]


def test_openapi_lists_all_path_parameters(document: Any) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}


def test_openapi_security_and_deprecation(document: Any) -> None:
    for row in ENDPOINTS.values():
        operation = document["paths"][document_path(row.path)][row.method.lower()]
        assert (operation.get("security") == []) is (row.name in PUBLIC_ENDPOINTS)
        assert operation.get("deprecated", False) is row.is_legacy
        assert ("401" in operation["responses"]) is (row.name not in PUBLIC_ENDPOINTS)
    assert document["info"]["version"] == "1.2.3"


def test_openapi_describes_protobuf_and_json_passes(document: Any) -> None:
    content = document["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]

    assert set(content) == {"application/x-protobuf", "application/json"}


def test_every_operation_has_a_summary(document: Any) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"].endswith(".") or ";" in operation["summary"]
