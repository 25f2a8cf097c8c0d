"""REST and admin clients: every method, sync and async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    KEY,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
)
from tinkex import (
    AdminClient,
    APIFuture,
    APIResponseValidationError,
    ConfigError,
    ExperimentalWarning,
    InvalidInput,
    NotFoundError,
    RestClient,
    ServiceClient,
    TrainingClient,
    types,
)
from tinkex.testing import Fault, StubServer

FOREIGN = "tml-foreign"


class SeededServer(NamedTuple):
    """A server with a training run, checkpoints and a sampler."""

    server: StubServer
    service: ServiceClient
    client: TrainingClient
    rest: RestClient
    admin: AdminClient
    training: str
    sampler: str
    external: str
    session_id: str
    sampler_id: str

    @property
    def run_id(self) -> str:
        return self.client.model_id


@pytest.fixture
def seeded(serve: Serve, connect: Connect) -> SeededServer:
    server = serve(api_keys={KEY, FOREIGN})
    service = connect(server, project_id="p-1", user_metadata={"team": "red"}, display_name="s")
    client = service.create_lora_training_client(BASE_MODEL, rank=4, user_metadata={"n": "1"})
    paths = [
        client.save_state("a").result(TIMEOUT_SECONDS).path,
        client.save_weights_for_sampler("b").result(TIMEOUT_SECONDS).path,
        client.save_weights_external("c").result(TIMEOUT_SECONDS).path,
    ]
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    rest = RestClient(base_url=server.url, api_key=KEY)
    admin = AdminClient(base_url=server.url, api_key=KEY)
    (session_id,) = server.sessions
    return SeededServer(
        server, service, client, rest, admin, *paths, session_id, sampler.sampling_session_id
    )


def call_both(owner: Any, name: str, *args: Any, **options: Any) -> Any:
    """Call a method and its async version; the results must be equal."""
    now = getattr(owner, name)(*args, **options)
    assert isinstance(now, APIFuture)
    value = now.result(TIMEOUT_SECONDS)
    async_method = getattr(owner, f"{name}_async", None)

    async def later() -> Any:
        # A few methods have no async version; their futures can be awaited.
        return await (async_method or getattr(owner, name))(*args, **options)

    assert asyncio.run(later()) == value
    return value


def test_every_method_has_async_version_or_returns_future() -> None:
    """Only these have no async version; those of the last lines are extensions of tinkex."""
    sync_only = {
        "get_weights_info_by_tinker_path",
        "whoami",
        "search_checkpoints",
        "download_checkpoint",
        "get_telemetry",
    }
    sync_only |= {"find_training_runs", "rename_training_run", "report_run_metrics"}
    sync_only |= {"set_training_run_tags", "set_alias", "list_aliases", "delete_alias"}
    for owner in (RestClient, AdminClient):
        public = {name for name, _ in inspect.getmembers(owner) if not name.startswith("_")}
        sync = {name for name in public if not name.endswith("_async")}
        assert {name for name in sync if f"{name}_async" not in public} <= sync_only
        assert {name.removesuffix("_async") for name in public - sync} <= sync


# --- reading ----------------------------------------------------------------------------------


def test_training_runs_are_found_by_id_path_and_project(seeded: SeededServer) -> None:
    run = call_both(seeded.rest, "get_training_run", seeded.run_id)
    assert (run.training_run_id, run.base_model, run.lora_rank) == (seeded.run_id, BASE_MODEL, 4)
    assert run.last_checkpoint.tinker_path == seeded.training
    assert run.last_sampler_checkpoint.tinker_path == seeded.sampler
    assert run.user_metadata == {"n": "1"}
    assert call_both(seeded.rest, "get_training_run_by_tinker_path", seeded.sampler) == run
    page = call_both(seeded.rest, "list_training_runs", 1, 0, project_id="p-1")
    assert page.training_runs == [run]
    assert (page.cursor.limit, page.cursor.total_count) == (1, 1)
    assert call_both(seeded.rest, "list_training_runs", project_id="p-2").training_runs == []
    query = seeded.server.calls("list_training_runs")[0].query
    assert query == {"limit": "1", "offset": "0", "access_scope": "owned", "project_id": "p-1"}


def test_checkpoints_are_listed_by_run_and_in_pages(seeded: SeededServer) -> None:
    found = call_both(seeded.rest, "list_checkpoints", seeded.run_id).checkpoints
    assert {checkpoint.tinker_path for checkpoint in found} == {
        seeded.training,
        seeded.sampler,
        seeded.external,
    }
    kinds = {checkpoint.tinker_path: checkpoint.checkpoint_type for checkpoint in found}
    assert kinds[seeded.external] == "external"
    pages = [
        call_both(seeded.rest, "list_user_checkpoints", limit=2, offset=offset).checkpoints
        for offset in (0, 2)
    ]
    assert [len(page) for page in pages] == [2, 1]
    assert sorted(c.tinker_path for page in pages for c in page) == sorted(kinds)
    info = call_both(seeded.rest, "get_weights_info_by_tinker_path", seeded.training)
    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 4)
    urls = call_both_for_urls(seeded)
    assert "adapter_config.json" in urls


def call_both_for_urls(seeded: SeededServer) -> dict[str, str]:
    """The URLs are equal; their expiry is not."""
    first = seeded.rest.get_external_weights_urls(seeded.external).result(TIMEOUT_SECONDS)
    second = asyncio.run(seeded.rest.get_external_weights_urls_async(seeded.external))
    assert first.urls == second.urls
    assert first.expires > datetime.now(UTC)
    return first.urls


def test_session_lists_its_runs_and_samplers(seeded: SeededServer) -> None:
    assert call_both(seeded.rest, "list_sessions", limit=5).sessions == [seeded.session_id]
    session = call_both(seeded.rest, "get_session", seeded.session_id)
    assert session.training_run_ids == [seeded.run_id]
    assert session.sampler_ids == [seeded.sampler_id]
    assert (session.display_name, session.user_metadata) == ("s", {"team": "red"})
    assert call_both(seeded.rest, "get_sampler", seeded.sampler_id).base_model == BASE_MODEL


def test_session_search_returns_pages(seeded: SeededServer, connect: Connect) -> None:
    other = connect(seeded.server, display_name="other run")
    other.create_lora_training_client(BASE_MODEL)
    other.close().result(TIMEOUT_SECONDS)
    request = types.SessionSearchRequest(owner=types.OwnSearchOwner(), limit=1)
    with pytest.warns(ExperimentalWarning):
        first = call_both(seeded.rest, "search_sessions", request)
    assert [session.display_name for session in first.sessions] == ["other run"]
    assert first.sessions[0].status.reason.type == "success"
    with pytest.warns(ExperimentalWarning):
        second = seeded.rest.search_sessions(
            request.model_copy(update={"cursor": first.next_cursor})
        )
    (found,) = second.result(TIMEOUT_SECONDS).sessions
    assert (found.session_id, found.checkpoints_count) == (seeded.session_id, 3)
    assert found.status.type == "active"


def test_checkpoint_search_returns_pages(seeded: SeededServer) -> None:
    request = types.CheckpointSearchRequest(base_models=[BASE_MODEL], limit=2)
    with pytest.warns(ExperimentalWarning) as caught:
        first = seeded.rest.search_checkpoints(request).result(TIMEOUT_SECONDS)
    assert caught[0].filename == __file__
    assert {saved.base_model for saved in first.checkpoints} == {BASE_MODEL}
    assert first.next_cursor is not None
    with pytest.warns(ExperimentalWarning):
        second = seeded.rest.search_checkpoints(
            request.model_copy(update={"cursor": first.next_cursor})
        ).result(TIMEOUT_SECONDS)
    assert second.next_cursor is None
    listed = seeded.rest.list_user_checkpoints().result(TIMEOUT_SECONDS).checkpoints
    assert first.checkpoints + second.checkpoints == listed
    with pytest.raises(InvalidInput, match="200"):
        types.CheckpointSearchRequest(limit=201)


def test_trace_export_is_awaited(seeded: SeededServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.client.rest.TRACE_POLL_SECONDS", 0.01)
    url = call_both(seeded.rest, "export_session_trace", seeded.session_id)
    assert seeded.session_id in url
    num_calls = len(seeded.server.calls("export_session_trace"))
    pending = Fault(status=200, body={"status": "pending"})
    seeded.server.inject("export_session_trace", pending, times=2)
    assert seeded.rest.export_session_trace(seeded.session_id).result(TIMEOUT_SECONDS)
    assert len(seeded.server.calls("export_session_trace")) == num_calls + 3
    seeded.server.inject(
        "export_session_trace", Fault(status=200, body={"status": "failed", "error": "too old"})
    )
    with pytest.raises(APIResponseValidationError, match="too old"):
        seeded.rest.export_session_trace(seeded.session_id).result(TIMEOUT_SECONDS)


# --- changing ---------------------------------------------------------------------------------


def is_public(seeded: SeededServer, path: str) -> bool:
    found = seeded.rest.list_checkpoints(seeded.run_id).result(TIMEOUT_SECONDS).checkpoints
    return next(checkpoint.public for checkpoint in found if checkpoint.tinker_path == path)


def test_publish_and_unpublish(seeded: SeededServer) -> None:
    assert (
        seeded.rest.publish_checkpoint_from_tinker_path(seeded.training).result(TIMEOUT_SECONDS)
        is None
    )
    assert is_public(seeded, seeded.training)
    seeded.rest.unpublish_checkpoint_from_tinker_path(seeded.training).result(TIMEOUT_SECONDS)
    asyncio.run(seeded.rest.publish_checkpoint_from_tinker_path_async(seeded.sampler))
    assert (is_public(seeded, seeded.training), is_public(seeded, seeded.sampler)) == (False, True)
    asyncio.run(seeded.rest.unpublish_checkpoint_from_tinker_path_async(seeded.sampler))
    assert not is_public(seeded, seeded.sampler)


def test_set_checkpoint_ttl(seeded: SeededServer) -> None:
    seeded.rest.set_checkpoint_ttl_from_tinker_path(seeded.training, 3600).result(TIMEOUT_SECONDS)
    asyncio.run(seeded.rest.set_checkpoint_ttl_from_tinker_path_async(seeded.training, None))
    bodies = [call.body for call in seeded.server.calls("set_checkpoint_ttl")]
    # The only request in which null is sent.
    assert bodies == [b'{"ttl_seconds":3600}', b'{"ttl_seconds":null}']
    found = seeded.rest.list_checkpoints(seeded.run_id).result(TIMEOUT_SECONDS).checkpoints
    assert all(checkpoint.expires_at is None for checkpoint in found)
    with pytest.raises(InvalidInput, match="-1"):
        seeded.rest.set_checkpoint_ttl_from_tinker_path(seeded.training, -1)


def test_deleted_checkpoints_are_not_listed(seeded: SeededServer) -> None:
    seeded.rest.delete_checkpoint(seeded.run_id, "weights/a").result(TIMEOUT_SECONDS)
    asyncio.run(seeded.rest.delete_checkpoint_from_tinker_path_async(seeded.sampler))
    seeded.rest.delete_checkpoint_from_tinker_path(seeded.external).result(TIMEOUT_SECONDS)
    assert seeded.rest.list_checkpoints(seeded.run_id).result(TIMEOUT_SECONDS).checkpoints == []
    with pytest.raises(NotFoundError):
        asyncio.run(seeded.rest.delete_checkpoint_async(seeded.run_id, "weights/a"))
    paths = [call.path for call in seeded.server.calls("delete_checkpoint")]
    assert paths[0] == f"/api/v1/training_runs/{seeded.run_id}/checkpoints/weights/a"


def test_assign_session_project(seeded: SeededServer) -> None:
    seeded.rest.assign_session_project(seeded.session_id, "p-2").result(TIMEOUT_SECONDS)
    assert seeded.server.sessions[seeded.session_id].project_id == "p-2"
    asyncio.run(seeded.rest.assign_session_project_async(seeded.session_id, "p-3"))
    assert seeded.server.sessions[seeded.session_id].project_id == "p-3"


def test_copy_weights_of_another_tenant_needs_a_token(seeded: SeededServer) -> None:
    mine = seeded.rest.copy_weights(seeded.training, ttl_seconds=60).result(TIMEOUT_SECONDS)
    theirs = RestClient(base_url=seeded.server.url, api_key=FOREIGN)
    with pytest.raises(NotFoundError):
        theirs.copy_weights(seeded.training).result(TIMEOUT_SECONDS)
    shared = asyncio.run(theirs.copy_weights_async(seeded.training, weights_access_token=KEY))
    assert len({mine, shared, seeded.training}) == 3
    call = seeded.server.calls("copy_weights")[-1]
    assert call.headers["x-tinker-weights-access-token"] == KEY
    assert KEY not in call.body.decode()
    assert (
        seeded.service.copy_weights(seeded.training).result(TIMEOUT_SECONDS).startswith("tinker://")
    )
    assert seeded.server.calls("copy_weights")[-1].message["destination_project_id"] == "p-1"


def test_lost_response_copies_once(seeded: SeededServer) -> None:
    seeded.server.inject("copy_weights", Fault(drop_after=True))
    seeded.rest.copy_weights(seeded.training).result(TIMEOUT_SECONDS)
    first, second = seeded.server.calls("copy_weights")
    assert first.headers["x-idempotency-key"] == second.headers["x-idempotency-key"]
    found = seeded.rest.list_user_checkpoints().result(TIMEOUT_SECONDS).checkpoints
    assert len(found) == 4


# --- organisation -----------------------------------------------------------------------------


def test_admin_client(seeded: SeededServer) -> None:
    entries = call_both(seeded.admin, "get_audit_log").entries
    assert {entry.event for entry in entries} & {"session_created", "checkpoint_created"}
    day = entries[0].timestamp.date()
    assert call_both(seeded.admin, "get_audit_log", "all", day).entries == entries
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = hour - timedelta(hours=1), hour + timedelta(hours=2)
    # Stored bytes are billed by the second, so two answers differ.
    usage = asyncio.run(seeded.admin.get_billing_usage_async(start, end))
    assert seeded.admin.get_billing_usage(start, end).result(TIMEOUT_SECONDS).sessions
    kinds = {event.event_info.type for event in usage.data}
    assert kinds >= {"sampling_prefill", "sampling_sample", "checkpoint"}
    assert usage.sessions[seeded.session_id].user_metadata == {"team": "red"}
    storage = call_both(seeded.admin, "get_current_checkpoint_storage_usage", "p-1")
    assert storage.data[0].checkpoint_count == 3
    with pytest.raises(InvalidInput, match="time zone"):
        seeded.admin.get_billing_usage(datetime(2026, 1, 1), hour)
    with pytest.raises(InvalidInput, match="full hour"):
        seeded.admin.get_billing_usage(hour + timedelta(minutes=1), hour)


def test_deprecated_admin_methods_still_work(seeded: SeededServer) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    calls: dict[str, tuple[Any, ...]] = {
        "get_audit_log": (),
        "get_billing_usage": (hour, hour + timedelta(hours=1)),
        "get_current_checkpoint_storage_usage": (),
    }
    for name, args in calls.items():
        with pytest.warns(FutureWarning, match=name):
            assert getattr(seeded.rest, name)(*args).result(TIMEOUT_SECONDS)
        with pytest.warns(FutureWarning, match=name):
            assert asyncio.run(getattr(seeded.rest, f"{name}_async")(*args))


# --- names and paths --------------------------------------------------------------------------


def test_ids_are_quoted_in_paths(seeded: SeededServer) -> None:
    """The official client sends `a?x#y` as run `a`."""
    wanted = "a?x#y/../z"
    with pytest.raises(NotFoundError, match="a\\?x#y"):
        seeded.rest.get_training_run(wanted).result(TIMEOUT_SECONDS)
    call = seeded.server.calls("get_training_run")[-1]
    assert call.path == "/api/v1/training_runs/a%3Fx%23y%2F..%2Fz"
    assert call.ids == {"training_run_id": wanted}


@pytest.mark.parametrize(
    "call",
    [
        lambda rest: rest.get_training_run(""),
        lambda rest: rest.get_session(".."),
        lambda rest: rest.get_training_run_by_tinker_path("tinker:///weights/x"),
        lambda rest: rest.publish_checkpoint_from_tinker_path("tinker://r/weights/"),
        lambda rest: rest.delete_checkpoint_from_tinker_path("tinker://r/elsewhere/x"),
        lambda rest: rest.delete_checkpoint("r", "../x"),
        lambda rest: rest.list_training_runs(limit=0),
        lambda rest: rest.list_sessions(offset=-1),
    ],
)
def test_invalid_arguments_are_rejected_locally(
    server: StubServer, call: Callable[[RestClient], Any]
) -> None:
    with pytest.raises(InvalidInput):
        call(RestClient(base_url=server.url, api_key=KEY))
    assert server.calls() == []


# --- whoami -----------------------------------------------------------------------------------


def test_whoami_reads_the_exchanged_token(serve: Serve) -> None:
    server = serve(api_keys={KEY}, client_config={"pjwt_auth_enabled": True})
    rest = RestClient(base_url=server.url, api_key=KEY)
    me = call_both(rest, "whoami")
    assert me.user_urn.startswith("tml:user:")
    assert me.org_urn.startswith("tml:organization:")
    rest.list_sessions().result(TIMEOUT_SECONDS)
    # The key is sent to the token exchange only; all other requests send the token.
    assert {call.endpoint for call in server.calls() if call.api_key == KEY} == {
        "client_config",
        "auth_token",
    }
    assert len(server.calls("auth_token")) == 1


def test_whoami_needs_tokens(server: StubServer) -> None:
    with pytest.raises(ConfigError, match="cannot identify you"):
        RestClient(base_url=server.url, api_key=KEY).whoami().result(TIMEOUT_SECONDS)
