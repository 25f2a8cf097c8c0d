"""Start-up and sessions: configuration, credentials, heartbeats."""

from __future__ import annotations

import time

from tinkex import clock, types
from tinkex.ids import new_id
from tinkex.testing.answers import Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.state import Handler, Session, World, once_per_key
from tinkex.testing.tenants import owner_urn
from tinkex.wire.messages import FinishSessionRequest

#: What every model here claims to read.
MAX_CONTEXT_TOKENS = 32_768


def health(world: World, call: Call) -> Answer:
    """Say that the server is there."""
    return json_answer({"status": "ok"})


def capabilities(world: World, call: Call) -> Answer:
    """List the base models."""
    models = [
        {
            "model_name": name,
            "max_context_length": MAX_CONTEXT_TOKENS,
            "trainable": True,
            "sampleable": True,
        }
        for name in world.config.models
    ]
    return json_answer({"supported_models": models})


def client_config(world: World, call: Call) -> Answer:
    """Give the flags that a client starts with."""
    world.read(call, types.ClientConfigRequest)
    return json_answer(world.config.client_config)


def dynamic_config(world: World, call: Call) -> Answer:
    """Give the flags that a client asks for again and again."""
    world.read(call, types.ClientConfigRequest)
    return json_answer(world.config.dynamic_config)


def auth_token(world: World, call: Call) -> Answer:
    """Exchange a key for a token."""
    return json_answer({"jwt": world.tenants.issue_token(call.tenant)})


def api_key(world: World, call: Call) -> Answer:
    """Say whose key this is."""
    details = {
        "org_details": {"name": "Stub organization"},
        "user_details": {"email": "user@example.com"},
    }
    key_id = int(owner_urn(call.tenant)[-8:], 16)
    return json_answer({"key_id": key_id, "name": "stub key", "note": None, "details": details})


def delete_api_key(world: World, call: Call) -> Answer:
    """Revoke the key that is used."""
    world.tenants.revoke(call.tenant)
    return json_answer({})


def create_session(world: World, call: Call) -> Answer:
    """Open a session; a repeated request, known by its idempotency key, gets the same one."""
    request = world.read(call, types.CreateSessionRequest)
    session = Session(
        session_id=new_id(),
        tenant=call.tenant,
        created_at=clock.utc_now(),
        tags=request.tags,
        user_metadata=request.user_metadata or {},
        project_id=request.project_id or "default",
        display_name=request.display_name,
        sdk_version=request.sdk_version,
    )
    world.sessions[session.session_id] = session
    return json_answer({"type": "create_session", "session_id": session.session_id})


def heartbeat(world: World, call: Call) -> Answer:
    """Note that a session's client is alive; 410 if it said that it was done."""
    request = world.read(call, types.SessionHeartbeatRequest)
    session = world.session(call.tenant, request.session_id)
    if session.finish_reason is not None:
        raise Refusal(410, f"session {session.session_id!r} has finished")
    session.heartbeats.append(time.monotonic())
    return json_answer({"type": "session_heartbeat"})


def finish_session(world: World, call: Call) -> Answer:
    """Note how a session ended; the first reason stays."""
    request = world.read(call, FinishSessionRequest)
    session = world.session(call.tenant, call.ids["session_id"])
    if session.finish_reason is None:
        session.finish_reason = request.reason.type
        session.finish_detail = request.detail
    return json_answer({})


def telemetry(world: World, call: Call) -> Answer:
    """Take a batch of events; the calls are kept, which is all a test needs."""
    world.read(call, types.TelemetrySendRequest)
    return json_answer({"status": "accepted"})


ROUTES: dict[str, Handler] = {
    "health": health,
    "get_server_capabilities": capabilities,
    "client_config": client_config,
    "client_dynamic_config": dynamic_config,
    "auth_token": auth_token,
    "get_api_key": api_key,
    "delete_api_key": delete_api_key,
    "create_session": once_per_key(create_session),
    "session_heartbeat": heartbeat,
    "finish_session": finish_session,
    "telemetry": telemetry,
}
