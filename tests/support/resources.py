"""Things that a tenant can have: sessions, models, samplers, and checkpoints with files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.server_harness import BASE_MODEL, KEY, ServerHarness
from tinkex.checkpoint.manifest import write_manifest
from tinkex.ids import new_id
from tinkex.store import checkpoints, runs, sessions
from tinkex.store.records import CheckpointRecord, RunState
from tinkex.system.atomic import new_directory

FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": bytes(range(256)) * 40}
SPEC = {
    "base_model": BASE_MODEL,
    "rank": 4,
    "seed": 7,
    "train_unembed": True,
    "train_mlp": False,
    "train_attn": True,
    "optimizer": {"type": "dimuon", "version": 1},
}


def create_model(
    harness: ServerHarness, session_id: str, key: str = KEY, **fields: Any
) -> httpx.Response:
    """Ask for a model."""
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 4},
        "type": "create_model",
    }
    return harness.post("/create_model", body | fields, key=key)


def create_ready_model(
    harness: ServerHarness, session_id: str, number: int = 0, key: str = KEY
) -> str:
    """A model that takes operations."""
    answer = create_model(harness, session_id, key, model_seq_id=number)
    assert answer.status_code == 200, answer.text
    run_id: str = answer.json()["model_id"]
    harness.write(lambda db: runs.set_state(db, run_id, RunState.READY))
    return run_id


def create_checkpoint(
    harness: ServerHarness,
    run_id: str,
    name: str = "first",
    segment: str = "weights",
    files: Mapping[str, bytes] = FILES,
    **fields: Any,
) -> CheckpointRecord:
    """A checkpoint of a model, with files, as the worker leaves it."""
    checkpoint_id = new_id()
    with new_directory(harness.services.home.checkpoint_directory(checkpoint_id)) as directory:
        for path, content in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        write_manifest(directory)
    run = harness.read(lambda db: runs.find(db, run_id))
    session = harness.read(lambda db: sessions.find(db, run.session_id))
    values = {
        "id": checkpoint_id,
        "tenant_id": run.tenant_id,
        "session_id": run.session_id,
        "project_id": session.project_id,
        "run_id": run_id,
        "segment": segment,
        "name": name,
        "base_model": run.base_model,
        "spec": SPEC,
        "size_bytes": sum(map(len, files.values())),
        "created_at": time.time(),
    }
    checkpoint = CheckpointRecord(**(values | fields))
    harness.write(lambda db: checkpoints.insert(db, checkpoint))
    return checkpoint


def checkpoint_url(checkpoint: CheckpointRecord, tail: str = "") -> str:
    """Where a checkpoint's endpoints are, below /api/v1."""
    path = checkpoint.path
    return f"/training_runs/{path.run_id}/checkpoints/{path.checkpoint_id}{tail}"


def publish_checkpoint(harness: ServerHarness, checkpoint: CheckpointRecord) -> None:
    """Publish a checkpoint."""
    harness.write(lambda db: checkpoints.set_public(db, checkpoint.id, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResources:
    """One of each kind, all of one tenant."""

    session_id: str
    run_id: str
    sampler_id: str
    checkpoint: CheckpointRecord
    request_id: str


def create_resources(harness: ServerHarness, key: str = KEY) -> TenantResources:
    """A tenant with one thing of each kind, and a promise that waits."""
    session_id = harness.session(key)
    run_id = create_ready_model(harness, session_id, key=key)
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = harness.post("/create_sampling_session", body, key=key)
    assert sampler.status_code == 200, sampler.text
    step = {"model_id": run_id, "seq_id": 1, "adam_params": {}}
    future = harness.post("/optim_step", step, key=key)
    assert future.status_code == 200, future.text
    return TenantResources(
        session_id=session_id,
        run_id=run_id,
        sampler_id=sampler.json()["sampling_session_id"],
        checkpoint=create_checkpoint(harness, run_id),
        request_id=future.json()["request_id"],
    )
