"""Copy checkpoints: first the files, then the record that makes the copy visible."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from tinkex import clock, types
from tinkex.checkpoint.manifest import manifest_name, read_manifest
from tinkex.errors import CheckpointError, StoreFull, UnprocessableEntityError
from tinkex.ids import new_id
from tinkex.server.http.model_specs import insert_run, stored_spec
from tinkex.server.http.ownership import require_open_session
from tinkex.server.http.submission import build_model_id
from tinkex.server.http.validation import check_project
from tinkex.store import checkpoints, sessions
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunState, SessionRecord
from tinkex.system.atomic import new_directory
from tinkex.system.disk_errors import is_disk_full

DEFAULT_PROJECT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDestination:
    """The run and session that a copy will belong to."""

    tenant_id: str
    run_id: str
    session: SessionRecord
    is_new: bool
    """Whether the session still has to be inserted."""


def resolve_destination(
    db: Connection, tenant_id: str, request: types.CopyWeightsRequest
) -> CopyDestination:
    """The requested run of a session, or the first run of a new session."""
    if request.session_id is None:
        session = _build_session(tenant_id, request)
        return CopyDestination(
            tenant_id=tenant_id, run_id=build_model_id(session.id, 0), session=session, is_new=True
        )
    if request.model_seq_id is None:
        raise UnprocessableEntityError("copy_weights needs model_seq_id with session_id")
    session = require_open_session(db, tenant_id, request.session_id)
    run_id = build_model_id(session.id, request.model_seq_id)
    return CopyDestination(tenant_id=tenant_id, run_id=run_id, session=session, is_new=False)


def _build_session(tenant_id: str, request: types.CopyWeightsRequest) -> SessionRecord:
    """Build an already finished session for a copy; nothing can be trained in it."""
    now = clock.now()
    return SessionRecord(
        id=new_id(),
        tenant_id=tenant_id,
        project_id=check_project(request.destination_project_id or DEFAULT_PROJECT),
        display_name=None,
        tags=[],
        user_metadata={},
        sdk_version="",
        created_at=now,
        seen_at=now,
        finished_at=now,
        finish_reason="success",
        finish_detail=f"created for a copy of {request.source_path}",
    )


def copy_files(source: Path, target: Path) -> None:
    """Copy a checkpoint directory atomically, with hard links where possible."""
    names = [*read_manifest(source).files, manifest_name(source)]
    try:
        with new_directory(target) as scratch:
            for name in names:
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(source / name, scratch / name)
    except OSError as error:
        if is_disk_full(error):
            raise StoreFull("the server's disk is full; free space, then try again") from None
        raise CheckpointError(f"cannot copy {source.name!r}: {error.strerror}") from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        # Saved files never change, so two checkpoints can share them.
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Not every file system supports hard links.
        shutil.copyfile(source, target, follow_symlinks=False)


def insert_copy(
    db: Connection,
    source: CheckpointRecord,
    copy_id: str,
    destination: CopyDestination,
    ttl_seconds: int | None,
) -> CheckpointRecord:
    """Insert the record of a copy as the only checkpoint of a new, unloaded run."""
    now = clock.now()
    session = destination.session
    if destination.is_new:
        sessions.insert(db, session)
    copy = replace(
        source,
        id=copy_id,
        tenant_id=destination.tenant_id,
        session_id=session.id,
        project_id=session.project_id,
        run_id=destination.run_id,
        is_public=False,
        created_at=now,
        expires_at=None if ttl_seconds is None else now + ttl_seconds,
    )
    insert_run(db, session, destination.run_id, stored_spec(source), None, RunState.UNLOADED)
    checkpoints.insert(db, copy)
    return copy
