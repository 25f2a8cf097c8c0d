"""The REST client: runs, checkpoints, sharing, downloads, sessions, usage."""

from __future__ import annotations

import asyncio
import io
import tarfile
import warnings
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from tinker import types

from tests.compat.scenarios.context import RANK, ScenarioContext, need, quietly, refusal, scenario

REST, ADMIN = "REST client", "Usage and audit"


def paths_of(ctx: ScenarioContext) -> list[str]:
    """The checkpoints of the run, as the server lists them."""
    listed = ctx.rest.list_checkpoints(ctx.model_id).result().checkpoints
    return [each.tinker_path for each in listed]


def session_of(ctx: ScenarioContext) -> str:
    """The id of the session that the run belongs to."""
    return ctx.model_id.partition(":")[0]


@scenario(REST, "`list_training_runs`, `get_training_run`")
def training_runs(ctx: ScenarioContext) -> None:
    runs = ctx.rest.list_training_runs().result().training_runs
    assert ctx.model_id in [run.training_run_id for run in runs]
    run = ctx.rest.get_training_run(ctx.model_id).result()
    assert (run.base_model, run.lora_rank) == (ctx.base_model, RANK)


@scenario(REST, "`get_training_run_by_tinker_path`")
def run_by_path(ctx: ScenarioContext) -> None:
    run = ctx.rest.get_training_run_by_tinker_path(ctx.state).result()
    assert run.training_run_id == ctx.model_id


@scenario(REST, "`get_weights_info_by_tinker_path`")
def weights_info(ctx: ScenarioContext) -> None:
    info = need(ctx.rest, "get_weights_info_by_tinker_path")(ctx.state).result()
    assert (info.base_model, info.lora_rank) == (ctx.base_model, RANK)


@scenario(REST, "`list_checkpoints`, `list_user_checkpoints`")
def checkpoints(ctx: ScenarioContext) -> None:
    assert {ctx.state, ctx.weights} <= set(paths_of(ctx))
    mine = need(ctx.rest, "list_user_checkpoints")(limit=100).result().checkpoints
    assert {ctx.state, ctx.weights} <= {each.tinker_path for each in mine}


@scenario(REST, "lists of a tenant that holds `external` checkpoints")
def lists_with_external(ctx: ScenarioContext) -> None:
    """A type of checkpoint that this version does not know must not break its lists."""
    rest = tinker.ServiceClient(base_url=ctx.url, api_key=ctx.external_key).create_rest_client()
    listed = rest.list_checkpoints(ctx.external_run).result().checkpoints
    assert f"tinker://{ctx.external_run}/weights/plain" in [each.tinker_path for each in listed]
    if hasattr(rest, "list_user_checkpoints"):
        assert rest.list_user_checkpoints().result().checkpoints


@scenario(REST, "`delete_checkpoint`")
def delete(ctx: ScenarioContext) -> None:
    path = ctx.spare("deleted")
    name = path.partition(f"{ctx.model_id}/")[2]
    assert path in paths_of(ctx)
    ctx.rest.delete_checkpoint(ctx.model_id, name).result()
    assert path not in paths_of(ctx)


@scenario(REST, "`delete_checkpoint_from_tinker_path`")
def delete_by_path(ctx: ScenarioContext) -> None:
    path = ctx.spare("deleted-by-path")
    ctx.rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in paths_of(ctx)


@scenario(REST, "publish and unpublish a checkpoint")
def publish(ctx: ScenarioContext) -> None:
    publish_it = need(ctx.rest, "publish_checkpoint_from_tinker_path")
    path = ctx.spare("published")
    publish_it(path).result()
    other = tinker.ServiceClient(base_url=ctx.url, api_key=ctx.other_key)
    assert other.create_training_client_from_state(path) is not None
    ctx.rest.unpublish_checkpoint_from_tinker_path(path).result()
    errors = (tinker.NotFoundError, tinker.PermissionDeniedError, tinker.RequestFailedError)
    refusal(lambda: other.create_training_client_from_state(path), *errors)


@scenario(REST, "`set_checkpoint_ttl_from_tinker_path`")
def set_ttl(ctx: ScenarioContext) -> None:
    set_it = need(ctx.rest, "set_checkpoint_ttl_from_tinker_path")
    path = ctx.spare("with-ttl")
    set_it(path, 7200).result()
    set_it(path, None).result()
    assert path in paths_of(ctx)


@scenario(REST, "download an archive")
def archive(ctx: ScenarioContext) -> None:
    ask = need(ctx.rest, "get_checkpoint_archive_url_from_tinker_path")
    answer = quietly(lambda: ask(ctx.weights).result())
    with tarfile.open(fileobj=io.BytesIO(ctx.fetch(answer.url))) as files:
        names = [each.name for each in files if each.isfile()]
    assert any(name.endswith("adapter_model.safetensors") for name in names), names


@scenario(REST, "`save_weights_external`, `get_external_weights_urls`")
def external_weights(ctx: ScenarioContext) -> None:
    save = need(ctx.client, "save_weights_external")
    path = save("exported").result().path
    urls = ctx.rest.get_external_weights_urls(path).result().urls
    assert len(ctx.fetch(urls["adapter_model.safetensors"])) > 1000
    ctx.rest.delete_checkpoint_from_tinker_path(path).result()


@scenario(REST, "`copy_weights`")
def copy_weights(ctx: ScenarioContext) -> None:
    copied = need(ctx.rest, "copy_weights")(ctx.state, "compat").result()
    assert copied.startswith("tinker://") and copied != ctx.state


@scenario(REST, "`list_sessions`, `get_session`")
def sessions(ctx: ScenarioContext) -> None:
    assert session_of(ctx) in need(ctx.rest, "list_sessions")(limit=100).result().sessions
    assert ctx.model_id in ctx.rest.get_session(session_of(ctx)).result().training_run_ids


@scenario(REST, "`get_sampler`")
def sampler_info(ctx: ScenarioContext) -> None:
    get = need(ctx.rest, "get_sampler")
    assert ctx.sampler is not None
    found = ctx.rest.get_session(session_of(ctx)).result().sampler_ids
    assert ctx.base_model in {get(each).result().base_model for each in found}


@scenario(REST, "`search_sessions`")
def search_sessions(ctx: ScenarioContext) -> None:
    search = need(ctx.rest, "search_sessions")
    request = types.SessionSearchRequest(session_id=session_of(ctx))
    assert len(quietly(lambda: search(request).result()).sessions) == 1


@scenario(REST, "`search_checkpoints`")
def search_checkpoints(ctx: ScenarioContext) -> None:
    search = need(ctx.rest, "search_checkpoints")
    found = quietly(lambda: search(types.CheckpointSearchRequest()).result())
    assert ctx.state in [each.tinker_path for each in found.checkpoints]


@scenario(REST, "`assign_session_project`")
def assign_project(ctx: ScenarioContext) -> None:
    need(ctx.rest, "assign_session_project")(session_of(ctx), "compat").result()


@scenario(REST, "`export_session_trace`")
def export_trace(ctx: ScenarioContext) -> None:
    url = need(ctx.rest, "export_session_trace")(session_of(ctx)).result()
    assert ctx.fetch(url)


@scenario(REST, "async methods")
def rest_async(ctx: ScenarioContext) -> None:
    async def ask() -> tuple[Any, Any]:
        runs = await ctx.rest.list_training_runs_async()
        listed = await ctx.rest.list_checkpoints_async(ctx.model_id)
        return runs.training_runs, listed.checkpoints

    assert ctx.state
    runs, listed = asyncio.run(ask())
    assert ctx.model_id in [run.training_run_id for run in runs] and listed


def usage_client(ctx: ScenarioContext, name: str) -> Any:
    """The method, of the admin client where there is one, else of the REST client."""
    if hasattr(tinker, "AdminClient"):
        return need(tinker.AdminClient(base_url=ctx.url, api_key=ctx.key), name)
    return need(ctx.rest, name)


@scenario(ADMIN, "`get_billing_usage`")
def billing(ctx: ScenarioContext) -> None:
    get = usage_client(ctx, "get_billing_usage")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    assert get(now - timedelta(days=1), now + timedelta(days=1)).result() is not None


@scenario(ADMIN, "`get_current_checkpoint_storage_usage`")
def storage_usage(ctx: ScenarioContext) -> None:
    assert usage_client(ctx, "get_current_checkpoint_storage_usage")().result() is not None


@scenario(ADMIN, "`get_audit_log`")
def audit_log(ctx: ScenarioContext) -> None:
    get = usage_client(ctx, "get_audit_log")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert get().result() is not None
