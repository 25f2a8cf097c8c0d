"""The endpoint table matches the protocol, and ids are quoted in paths."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex import types
from tinkex.errors import InvalidInput
from tinkex.wire import endpoints as api
from tinkex.wire.endpoints import ENDPOINTS, PREFIX, BodyFormat, Endpoint

RUN = "/training_runs/{training_run_id}"
CHECKPOINT = RUN + "/checkpoints/{checkpoint_id}"

#: Every path of the protocol, in its order.
PROTOCOL = [
    # 2. session lifecycle, auth, configuration
    ("POST", "/client/config"),
    ("POST", "/client/dynamic_config"),
    ("POST", "/auth/token"),
    ("POST", "/create_session"),
    ("POST", "/session_heartbeat"),
    ("POST", "/sessions/{session_id}/finish"),
    ("GET", "/get_server_capabilities"),
    ("GET", "/healthz"),
    ("GET", "/auth/apikey/me"),
    ("DELETE", "/auth/apikey/me"),
    # 3. futures
    ("POST", "/retrieve_future"),
    ("POST", "/retrieve_futures"),
    ("POST", "/cancel_future"),
    # 4. training
    ("POST", "/create_model"),
    ("POST", "/forward_backward"),
    ("POST", "/create_custom_loss"),
    ("POST", "/optim_step"),
    ("POST", "/save_weights"),
    ("POST", "/save_weights_for_sampler"),
    ("POST", "/save_weights_external"),
    ("POST", "/load_weights"),
    ("POST", "/get_info"),
    # 5. sampling
    ("POST", "/create_sampling_session"),
    ("POST", "/join_sampling_session"),
    ("GET", "/samplers/{sampler_id}"),
    ("POST", "/asample"),
    # 6. REST
    ("GET", "/training_runs"),
    ("GET", RUN),
    ("GET", RUN + "/checkpoints"),
    ("DELETE", CHECKPOINT),
    ("POST", CHECKPOINT + "/publish"),
    ("DELETE", CHECKPOINT + "/publish"),
    ("PUT", CHECKPOINT + "/ttl"),
    ("GET", CHECKPOINT + "/external_weights_urls"),
    ("GET", "/checkpoints"),
    ("POST", "/checkpoints/search"),
    ("POST", "/weights_info"),
    ("POST", "/copy_weights"),
    ("GET", "/sessions"),
    ("GET", "/sessions/{session_id}"),
    ("PUT", "/sessions/{session_id}/project"),
    ("GET", "/sessions/{session_id}/trace_export"),
    ("POST", "/sessions/search"),
    ("GET", "/audit"),
    ("GET", "/billing/usage/events"),
    ("GET", "/billing/usage/checkpoints/current"),
    # 8. telemetry
    ("POST", "/telemetry"),
]
#: Dropped by 0.36.0, still spoken by SDKs and servers up to 0.25 (sections 4.8, 6, 11 and 13).
LEGACY = [
    ("POST", "/forward"),
    ("POST", "/unload_model"),
    ("GET", "/models/{training_run_id}/checkpoints"),
    ("GET", CHECKPOINT + "/archive"),
]
#: Not in the protocol: only our own server has them.
OWN = [
    ("GET", "/tokenizer"),
    ("GET", RUN + "/metrics"),
    ("POST", RUN + "/metrics"),
    ("PUT", RUN + "/name"),
    ("PUT", RUN + "/tags"),
    ("PUT", "/aliases"),
    ("GET", "/aliases"),
    ("DELETE", "/aliases/{alias}"),
    ("GET", "/usage/quotas"),
]
ROWS = [row for row in vars(api).values() if isinstance(row, Endpoint)]


def test_every_path_is_in_the_table_exactly_once() -> None:
    table = Counter((row.method, row.path) for row in ROWS)
    assert table == Counter(PROTOCOL + LEGACY + OWN)


def test_legacy_endpoints_are_marked() -> None:
    assert sorted((row.method, row.path) for row in ROWS if row.is_legacy) == sorted(LEGACY)


def test_tinkex_only_endpoints_are_marked() -> None:
    assert [(row.method, row.path) for row in ROWS if row.is_tinkex_only] == OWN


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []
    assert {name: row.path for name, row in ENDPOINTS.items()} == {r.name: r.path for r in ROWS}
    assert len(ENDPOINTS) == len(PROTOCOL) + len(LEGACY) + len(OWN)
    assert all(name.isidentifier() for name in ENDPOINTS)


def test_request_types_match_the_official_names() -> None:
    kinds = {row.name: row.request_type for row in ROWS if row.result_type is not None}
    assert kinds == {
        "create_model": "CreateModel",
        "create_custom_loss": "CreateCustomLoss",
        "forward_backward": "ForwardBackward",
        "forward": "Forward",
        "optim_step": "OptimStep",
        "save_weights": "SaveWeights",
        "save_weights_for_sampler": "SaveWeightsForSampler",
        "save_weights_external": "SaveWeightsExternal",
        "load_weights": "LoadWeights",
        "asample": "Sample",
        "unload_model": "UnloadModel",
    }
    assert all(row.reply is types.UntypedAPIFuture for row in ROWS if row.result_type is not None)


def test_bodies() -> None:
    assert [row.name for row in ROWS if row.body is BodyFormat.PROTO] == ["forward_backward"]
    for row in ROWS:
        if row.method in {"GET", "DELETE"}:
            assert row.body is BodyFormat.NONE, row.name
        if row.method == "PUT":
            assert row.body is BodyFormat.JSON, row.name
        if row.query:
            assert row.method == "GET", row.name


def test_queries_match_the_protocol() -> None:
    assert {row.path: row.query for row in ROWS if row.query} == {
        "/training_runs": {"limit", "offset", "access_scope", "project_id", "search"},
        RUN: {"access_scope"},
        RUN + "/metrics": {"limit", "after"},
        "/tokenizer": {"base_model", "digest"},
        "/checkpoints": {"limit", "offset"},
        "/sessions": {"limit", "offset", "access_scope"},
        "/sessions/{session_id}": {"access_scope"},
        "/audit": {"event_type", "day"},
        "/billing/usage/events": {"starting_on", "ending_before"},
        "/billing/usage/checkpoints/current": {"project_id"},
    }


def test_timeouts_match_the_protocol() -> None:
    limits = {row.name: row.timeout_seconds for row in ROWS}
    appendix = {
        "client_dynamic_config": 10.0,
        "session_heartbeat": 10.0,
        "telemetry": 5.0,
        "retrieve_future": 45.0,
        "retrieve_futures": 45.0,
        "cancel_future": 30.0,
        "get_api_key": 30.0,
        "delete_api_key": 30.0,
    }
    assert {name: limits[name] for name in appendix} == appendix
    # Timeouts do not exceed the protocol's; jobs use the configured timeout.
    assert all(0.0 < seconds <= 60.0 for seconds in limits.values() if seconds is not None)
    assert {row.timeout_seconds for row in ROWS if row.result_type is not None} == {None}


def test_conflict_is_not_retried_for_idempotent_changes() -> None:
    final = {row.name for row in ROWS if not row.retries_conflict}
    assert final == {
        "delete_checkpoint",
        "publish_checkpoint",
        "unpublish_checkpoint",
        "set_checkpoint_ttl",
        "assign_session_project",
    }


# --- paths --------------------------------------------------------------------------------


def test_path_without_placeholders_is_unchanged() -> None:
    assert api.OPTIM_STEP.url_path() == "/api/v1/optim_step"


def test_colons_stay_in_ids() -> None:
    path = api.GET_RUN.url_path(training_run_id="s-1:train:0")
    assert path == "/api/v1/training_runs/s-1:train:0"


def test_checkpoint_id_keeps_its_slash() -> None:
    path = api.PUBLISH_CHECKPOINT.url_path(training_run_id="r:train:0", checkpoint_id="weights/01")
    assert path == "/api/v1/training_runs/r:train:0/checkpoints/weights/01/publish"


def test_slash_in_other_ids_is_quoted() -> None:
    assert api.GET_RUN.url_path(training_run_id="a/b") == "/api/v1/training_runs/a%2Fb"
    assert api.GET_SAMPLER.url_path(sampler_id="a/../b") == "/api/v1/samplers/a%2F..%2Fb"


@pytest.mark.parametrize(
    ("hostile", "quoted"),
    [
        ("a?x#y", "a%3Fx%23y"),
        ("a b", "a%20b"),
        ("%2e%2e", "%252e%252e"),
        ("a\\b", "a%5Cb"),
        ("a\r\nx: y", "a%0D%0Ax:%20y"),
        ("ü", "%C3%BC"),
        ("...", "..."),
    ],
)
def test_hostile_ids_are_quoted(hostile: str, quoted: str) -> None:
    assert api.GET_SESSION.url_path(session_id=hostile) == f"/api/v1/sessions/{quoted}"


@pytest.mark.parametrize("bad", ["", ".", "..", None, 5, b"x"])
def test_empty_and_dot_ids_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="session_id"):
        api.GET_SESSION.url_path(session_id=bad)


@pytest.mark.parametrize(
    "bad", ["", "/", "weights/", "/x", "weights/..", "../weights/x", "weights//x", "./x", "."]
)
def test_checkpoint_ids_with_dots_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match=r"checkpoint.id"):
        api.DELETE_CHECKPOINT.url_path(training_run_id="r", checkpoint_id=bad)


def test_missing_id_is_named() -> None:
    with pytest.raises(InvalidInput, match="delete_checkpoint needs checkpoint_id"):
        api.DELETE_CHECKPOINT.url_path(training_run_id="r")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_id_escapes_its_segment(value: str) -> None:
    try:
        path = api.TRACE_EXPORT.url_path(session_id=value)
    except InvalidInput:
        assert value in {".", ".."}
        return
    parts = urlsplit(path)
    segments = parts.path.split("/")
    assert (parts.query, parts.fragment) == ("", "")
    assert [*segments[:4], *segments[5:]] == ["", "api", "v1", "sessions", "trace_export"]
    assert unquote(segments[4]) == value


def test_endpoints_are_frozen() -> None:
    with pytest.raises(AttributeError):
        api.SAMPLE.path = "/other"  # type: ignore[misc]
    assert PREFIX == "/api/v1"
