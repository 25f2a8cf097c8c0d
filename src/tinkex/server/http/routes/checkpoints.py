"""Checkpoint endpoints: lists, publishing, time to live, deletion and download links."""

from __future__ import annotations

from email.utils import format_datetime

from tinkex import clock, types
from tinkex.checkpoint.manifest import SERVER_MANIFEST_NAME, downloadable_names
from tinkex.checkpoint.storage import FileStorage
from tinkex.errors import CheckpointError, ConflictError, RequestErrorCategory, StoreError
from tinkex.ids import check_ttl
from tinkex.logs import get_logger
from tinkex.server.http.downloads import FileArea, FileRef, sign_url
from tinkex.server.http.ownership import (
    checkpoint_path,
    require_checkpoint,
    require_readable_checkpoint,
    require_run,
    resolve_readers,
)
from tinkex.server.http.request_context import (
    Handler,
    RawResponse,
    RequestContext,
    Services,
    run_in_thread,
)
from tinkex.server.http.serializers import (
    FIRST_WITH_EXTERNAL,
    client_version,
    serialize_checkpoint,
    to_datetime,
)
from tinkex.server.http.store_access import read, record_checkpoint_event, write
from tinkex.server.http.validation import parse_page
from tinkex.store import checkpoint_search, checkpoints, sessions
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord
from tinkex.wire.codec import encode_json
from tinkex.wire.messages import ArchiveReply, TtlRequest

LOG = get_logger(__name__)
DEFAULT_LIMIT = 100
ARCHIVE_NAME = "checkpoint.tar"
_EMPTY_RESPONSE = RawResponse()


# --- lists -----------------------------------------------------------------------------------
async def list_checkpoints(
    services: Services, context: RequestContext[object]
) -> types.CheckpointsListResponse:
    """List the checkpoints of one of the caller's runs, newest first."""
    run_id = context.ids["training_run_id"]

    def query(db: Connection) -> list[types.Checkpoint]:
        run = require_run(db, context.tenant_id, run_id, "training run")
        session = sessions.find(db, run.session_id)
        version = client_version(context, session.sdk_version if session is not None else "")
        records = checkpoints.list_by_run(
            db, run_id, clock.now(), with_external=version >= FIRST_WITH_EXTERNAL
        )
        return [serialize_checkpoint(record) for record in records]

    return types.CheckpointsListResponse(checkpoints=await read(services, query))


async def list_user_checkpoints(
    services: Services, context: RequestContext[object]
) -> types.CheckpointsListResponse:
    """List a page of the caller's checkpoints, newest first."""
    limit, offset = parse_page(context, DEFAULT_LIMIT)
    with_external = client_version(context) >= FIRST_WITH_EXTERNAL

    def query(db: Connection) -> types.CheckpointsListResponse:
        records, total = checkpoints.list_page(
            db,
            context.tenant_id,
            limit=limit,
            offset=offset,
            now=clock.now(),
            with_external=with_external,
        )
        return types.CheckpointsListResponse(
            checkpoints=[serialize_checkpoint(record) for record in records],
            cursor=types.Cursor(offset=offset, limit=limit, total_count=total),
        )

    return await read(services, query)


async def search_checkpoints(
    services: Services, context: RequestContext[types.CheckpointSearchRequest]
) -> types.CheckpointSearchResponse:
    """List a page of the caller's checkpoints that match a search, newest first."""
    identity = context.identity
    page = await read(
        services,
        lambda db: checkpoint_search.search(
            db, identity.tenant_id, identity.urn, context.request, clock.now()
        ),
    )
    return types.CheckpointSearchResponse(
        checkpoints=[serialize_checkpoint(record) for record in page.checkpoints],
        next_cursor=page.next_cursor,
    )


# --- changes ---------------------------------------------------------------------------------
def _require_own_checkpoint(db: Connection, context: RequestContext[object]) -> CheckpointRecord:
    path = checkpoint_path(context.ids["training_run_id"], context.ids["checkpoint_id"])
    return require_checkpoint(db, context.tenant_id, path, clock.now())


async def delete_checkpoint(services: Services, context: RequestContext[object]) -> RawResponse:
    """Delete a checkpoint; the worker removes its files soon after."""

    def transaction(db: Connection) -> None:
        checkpoint = _require_own_checkpoint(db, context)
        checkpoints.delete(db, checkpoint.id, clock.now())
        record_checkpoint_event(db, context.identity, "checkpoint_deleted", checkpoint)

    await write(services, transaction)
    # The worker removes the files; a worker on demand may have to start for that.
    await run_in_thread(services.queue.wake_worker)
    return _EMPTY_RESPONSE


async def publish(services: Services, context: RequestContext[object]) -> RawResponse:
    """Make a checkpoint public; 409 if it already is."""
    return await _set_public(services, context, True)


async def unpublish(services: Services, context: RequestContext[object]) -> RawResponse:
    """Make a checkpoint private; 409 if it already is."""
    return await _set_public(services, context, False)


async def _set_public(
    services: Services, context: RequestContext[object], is_public: bool
) -> RawResponse:
    event = "checkpoint_published" if is_public else "checkpoint_unpublished"

    def transaction(db: Connection) -> None:
        checkpoint = _require_own_checkpoint(db, context)
        if not checkpoints.set_public(db, checkpoint.id, is_public):
            state = "public" if is_public else "private"
            raise ConflictError(
                f"{checkpoint.path} is {state} already",
                category=RequestErrorCategory.User,
                # Otherwise clients treat a conflict as a lock and retry for minutes.
                should_retry=False,
            )
        record_checkpoint_event(db, context.identity, event, checkpoint)

    await write(services, transaction)
    return _EMPTY_RESPONSE


async def set_ttl(services: Services, context: RequestContext[TtlRequest]) -> RawResponse:
    """Set a checkpoint's time to live from now, or remove it."""
    ttl_seconds = check_ttl(context.request.ttl_seconds)
    expires_at = None if ttl_seconds is None else clock.now() + ttl_seconds

    def transaction(db: Connection) -> None:
        checkpoint = _require_own_checkpoint(db, context)
        checkpoints.set_expiry(db, checkpoint.id, expires_at)
        record_checkpoint_event(
            db, context.identity, "checkpoint_ttl_set", checkpoint, ttl_seconds=ttl_seconds
        )

    await write(services, transaction)
    return _EMPTY_RESPONSE


# --- links -----------------------------------------------------------------------------------
async def external_weights_urls(
    services: Services, context: RequestContext[object]
) -> types.ExternalWeightsUrlsResponse:
    """Return a signed URL for each file of a checkpoint that the caller may read."""
    checkpoint = await _require_downloadable(services, context)
    expires = _link_expiry(services, checkpoint)
    urls = None
    if checkpoint.place and services.config.blob_links:
        seconds = expires - clock.now()
        urls = await run_in_thread(_sign_blob_links, services.storage, checkpoint, seconds)
    if urls is None:
        names = await run_in_thread(_verified_names, services.storage, checkpoint)
        refs = {name: FileRef(FileArea.FILE, checkpoint.id, name) for name in names}
        urls = {name: _sign_link(services, context, ref, expires) for name, ref in refs.items()}
    expires_at = to_datetime(int(clock.to_wall_time(expires)))
    return types.ExternalWeightsUrlsResponse(urls=urls, expires=expires_at)


def _verified_names(storage: FileStorage, checkpoint: CheckpointRecord) -> list[str]:
    # Verified here, not with the first download: this response can carry the reason.
    opened = storage.open_checkpoint(checkpoint.id, checkpoint.place, checkpoint.path)
    with opened as directory:
        return downloadable_names(directory)


def _sign_blob_links(
    storage: FileStorage, checkpoint: CheckpointRecord, seconds: float
) -> dict[str, str] | None:
    """URLs of the object store for each file; None if it cannot sign them."""
    blobs, place = storage.cache.store, checkpoint.place
    manifest = blobs.read_manifest(place)
    try:
        blobs.check_complete(place, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is damaged on the server: {error.message}"
        ) from None
    names = [name for name in manifest.files if name != SERVER_MANIFEST_NAME]
    links = blobs.sign([f"{place}/{name}" for name in names], seconds)
    return None if links is None else dict(zip(names, links, strict=True))


async def archive(services: Services, context: RequestContext[object]) -> RawResponse:
    """Return the signed URL of a checkpoint's tar: as JSON if accepted, otherwise a redirect."""
    checkpoint = await _require_downloadable(services, context)
    expires = _link_expiry(services, checkpoint)
    url = _sign_link(
        services, context, FileRef(FileArea.ARCHIVE, checkpoint.id, ARCHIVE_NAME), expires
    )
    expires_at = to_datetime(int(clock.to_wall_time(expires)))
    body = encode_json(ArchiveReply(url=url, expires=expires_at))
    if "json" in context.headers.get("accept", ""):
        return RawResponse(body=body)
    headers = {"location": url, "expires": format_datetime(expires_at, usegmt=True)}
    return RawResponse(status=302, body=body, headers=headers)


async def _require_downloadable(
    services: Services, context: RequestContext[object]
) -> CheckpointRecord:
    path = checkpoint_path(context.ids["training_run_id"], context.ids["checkpoint_id"])
    readers = await resolve_readers(services, context)

    def find(db: Connection) -> CheckpointRecord:
        return require_readable_checkpoint(db, readers, path, clock.now())

    def find_and_record(db: Connection) -> CheckpointRecord:
        checkpoint = find(db)
        record_checkpoint_event(db, context.identity, "checkpoint_downloaded", checkpoint)
        return checkpoint

    try:
        return await write(services, find_and_record)
    except StoreError as error:
        # With a full disk, downloading weights matters more than the audit log.
        LOG.warning("cannot record a download in the audit log: %s", error)
        return await read(services, find)


def _link_expiry(services: Services, checkpoint: CheckpointRecord) -> int:
    """Expiry of a link on the server's clock: not later than that of the checkpoint."""
    until = clock.now() + services.config.url_seconds
    return int(until if checkpoint.expires_at is None else min(until, checkpoint.expires_at))


def _sign_link(
    services: Services, context: RequestContext[object], file_ref: FileRef, expires: int
) -> str:
    return sign_url(services.secret, context.base_url, file_ref, expires)


ROUTES: dict[str, Handler] = {
    "list_checkpoints": list_checkpoints,
    "list_model_checkpoints": list_checkpoints,
    "list_user_checkpoints": list_user_checkpoints,
    "search_checkpoints": search_checkpoints,
    "delete_checkpoint": delete_checkpoint,
    "publish_checkpoint": publish,
    "unpublish_checkpoint": unpublish,
    "set_checkpoint_ttl": set_ttl,
    "external_weights_urls": external_weights_urls,
    "checkpoint_archive": archive,
}
