"""Checkpoints: lists, sharing, lifetime, deletion, and links to their files."""

from __future__ import annotations

from email.utils import format_datetime
from typing import Any

from tinkex import clock, types
from tinkex.checkpoint.manifest import downloadable_names
from tinkex.errors import ConflictError, RequestErrorCategory, StoreError
from tinkex.lifetimes import check_ttl
from tinkex.logs import get_logger
from tinkex.server.access import readers_of
from tinkex.server.auditing import note_checkpoint
from tinkex.server.call import Answer, Call, Handler, Services, in_thread
from tinkex.server.checks import page_of
from tinkex.server.client_version import KNOWS_EXTERNAL, client_version
from tinkex.server.describe import describe_checkpoint, moment
from tinkex.server.ownership import checkpoint_of, path_of, readable_checkpoint, run_of
from tinkex.server.signing import Place, Shelf, sign
from tinkex.server.transactions import read, write
from tinkex.store import checkpoints, sessions
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord
from tinkex.wire.codec import encode_json
from tinkex.wire.messages import ArchiveReply, TtlRequest

LOG = get_logger(__name__)
DEFAULT_LIMIT = 100
ARCHIVE_NAME = "checkpoint.tar"
_NOTHING = Answer()


# --- lists -----------------------------------------------------------------------------------
async def list_checkpoints(services: Services, call: Call[Any]) -> types.CheckpointsListResponse:
    """The checkpoints of one of the caller's runs, newest first."""
    run_id = call.ids["training_run_id"]

    def look(db: Connection) -> list[types.Checkpoint]:
        run = run_of(db, call.tenant_id, run_id, "training run")
        session = sessions.find(db, run.session_id)
        version = client_version(call, session.sdk_version if session is not None else "")
        found = checkpoints.list_by_run(
            db, run_id, clock.now(), with_external=version >= KNOWS_EXTERNAL
        )
        return [describe_checkpoint(row) for row in found]

    return types.CheckpointsListResponse(checkpoints=await read(services, look))


async def list_user_checkpoints(
    services: Services, call: Call[Any]
) -> types.CheckpointsListResponse:
    """A page of the caller's checkpoints, newest first."""
    limit, offset = page_of(call, DEFAULT_LIMIT)
    with_external = client_version(call) >= KNOWS_EXTERNAL

    def look(db: Connection) -> types.CheckpointsListResponse:
        found, total = checkpoints.list_page(
            db,
            call.tenant_id,
            limit=limit,
            offset=offset,
            now=clock.now(),
            with_external=with_external,
        )
        return types.CheckpointsListResponse(
            checkpoints=[describe_checkpoint(checkpoint) for checkpoint in found],
            cursor=types.Cursor(offset=offset, limit=limit, total_count=total),
        )

    return await read(services, look)


# --- changes ---------------------------------------------------------------------------------
def _own(db: Connection, call: Call[Any]) -> CheckpointRecord:
    path = path_of(call.ids["training_run_id"], call.ids["checkpoint_id"])
    return checkpoint_of(db, call.tenant_id, path, clock.now())


async def delete_checkpoint(services: Services, call: Call[Any]) -> Answer:
    """Delete a checkpoint; its files go soon after."""

    def change(db: Connection) -> None:
        checkpoint = _own(db, call)
        checkpoints.delete(db, checkpoint.id, clock.now())
        note_checkpoint(db, call.identity, "checkpoint_deleted", checkpoint)

    await write(services, change)
    # The worker removes files; one that starts on demand has to start for that.
    await in_thread(services.queue.wake_worker)
    return _NOTHING


async def publish(services: Services, call: Call[Any]) -> Answer:
    """Let everybody read a checkpoint; 409 if everybody may."""
    return await _set_public(services, call, True)


async def unpublish(services: Services, call: Call[Any]) -> Answer:
    """Keep a checkpoint to its owner again; 409 if it is."""
    return await _set_public(services, call, False)


async def _set_public(services: Services, call: Call[Any], is_public: bool) -> Answer:
    event = "checkpoint_published" if is_public else "checkpoint_unpublished"

    def change(db: Connection) -> None:
        checkpoint = _own(db, call)
        if not checkpoints.set_public(db, checkpoint.id, is_public):
            state = "public" if is_public else "private"
            raise ConflictError(
                f"{checkpoint.path} is {state} already",
                category=RequestErrorCategory.User,
                # Without this, clients take a conflict for a lock and try for minutes.
                should_retry=False,
            )
        note_checkpoint(db, call.identity, event, checkpoint)

    await write(services, change)
    return _NOTHING


async def set_ttl(services: Services, call: Call[TtlRequest]) -> Answer:
    """Set a checkpoint's time to live, counted from now, or remove it."""
    ttl_seconds = check_ttl(call.request.ttl_seconds)
    expires_at = None if ttl_seconds is None else clock.now() + ttl_seconds

    def change(db: Connection) -> None:
        checkpoint = _own(db, call)
        checkpoints.set_expiry(db, checkpoint.id, expires_at)
        note_checkpoint(
            db, call.identity, "checkpoint_ttl_set", checkpoint, ttl_seconds=ttl_seconds
        )

    await write(services, change)
    return _NOTHING


# --- links -----------------------------------------------------------------------------------
async def external_weights_urls(
    services: Services, call: Call[Any]
) -> types.ExternalWeightsUrlsResponse:
    """A link per file of a checkpoint that the caller may read."""
    checkpoint = await _downloadable(services, call)
    directory = services.home.checkpoint_directory(checkpoint.id)
    # Here rather than with the first file: this answer carries the reason.
    await in_thread(services.verified.verify, directory, checkpoint.path)
    names = await in_thread(downloadable_names, directory)
    expires = _expiry(services, checkpoint)
    urls = {
        name: _link(services, call, Place(Shelf.FILE, checkpoint.id, name), expires)
        for name in names
    }
    shown = moment(int(clock.to_wall_time(expires)))
    return types.ExternalWeightsUrlsResponse(urls=urls, expires=shown)


async def archive(services: Services, call: Call[Any]) -> Answer:
    """The link to a checkpoint's tar: in JSON for whoever asks for that, else by redirection."""
    checkpoint = await _downloadable(services, call)
    expires = _expiry(services, checkpoint)
    url = _link(services, call, Place(Shelf.ARCHIVE, checkpoint.id, ARCHIVE_NAME), expires)
    shown = moment(int(clock.to_wall_time(expires)))
    body = encode_json(ArchiveReply(url=url, expires=shown))
    if "json" in call.headers.get("accept", ""):
        return Answer(body=body)
    until = format_datetime(shown, usegmt=True)
    return Answer(status=302, body=body, headers={"location": url, "expires": until})


async def _downloadable(services: Services, call: Call[Any]) -> CheckpointRecord:
    path = path_of(call.ids["training_run_id"], call.ids["checkpoint_id"])
    readers = await readers_of(services, call)

    def find(db: Connection) -> CheckpointRecord:
        return readable_checkpoint(db, readers, path, clock.now())

    def find_and_note(db: Connection) -> CheckpointRecord:
        checkpoint = find(db)
        note_checkpoint(db, call.identity, "checkpoint_downloaded", checkpoint)
        return checkpoint

    try:
        return await write(services, find_and_note)
    except StoreError as error:
        # Whose disk is full wants to get weights off it more than an entry in a log.
        LOG.warning("a download is not in the audit log: %s", error)
        return await read(services, find)


def _expiry(services: Services, checkpoint: CheckpointRecord) -> int:
    """When a link ends by the server's clock: after its time, or with the checkpoint."""
    until = clock.now() + services.config.url_seconds
    return int(until if checkpoint.expires_at is None else min(until, checkpoint.expires_at))


def _link(services: Services, call: Call[Any], place: Place, expires: int) -> str:
    return sign(services.secret, call.base_url, place, expires)


ROUTES: dict[str, Handler] = {
    "list_checkpoints": list_checkpoints,
    "list_model_checkpoints": list_checkpoints,
    "list_user_checkpoints": list_user_checkpoints,
    "delete_checkpoint": delete_checkpoint,
    "publish_checkpoint": publish,
    "unpublish_checkpoint": unpublish,
    "set_checkpoint_ttl": set_ttl,
    "external_weights_urls": external_weights_urls,
    "checkpoint_archive": archive,
}
