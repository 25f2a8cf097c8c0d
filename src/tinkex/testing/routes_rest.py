"""Lists and searches: runs, checkpoints, sessions, audit and usage."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tinkex import types
from tinkex.testing.answers import Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.downloads import trace_url
from tinkex.testing.searching import search
from tinkex.testing.state import Handler, Model, World
from tinkex.testing.tenants import owner_urn
from tinkex.wire.messages import AssignProjectRequest, RenameRunRequest, ReportMetricsRequest

_SCOPES = ("owned", "accessible")
_GIGABYTE = 10**9


def list_runs(world: World, call: Call) -> Answer:
    """A page of training runs, newest first."""
    project = call.query.get("project_id")
    runs = [
        model
        for model in reversed(world.models.values())
        if _may_see(world, call, model)
        and project in {None, model.session.project_id}
        and _is_like(call, model)
    ]
    shown, cursor = _page(call, runs, default_limit=20)
    return json_answer({"training_runs": [_run(world, run) for run in shown], "cursor": cursor})


def get_run(world: World, call: Call) -> Answer:
    """One training run; that it was unloaded does not matter."""
    run_id = call.ids["training_run_id"]
    model = world.models.get(run_id)
    if model is None or not _may_see(world, call, model):
        raise Refusal(404, f"there is no training run {run_id!r}")
    return json_answer(_run(world, model))


def run_metrics(world: World, call: Call) -> Answer:
    """How a run of the caller's goes."""
    model = _own_model(world, call)
    after = _number(call, "after", 0) if "after" in call.query else None
    is_over = model.session.finish_reason is not None
    status = {"training_run_id": model.model_id, "status": "finished" if is_over else "active"}
    return json_answer(status | model.progress.describe(after, _number(call, "limit", 100)))


def report_run_metrics(world: World, call: Call) -> Answer:
    """Add what a client measured to one of its optimizer steps."""
    model = _own_model(world, call)
    request = world.read(call, ReportMetricsRequest)
    if not model.progress.add_metrics(request.seq_id, request.metrics):
        raise Refusal(404, f"there is no optimizer step {request.seq_id}")
    return json_answer({})


def rename_run(world: World, call: Call) -> Answer:
    """Name a training run, or take its name away."""
    model = _own_model(world, call)
    name = world.read(call, RenameRunRequest).name
    others = {key: value for key, value in (model.user_metadata or {}).items() if key != "name"}
    model.user_metadata = others | ({"name": name} if name else {})
    return json_answer({})


def _own_model(world: World, call: Call) -> Model:
    run_id = call.ids["training_run_id"]
    model = world.models.get(run_id)
    if model is None or model.tenant != call.tenant:
        raise Refusal(404, f"there is no training run {run_id!r}")
    return model


def _is_like(call: Call, model: Model) -> bool:
    text = call.query.get("search", "")
    name = str((model.user_metadata or {}).get("name", ""))
    return model.model_id.startswith(text) or text.lower() in name.lower()


def _may_see(world: World, call: Call, model: Model) -> bool:
    scope = call.query.get("access_scope", "owned")
    if scope not in _SCOPES:
        raise Refusal(422, f"access_scope is {scope!r}, expected one of {', '.join(_SCOPES)}")
    if model.tenant == call.tenant:
        return True
    checkpoints = world.vault.owned(model.tenant, model.model_id)
    return scope == "accessible" and any(checkpoint.is_public for checkpoint in checkpoints)


def _run(world: World, model: Model) -> dict[str, Any]:
    newest: dict[str, dict[str, Any]] = {}
    for checkpoint in world.vault.owned(model.tenant, model.model_id):
        newest.setdefault(checkpoint.path.checkpoint_type, checkpoint.describe())
    return {
        "training_run_id": model.model_id,
        "base_model": model.recipe.base_model,
        "model_owner": owner_urn(model.tenant),
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.recipe.rank,
        "last_request_time": model.last_request_at,
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": model.user_metadata,
    }


def list_checkpoints(world: World, call: Call) -> Answer:
    """The checkpoints of one run."""
    run_id = call.ids["training_run_id"]
    found = world.vault.owned(call.tenant, run_id)
    model = world.models.get(run_id)
    if not found and (model is None or model.tenant != call.tenant):
        raise Refusal(404, f"there is no training run {run_id!r}")
    return json_answer({"checkpoints": [checkpoint.describe() for checkpoint in found]})


def list_user_checkpoints(world: World, call: Call) -> Answer:
    """A page of the caller's checkpoints, newest first."""
    shown, cursor = _page(call, world.vault.owned(call.tenant), default_limit=100)
    checkpoints = [checkpoint.describe() for checkpoint in shown]
    return json_answer({"checkpoints": checkpoints, "cursor": cursor})


def get_tokenizer(world: World, call: Call) -> Answer:
    """The models here count bytes; none has a tokenizer with files."""
    raise Refusal(404, f"there is no tokenizer of a base model {call.query.get('base_model')!r}")


def list_sessions(world: World, call: Call) -> Answer:
    """A page of session ids, newest first."""
    own = [
        session for session in reversed(world.sessions.values()) if session.tenant == call.tenant
    ]
    shown, _ = _page(call, own, default_limit=20)
    return json_answer({"sessions": [session.session_id for session in shown]})


def get_session(world: World, call: Call) -> Answer:
    """What belongs to a session."""
    session = world.session(call.tenant, call.ids["session_id"])
    runs = [model.model_id for model in world.models.values() if model.session is session]
    samplers = [
        sampling.sampler_id
        for sampling in world.samplers.values()
        if sampling.session_id == session.session_id
    ]
    return json_answer(
        {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
    )


def assign_project(world: World, call: Call) -> Answer:
    """Move a session to a project."""
    request = world.read(call, AssignProjectRequest)
    session = world.session(call.tenant, call.ids["session_id"])
    session.project_id = request.project_id
    world.ledger.note(call.tenant, "project_assigned")
    return json_answer({})


def trace_export(world: World, call: Call) -> Answer:
    """A session's trace: pending when first asked for, then ready."""
    session = world.session(call.tenant, call.ids["session_id"])
    session.num_trace_requests += 1
    if session.num_trace_requests == 1:
        return json_answer({"status": "pending"})
    return json_answer({"status": "ready", "url": trace_url(world.url, session.session_id)})


def search_sessions(world: World, call: Call) -> Answer:
    """A page of the sessions that fit."""
    request = world.read(call, types.SessionSearchRequest)
    return json_answer(search(world, call.tenant, request))


def audit_log(world: World, call: Call) -> Answer:
    """What the caller did, oldest first."""
    wanted = call.query.get("event_type", "all")
    day = call.query.get("day")
    entries = [
        {
            "timestamp": entry.timestamp,
            "event": entry.event,
            "event_details": {"actor": owner_urn(entry.tenant), "tinker_path": entry.tinker_path},
            "model_id": entry.model_id,
            "tinker_path": entry.tinker_path,
        }
        for entry in world.ledger.entries
        if entry.tenant == call.tenant
        and (wanted == "all" or entry.event.startswith(wanted.removesuffix("s")))
        and day in {None, entry.timestamp.date().isoformat()}
    ]
    return json_answer({"entries": entries})


def billing_usage(world: World, call: Call) -> Answer:
    """What the caller used, by the hour."""
    start, end = (_time(call, name) for name in ("starting_on", "ending_before"))
    events = world.ledger.usage(call.tenant, start, end)
    sessions = {
        event["session_id"]: {"user_metadata": world.sessions[event["session_id"]].user_metadata}
        for event in events
        if event["session_id"] in world.sessions
    }
    return json_answer({"data": events, "sessions": sessions})


def storage_usage(world: World, call: Call) -> Answer:
    """What the caller's checkpoints take."""
    owned = world.vault.owned(call.tenant)
    size = sum(checkpoint.size_bytes for checkpoint in owned)
    item = {
        "project_id": call.query.get("project_id", "default"),
        "org_user_urn": owner_urn(call.tenant),
        "checkpoint_count": len(owned),
        "size_bytes": size,
        "size_gigabytes": size / _GIGABYTE,
    }
    return json_answer({"data": [item] if owned else []})


def _page(call: Call, items: Sequence[Any], default_limit: int) -> tuple[Sequence[Any], Any]:
    offset, limit = _number(call, "offset", 0), _number(call, "limit", default_limit)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _number(call: Call, name: str, default: int) -> int:
    text = call.query.get(name, str(default))
    if not text.isdecimal():
        raise Refusal(422, f"{name} is {text!r}, expected a number of 0 or more")
    return int(text)


def _time(call: Call, name: str) -> datetime:
    text = call.query.get(name, "")
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise Refusal(422, f"{name} is {text!r}, expected a time in RFC 3339") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def quotas(world: World, call: Call) -> Answer:
    """A server without limits."""
    owned = world.vault.owned(call.tenant)
    used = {
        "models": 0,
        "checkpoints": len(owned),
        "stored_bytes": sum(checkpoint.size_bytes for checkpoint in owned),
        "tokens_per_hour": 0,
        "sessions_per_hour": 0,
    }
    listed = [{"name": name, "used": count, "limit": None} for name, count in used.items()]
    return json_answer({"quotas": listed})


ROUTES: dict[str, Handler] = {
    "get_quotas": quotas,
    "list_training_runs": list_runs,
    "get_training_run": get_run,
    "get_run_metrics": run_metrics,
    "report_run_metrics": report_run_metrics,
    "rename_training_run": rename_run,
    "list_checkpoints": list_checkpoints,
    "list_model_checkpoints": list_checkpoints,
    "list_user_checkpoints": list_user_checkpoints,
    "get_tokenizer": get_tokenizer,
    "list_sessions": list_sessions,
    "get_session": get_session,
    "assign_session_project": assign_project,
    "export_session_trace": trace_export,
    "search_sessions": search_sessions,
    "get_audit_log": audit_log,
    "get_billing_usage": billing_usage,
    "get_current_checkpoint_storage_usage": storage_usage,
}
