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

from tests.compat.scenarios.context import RANK, Lab, need, quietly, refusal, scenario

REST, ADMIN = "REST client", "Usage and audit"


def paths_of(lab: Lab) -> list[str]:
    """The checkpoints of the run, as the server lists them."""
    listed = lab.rest.list_checkpoints(lab.model_id).result().checkpoints
    return [each.tinker_path for each in listed]


def session_of(lab: Lab) -> str:
    """The id of the session that the run belongs to."""
    return lab.model_id.partition(":")[0]


@scenario(REST, "`list_training_runs`, `get_training_run`")
def training_runs(lab: Lab) -> None:
    runs = lab.rest.list_training_runs().result().training_runs
    assert lab.model_id in [run.training_run_id for run in runs]
    run = lab.rest.get_training_run(lab.model_id).result()
    assert (run.base_model, run.lora_rank) == (lab.base_model, RANK)


@scenario(REST, "`get_training_run_by_tinker_path`")
def run_by_path(lab: Lab) -> None:
    run = lab.rest.get_training_run_by_tinker_path(lab.state).result()
    assert run.training_run_id == lab.model_id


@scenario(REST, "`get_weights_info_by_tinker_path`")
def weights_info(lab: Lab) -> None:
    info = need(lab.rest, "get_weights_info_by_tinker_path")(lab.state).result()
    assert (info.base_model, info.lora_rank) == (lab.base_model, RANK)


@scenario(REST, "`list_checkpoints`, `list_user_checkpoints`")
def checkpoints(lab: Lab) -> None:
    assert {lab.state, lab.weights} <= set(paths_of(lab))
    mine = need(lab.rest, "list_user_checkpoints")(limit=100).result().checkpoints
    assert {lab.state, lab.weights} <= {each.tinker_path for each in mine}


@scenario(REST, "lists of a tenant that holds `external` checkpoints")
def lists_with_external(lab: Lab) -> None:
    """A type of checkpoint that this version does not know must not break its lists."""
    rest = tinker.ServiceClient(base_url=lab.url, api_key=lab.external_key).create_rest_client()
    listed = rest.list_checkpoints(lab.external_run).result().checkpoints
    assert f"tinker://{lab.external_run}/weights/plain" in [each.tinker_path for each in listed]
    if hasattr(rest, "list_user_checkpoints"):
        assert rest.list_user_checkpoints().result().checkpoints


@scenario(REST, "`delete_checkpoint`")
def delete(lab: Lab) -> None:
    path = lab.spare("deleted")
    name = path.partition(f"{lab.model_id}/")[2]
    assert path in paths_of(lab)
    lab.rest.delete_checkpoint(lab.model_id, name).result()
    assert path not in paths_of(lab)


@scenario(REST, "`delete_checkpoint_from_tinker_path`")
def delete_by_path(lab: Lab) -> None:
    path = lab.spare("deleted-by-path")
    lab.rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in paths_of(lab)


@scenario(REST, "publish and unpublish a checkpoint")
def publish(lab: Lab) -> None:
    publish_it = need(lab.rest, "publish_checkpoint_from_tinker_path")
    path = lab.spare("published")
    publish_it(path).result()
    other = tinker.ServiceClient(base_url=lab.url, api_key=lab.other_key)
    assert other.create_training_client_from_state(path) is not None
    lab.rest.unpublish_checkpoint_from_tinker_path(path).result()
    errors = (tinker.NotFoundError, tinker.PermissionDeniedError, tinker.RequestFailedError)
    refusal(lambda: other.create_training_client_from_state(path), *errors)


@scenario(REST, "`set_checkpoint_ttl_from_tinker_path`")
def set_ttl(lab: Lab) -> None:
    set_it = need(lab.rest, "set_checkpoint_ttl_from_tinker_path")
    path = lab.spare("with-ttl")
    set_it(path, 7200).result()
    set_it(path, None).result()
    assert path in paths_of(lab)


@scenario(REST, "download an archive")
def archive(lab: Lab) -> None:
    ask = need(lab.rest, "get_checkpoint_archive_url_from_tinker_path")
    answer = quietly(lambda: ask(lab.weights).result())
    with tarfile.open(fileobj=io.BytesIO(lab.fetch(answer.url))) as files:
        names = [each.name for each in files if each.isfile()]
    assert any(name.endswith("adapter_model.safetensors") for name in names), names


@scenario(REST, "`save_weights_external`, `get_external_weights_urls`")
def external_weights(lab: Lab) -> None:
    save = need(lab.client, "save_weights_external")
    path = save("exported").result().path
    urls = lab.rest.get_external_weights_urls(path).result().urls
    assert len(lab.fetch(urls["adapter_model.safetensors"])) > 1000
    lab.rest.delete_checkpoint_from_tinker_path(path).result()


@scenario(REST, "`copy_weights`")
def copy_weights(lab: Lab) -> None:
    copied = need(lab.rest, "copy_weights")(lab.state, "compat").result()
    assert copied.startswith("tinker://") and copied != lab.state


@scenario(REST, "`list_sessions`, `get_session`")
def sessions(lab: Lab) -> None:
    assert session_of(lab) in need(lab.rest, "list_sessions")(limit=100).result().sessions
    assert lab.model_id in lab.rest.get_session(session_of(lab)).result().training_run_ids


@scenario(REST, "`get_sampler`")
def sampler_info(lab: Lab) -> None:
    get = need(lab.rest, "get_sampler")
    assert lab.sampler is not None
    found = lab.rest.get_session(session_of(lab)).result().sampler_ids
    assert lab.base_model in {get(each).result().base_model for each in found}


@scenario(REST, "`search_sessions`")
def search_sessions(lab: Lab) -> None:
    search = need(lab.rest, "search_sessions")
    request = types.SessionSearchRequest(session_id=session_of(lab))
    assert len(quietly(lambda: search(request).result()).sessions) == 1


@scenario(REST, "`search_checkpoints`")
def search_checkpoints(lab: Lab) -> None:
    search = need(lab.rest, "search_checkpoints")
    found = quietly(lambda: search(types.CheckpointSearchRequest()).result())
    assert lab.state in [each.tinker_path for each in found.checkpoints]


@scenario(REST, "`assign_session_project`")
def assign_project(lab: Lab) -> None:
    need(lab.rest, "assign_session_project")(session_of(lab), "compat").result()


@scenario(REST, "`export_session_trace`")
def export_trace(lab: Lab) -> None:
    url = need(lab.rest, "export_session_trace")(session_of(lab)).result()
    assert lab.fetch(url)


@scenario(REST, "async methods")
def rest_async(lab: Lab) -> None:
    async def ask() -> tuple[Any, Any]:
        runs = await lab.rest.list_training_runs_async()
        listed = await lab.rest.list_checkpoints_async(lab.model_id)
        return runs.training_runs, listed.checkpoints

    assert lab.state
    runs, listed = asyncio.run(ask())
    assert lab.model_id in [run.training_run_id for run in runs] and listed


def usage_client(lab: Lab, name: str) -> Any:
    """The method, of the admin client where there is one, else of the REST client."""
    if hasattr(tinker, "AdminClient"):
        return need(tinker.AdminClient(base_url=lab.url, api_key=lab.key), name)
    return need(lab.rest, name)


@scenario(ADMIN, "`get_billing_usage`")
def billing(lab: Lab) -> None:
    get = usage_client(lab, "get_billing_usage")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    assert get(now - timedelta(days=1), now + timedelta(days=1)).result() is not None


@scenario(ADMIN, "`get_current_checkpoint_storage_usage`")
def storage_usage(lab: Lab) -> None:
    assert usage_client(lab, "get_current_checkpoint_storage_usage")().result() is not None


@scenario(ADMIN, "`get_audit_log`")
def audit_log(lab: Lab) -> None:
    get = usage_client(lab, "get_audit_log")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert get().result() is not None
